#pragma once

#include <cuda_runtime.h>

#include "mrrope/rotation.h"

// cos/sin by the special function units, for epilogues whose results are rounded to 16 bits.

namespace mrrope {

// The upper 32 bits of phase_of, in three instructions instead of six.
__device__ inline uint32_t phase_top_of(int64_t position, uint64_t step) {
    const auto low = static_cast<uint32_t>(position);
    const auto high = static_cast<uint32_t>(position >> 32);
    const auto low_step = static_cast<uint32_t>(step);
    return __umulhi(low, low_step) + low * static_cast<uint32_t>(step >> 32) + high * low_step;
}

// Absolute error 1e-6, hundreds of times below the error of rounding to 16 bits. The phase is exact, and the angle lies
// in [-pi, pi), where __cosf and __sinf are most accurate.
__device__ inline CosSin<float> hardware_cos_sin(uint32_t phase_top, float gain) {
    constexpr float radians = 3.14159265f * 0x1p-31f;  // 2^32 is one revolution
    const float angle = static_cast<float>(static_cast<int32_t>(phase_top)) * radians;
    return {gain * __cosf(angle), gain * __sinf(angle)};
}

}  // namespace mrrope
