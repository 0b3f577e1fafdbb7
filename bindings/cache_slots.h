#pragma once

#include <ATen/core/Tensor.h>

#include "mrrope/rotary_and_cache.h"
#include "tensor_views.h"

// Slots and scales of caches, as backends take them.

namespace mrrope {

// One slot per token of `heads`. Paged, slots count through all blocks; else sequence i owns block i, and slots count
// from its start. The values are checked on a CPU only: CUDA kernels skip tokens whose slot is out of range.
CacheSlots cache_slots(NamedTensor slots, bool paged, int64_t blocks, int64_t block_size, NamedTensor heads,
                       const Layout& layout);

// A scale of one element, or nullptr without one. Its value is checked on a CPU only.
const float* one_scale(const OptionalTensor& scale);

// Checks float8 scales on a CPU. On a GPU they are not read before the launch: results of an impossible one are NaN.
void check_float8_scales(NamedTensor scale);

}  // namespace mrrope
