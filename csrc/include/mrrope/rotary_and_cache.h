#pragma once

#include <cstdint>

#include "mrrope/rotary.h"

// Rotation on the way to a cache: q is rotated, and k, rotated, and v are written to where a cache keeps them.

namespace mrrope {

// Which slot of a cache every token goes to. A cache is `blocks` blocks of `block_size` slots each. Paged, slots count
// through all the blocks; else block i is sequence i's, and its slots count from 0. Tokens whose slot is not there,
// those of padding have a negative one, are not written.
struct CacheSlots {
    PositionsView of_tokens;
    bool paged = true;
    int64_t blocks = 0;
    int64_t block_size = 0;

    int64_t count() const { return paged ? blocks * block_size : block_size; }
};

// k or v, and as its `out` the cache: out_strides.batch leads from block to block, out_strides.token from slot to slot
// within a block.
struct CachedHeads {
    HeadsView view;
    // For caches of float8, where the heads are: x / scale is written. Without one, x.
    const float* scale = nullptr;
    int64_t scale_stride = 0;  // from head to head; 0: one for all
};

struct RotaryAndCacheArgs {
    RotaryArgs rotary;  // of q alone; k is rotated with it
    CachedHeads k;
    CachedHeads v;  // as many heads as k
    CacheSlots slots;
    // The caches are float8_e4m3fn, saturating, rounded once from the float32 result; else of the heads' dtype. Not for
    // heads of float64.
    bool float8 = false;
};

// The part of `args` that holds these sequences and tokens.
RotaryAndCacheArgs slice(const RotaryAndCacheArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                         int64_t tokens);

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const ParallelFor& parallel_for = on_all_cores);

// Asynchronous on `stream` of the current device; of fewer than 2^31 slots. Throws std::runtime_error where the launch
// fails. In mrrope::cuda.
void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, CUstream_st* stream);

}  // namespace mrrope
