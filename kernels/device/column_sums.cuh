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

// Small blocks, which fit beside the last ones of the kernel whose partial sums they add. Blocks of 1024 threads, which
// start when an SM is empty, make a backward pass 1 us longer on an H200.
inline constexpr int column_sum_block_threads = 128;
// For thousands of columns: of the weights over all heads. Their backward pass over 1024 tokens of 32 + 32 heads takes
// 34.5 us with the forward pass on an H200, with blocks of 128 threads 35.8 and of 512 36.9. With the weights of one
// head, of 32/8, it takes 22.4 us, with blocks of 128 threads 21.3.
inline constexpr int many_column_sum_block_threads = 256;
// 32 bytes of a row: a sector where rows are aligned.
template <class Value>
inline constexpr int columns_per_block = 32 / sizeof(Value);
// Loads of a thread in flight.
inline constexpr int column_sum_loads = 8;

// A block adds up to n = columns_per_block columns. Thread i adds the rows i / n, i / n + block_threads / n, ... of
// column i % n; the sum of column j is thread j's.
template <int block_threads, class Value>
__device__ double sum_of_column(const Value* first, int columns, int rows, int64_t row_stride) {
    constexpr int width = columns_per_block<Value>;
    constexpr int rows_per_step = block_threads / width;
    const auto column = static_cast<int>(threadIdx.x % width);
    double sum = 0;
    for (int first_row = threadIdx.x / width; first_row < rows; first_row += rows_per_step * column_sum_loads) {
        Value values[column_sum_loads] = {};
#pragma unroll
        for (int i = 0; i < column_sum_loads; ++i) {
            const int row = first_row + i * rows_per_step;
            if (column < columns && row < rows) values[i] = first[row * row_stride + column];
        }
#pragma unroll
        for (int i = 0; i < column_sum_loads; ++i) sum += static_cast<double>(values[i]);
    }
    constexpr int warp = 32;
    static_assert(warp % width == 0);
#pragma unroll
    for (int step = width; step < warp; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    constexpr int warps = block_threads / warp;
    __shared__ double of_warps[warps][width];
    if (threadIdx.x % warp < width) of_warps[threadIdx.x / warp][column] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < warps; ++i) sum += of_warps[i][column];
    return sum;
}

}  // namespace mrrope
