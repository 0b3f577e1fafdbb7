#pragma once

#include <cstdint>

#include "mrrope/rotary.h"

// RMSNorm of q and k followed by their rotation, in one pass: x / rms(x) * (weight + weight_offset), rotated, and
// rounded once, at the end.

namespace mrrope {

// What one root mean square is taken of.
enum class NormOver { head, all_heads };

struct QkNormRotaryArgs {
    RotaryArgs rotary;
    // Contiguous, of the heads' dtype and where they are: head_dim weights, or heads * head_dim over all heads.
    const void* q_weight = nullptr;
    const void* k_weight = nullptr;  // no k: unused
    double eps = 0.0;                // added to the mean square
    double weight_offset = 0.0;      // 1 where weights are kept as what they differ from 1 by
    NormOver over = NormOver::head;
};

void qk_norm_rotary_cpu(const QkNormRotaryArgs& args, const ParallelFor& parallel_for = on_all_cores);

// Asynchronous on `stream` of the current device. Throws std::runtime_error where the launch fails. In mrrope::cuda.
void qk_norm_rotary_cuda(const QkNormRotaryArgs& args, CUstream_st* stream);

// The gradient of what came out for q or k, and room for its weights' gradient.
struct OutputGradient {
    const void* data = nullptr;
    HeadStrides strides;
    // Rows of sums, as many as weight_sum_rows_* tells, that add up to the gradient of the weights; float, or double
    // for float64. nullptr: not wanted.
    void* weight_sums = nullptr;
};

// The backward pass. In `call`, in is what the forward pass read, and out is where the gradient of that goes.
struct QkNormRotaryGradientArgs {
    QkNormRotaryArgs call;
    OutputGradient q;
    OutputGradient k;
};

struct WeightSumRows {
    int64_t q = 0;
    int64_t k = 0;
};

// Of these arguments, whose weight_sums need not be there yet.
WeightSumRows weight_sum_rows_cpu(const QkNormRotaryGradientArgs& args);
void qk_norm_rotary_gradient_cpu(const QkNormRotaryGradientArgs& args, const ParallelFor& parallel_for = on_all_cores);

// For fewer than 2^31 heads in all tokens together.
WeightSumRows weight_sum_rows_cuda(const QkNormRotaryGradientArgs& args);
void qk_norm_rotary_gradient_cuda(const QkNormRotaryGradientArgs& args, CUstream_st* stream);

}  // namespace mrrope
