#pragma once

#include "mrrope/rotary_and_cache.h"
#include "rotary_plan.h"

// How a rotation on the way to a cache is laid over the GPU: pure functions of the arguments, tested without one.

namespace mrrope {

// What registers must leave room for, so that none are spilled; rounding to float8 takes more of them, and so does the
// same code before sm_90.
constexpr int rotary_and_cache_resident_blocks(bool float8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return float8 ? 5 : 7;
#else
    return float8 ? 6 : 8;
#endif
}

// Threads take heads of q alone, of k alone or of v alone: so many groups of q's heads come first, then those of k's
// and as many of v's.
struct HeadGroups {
    int queries = 0;
    int keys = 0;
};

HeadGroups head_groups(const RotaryAndCacheArgs& args, int heads_per_thread);

RotaryPlan plan_rotary_and_cache(const RotaryAndCacheArgs& args);

template <class F>
void for_each_launch(const RotaryAndCacheArgs& args, const RotaryPlan& plan, F&& f) {
    for_each_part(args.rotary.batch, args.rotary.tokens, plan, [&](auto... part) { f(slice(args, part...)); });
}

}  // namespace mrrope
