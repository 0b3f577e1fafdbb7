#pragma once

#include <cstdint>

#include "mrrope/rotary.h"

// Fused rotation and KV-cache write: rotates q, and writes the rotated k and v to their cache slots.

namespace mrrope {

// The cache slot of each token. A cache is `blocks` blocks of `block_size` slots. Paged, a slot is block * block_size +
// offset; else block i belongs to sequence i, and a slot is an offset in it. Tokens with a slot out of range, such as
// the -1 of padding, are not written. There are fewer than 2^31 slots, of a block where they are not paged.
struct CacheSlots {
    PositionsView of_tokens;
    bool paged = true;
    int64_t blocks = 0;
    int64_t block_size = 0;

    int64_t count() const { return paged ? blocks * block_size : block_size; }
};

// k or v. Its `out` is the cache: out_strides.batch is the stride of blocks, out_strides.token that of slots in a
// block.
struct CachedHeads {
    HeadsView view;
    // For float8 caches, in the heads' memory space: x / scale is written. nullptr is scale 1.
    const float* scale = nullptr;
    int64_t scale_stride = 0;  // between heads; 0 for one scale
};

struct RotaryAndCacheArgs {
    // Of q only; k below is rotated by the same arguments. Not conjugate, since a cache has no gradient: negate the
    // table to rotate backwards.
    RotaryArgs rotary;
    CachedHeads k;
    CachedHeads v;  // with as many heads as k
    CacheSlots slots;
    StoredAs cached_as = StoredAs::heads_dtype;  // heads of float64 are not stored as float8
};

void validate(const RotaryAndCacheArgs& args);

// `args` restricted to these sequences and tokens.
RotaryAndCacheArgs slice(const RotaryAndCacheArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                         int64_t tokens);

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, CUstream_st* stream);

}  // namespace mrrope
