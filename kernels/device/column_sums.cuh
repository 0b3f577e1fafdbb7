#pragma once

#include <cuda_runtime.h>

#include <cstdint>

// Sums of columns in float64, always in the same order, for the gradients of weights and tables.

namespace mrrope {

// Adds the values of a warp's threads, always in the same order; the sum is the first thread's.
__device__ inline double sum_over_warp(double value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

inline constexpr int columns_per_block = 32;
inline constexpr int column_sum_block_threads = 32 * columns_per_block;
// Loads of a thread in flight: as many as it has with the partial sums of 256 blocks.
inline constexpr int column_sum_loads = 8;

// A block adds up to 32 columns. Thread j of warp i adds the rows i, i + 32, ... of column j; then warp i adds the 32
// sums of column i, which its first thread returns.
template <class Value>
__device__ double sum_of_column(const Value* first, int columns, int rows, int64_t row_stride) {
    const int thread = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    double of_rows = 0;
    for (int first_row = warp; first_row < rows; first_row += 32 * column_sum_loads) {
        Value values[column_sum_loads] = {};
#pragma unroll
        for (int i = 0; i < column_sum_loads; ++i) {
            const int row = first_row + 32 * i;
            if (thread < columns && row < rows) values[i] = first[row * row_stride + thread];
        }
#pragma unroll
        for (int i = 0; i < column_sum_loads; ++i) of_rows += static_cast<double>(values[i]);
    }
    __shared__ double transposed[32][33];  // 33: without bank conflicts
    transposed[warp][thread] = of_rows;
    __syncthreads();
    return sum_over_warp(transposed[thread][warp]);
}

}  // namespace mrrope
