#pragma once

#include <cuda_runtime.h>

#include "mrrope/rotation.h"

namespace mrrope {

// The upper half of phase_of: three instructions, where the whole takes twice as many.
__device__ inline uint32_t phase_top_of(int64_t position, uint64_t turns) {
    const auto low = static_cast<uint32_t>(position);
    const auto high = static_cast<uint32_t>(position >> 32);
    const auto low_turns = static_cast<uint32_t>(turns);
    return __umulhi(low, low_turns) + low * static_cast<uint32_t>(turns >> 32) + high * low_turns;
}

// As `scaled_cos_sin`, by the special function units: off by 1e-6, where rounding to 16 bits is off by hundreds of
// times as much. The phase is as exact as ever, and what the units get lies within half a circle, where they are at
// their best.
__device__ inline CosSin<float> hardware_turn(uint32_t phase_top, float gain) {
    constexpr float radians = 3.14159265f * 0x1p-31f;  // 2^32 are a circle
    const float angle = static_cast<float>(static_cast<int32_t>(phase_top)) * radians;
    return {gain * __cosf(angle), gain * __sinf(angle)};
}

}  // namespace mrrope
