#pragma once

#include <cuda_runtime.h>

#include "mrrope/rotation.h"

namespace mrrope {

// As `turn`, by the special function units: off by 1e-6, where rounding to 16 bits is off by hundreds of times as much.
// The phase is as exact as ever, and what the units get lies within half a circle, where they are at their best.
__device__ inline CosSin<float> hardware_turn(uint64_t phase, float gain) {
    constexpr float radians = 3.14159265f * 0x1p-31f;  // 2^32 are a circle
    const float angle = static_cast<float>(static_cast<int32_t>(phase >> 32)) * radians;
    return {gain * __cosf(angle), gain * __sinf(angle)};
}

}  // namespace mrrope
