#pragma once

#include <cstdint>
#include <span>

#include "mrrope/rotary.h"

// Re-rotates cached keys from one frequency table to another, in place. Rotations compose: rotating by the difference
// of two tables takes keys from one to the other.

namespace mrrope {

struct RescaleCacheArgs {
    std::span<void* const> keys;  // one pointer per layer, all of one shape, in the tables' memory space
    HeadStrides strides;
    // With several positions a token, all tables name the same rows: row_of_pair is [table_heads, words].
    PositionsView positions;
    // packed(FrequencyTable), contiguous: [table_count, table_layers, table_rows, table_heads, words].
    const uint64_t* tables = nullptr;
    int64_t table_count = 0;
    // Layer i's tables are number layer_of_keys[i] of the table_layers; empty: number 0 for every layer.
    int32_t table_layers = 1;
    std::span<const int32_t> layer_of_keys = {};
    int32_t table_rows = 1;   // the first holds the tables; a second, as of tables for several positions, is skipped
    int32_t table_heads = 1;  // divides `heads`; head h uses table h / (heads / table_heads)
    // Per sequence, the index of the table that its keys are rotated by, and of the one to re-rotate them to, in the
    // tables' memory space. Sequences with equal indices are not touched.
    const int32_t* from = nullptr;
    const int32_t* to = nullptr;
    int64_t batch = 0;
    int64_t tokens = 0;
    int heads = 0;
    int rotary_dim = 0;
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
};

void validate(const RescaleCacheArgs& args);

void rescale_cache_cpu(const RescaleCacheArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. The device compares `from` and
// `to`, so a decode step can launch this unconditionally without a synchronization. Throws std::runtime_error if the
// launch fails.
void rescale_cache_cuda(const RescaleCacheArgs& args, CUstream_st* stream);

}  // namespace mrrope
