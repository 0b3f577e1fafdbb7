#pragma once

#include <cstdint>

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"

// Fused RMSNorm and rotation of q and k: x / rms(x) * (weight + weight_offset), rotated, with one rounding at the end.

namespace mrrope {

// The elements that share a root mean square: one head, or all heads of a token.
enum class NormOver { head, all_heads };

struct QkNorm {
    // Contiguous, with the heads' dtype and memory space: head_dim weights, or heads * head_dim with all_heads.
    const void* q_weight = nullptr;
    const void* k_weight = nullptr;  // unused without k
    double eps = 0.0;                // added to the mean square
    double weight_offset = 0.0;      // 1 for models that store weight - 1, such as Gemma
    NormOver over = NormOver::head;
};

struct QkNormRotaryArgs : QkNorm {
    RotaryArgs rotary;

    // The number of weights of q, or of k.
    MRROPE_HOST_DEVICE int64_t weight_count(bool is_q) const {
        const int64_t heads = over == NormOver::head ? 1 : (is_q ? rotary.q : rotary.k).heads;
        return heads * rotary.head_dim;
    }
};

void validate(const QkNormRotaryArgs& args);

void qk_norm_rotary_cpu(const QkNormRotaryArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void qk_norm_rotary_cuda(const QkNormRotaryArgs& args, CUstream_st* stream);

// The gradient of the rotated q or k, and memory for the gradient of its weights.
struct OutputGradient {
    const void* data = nullptr;
    HeadStrides strides;
    // Receives the gradient of the weights, of their dtype and size. nullptr: not wanted.
    void* weights = nullptr;
    // Memory for weight_sum_rows_* rows of partial sums, added up in a fixed order; double for float64, else float. At
    // a multiple of 16 bytes on a GPU. nullptr without `weights`, or without heads.
    void* weight_sums = nullptr;
};

// The backward pass. In `call`, `in` is the input of the forward pass and `out` receives its gradient. batch * tokens *
// (q.heads + k.heads) is below 2^31.
struct QkNormRotaryGradientArgs {
    QkNormRotaryArgs call;
    OutputGradient q;
    OutputGradient k;
};

void validate(const QkNormRotaryGradientArgs& args);

struct WeightSumRows {
    int64_t q = 0;
    int64_t k = 0;
};

// The number of rows of partial sums for these arguments; weight_sums is not read.
WeightSumRows weight_sum_rows_cpu(const QkNormRotaryGradientArgs& args);
void qk_norm_rotary_gradient_cpu(const QkNormRotaryGradientArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda.
WeightSumRows weight_sum_rows_cuda(const QkNormRotaryGradientArgs& args);
void qk_norm_rotary_gradient_cuda(const QkNormRotaryGradientArgs& args, CUstream_st* stream);

}  // namespace mrrope
