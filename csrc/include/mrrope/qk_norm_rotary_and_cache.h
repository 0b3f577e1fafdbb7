#pragma once

#include <cstdint>

#include "mrrope/qk_norm_rotary.h"
#include "mrrope/rotary_and_cache.h"

// Everything between the projections and attention: RMSNorm and rotation of q and k, q stored in place, elsewhere or as
// float8, k and v written to their cache slots, and the sigmoid of the gate of attention's output.

namespace mrrope {

// Without weights, q or k is rotated only; without gate and float8 q, that is rotary_and_cache.
struct QkNormRotaryAndCacheArgs : RotaryAndCacheArgs, QkNorm {
    StoredAs q_stored_as = StoredAs::heads_dtype;  // heads of float64 are not stored as float8
    // For float8 q: x / scale is stored. One scale per head, or for all with stride 0; nullptr is scale 1.
    const float* q_scale = nullptr;
    int64_t q_scale_stride = 0;
    // If given, q_scale is unused: each token and head gets the scale that maps its largest magnitude to the largest
    // float8, Float8Range::scale_of, stored here.
    float* q_scale_out = nullptr;
    HeadStrides q_scale_out_strides;
    HeadsView gate;  // replaced by its sigmoid in place; 0 heads: none
};

void validate(const QkNormRotaryAndCacheArgs& args);

// `args` restricted to these sequences and tokens.
QkNormRotaryAndCacheArgs slice(const QkNormRotaryAndCacheArgs& args, int64_t first_batch, int64_t batch,
                               int64_t first_token, int64_t tokens);

void qk_norm_rotary_and_cache_cpu(const QkNormRotaryAndCacheArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void qk_norm_rotary_and_cache_cuda(const QkNormRotaryAndCacheArgs& args, CUstream_st* stream);

}  // namespace mrrope
