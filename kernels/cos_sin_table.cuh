#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "mrrope/qkv_rotary.h"

namespace mrrope {

// Cosine and sine, times the attention factor, of every row's position and every pair: float2 of [rows, rotary_dim /
// 2].
inline size_t cos_sin_table_bytes(int64_t rows, int rotary_dim) {
    const size_t bytes = static_cast<size_t>(rows) * (rotary_dim / 2) * sizeof(float2);
    return (bytes + 255) / 256 * 256;
}

// Waits for the kernel before it, as the next one need not: that starts while this one writes, and has only this one's
// results to wait for.
void write_cos_sin_table(const QkvRotaryArgs& args, float2* table, cudaStream_t stream);

}  // namespace mrrope
