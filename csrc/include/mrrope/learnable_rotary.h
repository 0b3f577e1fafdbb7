#pragma once

#include <cstdint>

#include "mrrope/rotary.h"

// Rotation by frequencies that are learned: radians per position in floating point, with a gradient.

namespace mrrope {

struct LearnableRotaryArgs {
    RotaryArgs rotary;  // `table` and `choice` are unused, and positions have one row
    // Contiguous, in the heads' memory space, both of table_dtype (float32 or float64): [tables, rotary_dim / 2]
    // frequencies and [tables] attention factors. All heads of a table are NaN where a frequency is not finite, or from
    // 2^50 on, or the attention factor is negative: no packed table holds those.
    const void* frequencies = nullptr;
    const void* attention_factors = nullptr;
    DType table_dtype = DType::float32;
    int tables = 1;  // divides the number of heads of q and of k: neighbouring heads share one
    // The packed head tables, [tables, rotary_dim / 2 + 1]: written by the forward pass, read by the backward pass.
    uint64_t* packed_tables = nullptr;
};

void validate(const LearnableRotaryArgs& args);

// The call of `rotary` that rotates by the packed head tables.
RotaryArgs by_packed_tables(const LearnableRotaryArgs& args);

void learnable_rotary_cpu(const LearnableRotaryArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void learnable_rotary_cuda(const LearnableRotaryArgs& args, CUstream_st* stream);

// The gradient of the rotated q or k.
struct RotatedGradient {
    const void* data = nullptr;
    HeadStrides strides;
};

// The backward pass. In `call`, `in` is the input of the forward pass and `out` receives its gradient; nullptr: not
// wanted. Its frequencies and attention factors are not read. batch * tokens * (q.heads + k.heads) is below 2^31.
struct LearnableRotaryGradientArgs {
    LearnableRotaryArgs call;
    RotatedGradient q;
    RotatedGradient k;
    // The gradients of the table, of its dtype and shapes.
    void* frequencies = nullptr;
    void* attention_factors = nullptr;
    // Memory for partial sums, [table_sum_rows_*, tables, rotary_dim / 2 + 1].
    double* table_sums = nullptr;
};

void validate(const LearnableRotaryGradientArgs& args);

// The number of rows of partial sums for these arguments; `table_sums` is not read. Rows are added in a fixed order:
// results do not depend on the number of threads.
int64_t table_sum_rows_cpu(const LearnableRotaryGradientArgs& args);
void learnable_rotary_gradient_cpu(const LearnableRotaryGradientArgs& args,
                                   const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda.
int64_t table_sum_rows_cuda(const LearnableRotaryGradientArgs& args);
void learnable_rotary_gradient_cuda(const LearnableRotaryGradientArgs& args, CUstream_st* stream);

}  // namespace mrrope
