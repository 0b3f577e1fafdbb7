#pragma once

#include "mrrope/mla_rotary.h"
#include "mrrope/rotary_and_cache.h"

// Fused rotation and cache write for multi-head latent attention (MLA): rotates the rope parts of q, and writes one row
// [latent | rotated k_rope] per token to the cache.

namespace mrrope {

// The `out` of rotary.k and of the latent are the two parts of the first cache row: out_strides.batch is the stride of
// blocks, out_strides.token that of slots in a block.
struct MlaRotaryAndCacheArgs {
    // head_dim equals rotary_dim, positions have one row, and there are no head tables. q has the rope parts of all
    // query heads; k is k_rope, one head.
    RotaryArgs rotary;
    CopiedPart latent;  // one head
    CacheSlots slots;
    StoredAs cached_as = StoredAs::heads_dtype;  // heads of float64 are not stored as float8
    // Of a float8 cache, in the heads' memory space: x / scale is written. nullptr is scale 1.
    const float* scale = nullptr;
};

void validate(const MlaRotaryAndCacheArgs& args);

// `args` restricted to these sequences and tokens.
MlaRotaryAndCacheArgs slice(const MlaRotaryAndCacheArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                            int64_t tokens);

void mla_rotary_and_cache_cpu(const MlaRotaryAndCacheArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void mla_rotary_and_cache_cuda(const MlaRotaryAndCacheArgs& args, CUstream_st* stream);

}  // namespace mrrope
