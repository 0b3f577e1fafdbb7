#pragma once

#include <cstdint>
#include <span>

#include "mrrope/rotary.h"

// Turning cached keys from one frequency table to another, in place. Rotations compose, so that one rotation by the
// difference of two tables makes keys rotated by the one into keys rotated by the other.

namespace mrrope {

struct RescaleCacheArgs {
    std::span<void* const> keys;  // of every layer, all of one shape, each where the tables are
    HeadStrides strides;
    PositionsView positions;           // one a token
    const uint64_t* tables = nullptr;  // packed, one after the other
    int64_t table_count = 0;
    const int32_t* from = nullptr;  // of every sequence: the table that its keys are rotated by,
    const int32_t* to = nullptr;  // and the one they shall be rotated by; sequences where both are one are not touched
    int64_t batch = 0;
    int64_t tokens = 0;
    int heads = 0;
    int rotary_dim = 0;
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
};

void rescale_cache_cpu(const RescaleCacheArgs& args, const ParallelFor& parallel_for = on_all_cores);

// Asynchronous on `stream` of the current device. Whether a sequence has to be turned is decided on the device, so that
// a decoding step can ask every time. Throws std::runtime_error where the launch fails. In mrrope::cuda.
void rescale_cache_cuda(const RescaleCacheArgs& args, CUstream_st* stream);

}  // namespace mrrope
