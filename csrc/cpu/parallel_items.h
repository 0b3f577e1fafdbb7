#pragma once

#include <algorithm>

#include "mrrope/rotary.h"

namespace mrrope {

// Runs body over `items` items of `components` components each, with at least `components_per_thread` per thread: below
// that a thread costs more than it saves.
inline void parallel_for_items(const ParallelFor& parallel_for, int64_t items, int64_t components,
                               int64_t components_per_thread, const RangeBody& body) {
    if (items == 0 || components == 0) return;
    parallel_for(items, std::max<int64_t>(1, components_per_thread / components), body);
}

}  // namespace mrrope
