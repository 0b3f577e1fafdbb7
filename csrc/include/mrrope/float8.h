#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mrrope/rotation.h"

// float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity.

namespace mrrope {

// Rounds to nearest even and saturates: infinity, too, becomes the largest finite value. For processors without a
// conversion instruction.
MRROPE_HOST_DEVICE uint8_t float8_e4m3_bits(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + (0x7ffffu - 0x3c000000u) + ((magnitude >> 20) & 1u)) >> 20;
    // Adding 2^14 lets the float unit round to multiples of 2^-9, the smallest subnormal.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
    const uint32_t nearest = magnitude < 0x3c800000u ? subnormal : normal;
    const uint32_t finite = nearest < 0x7eu ? nearest : 0x7eu;
    return static_cast<uint8_t>(sign | (magnitude > 0x7f800000u ? 0x7fu : finite));
}

// Divides by the scale before rounding to float8: multiplies by a reciprocal that need not be exact, then corrects the
// quotient by its FMA remainder. Quotients from 512 on saturate and skip the correction, which turns infinity into NaN.
struct Float8Scale {
    float scale;
    float reciprocal;

    MRROPE_HOST_DEVICE float divide(float x) const {
        const float quotient = x * reciprocal;
        const float remainder = std::fma(-quotient, scale, x);
        return std::abs(quotient) < 512.0f ? std::fma(remainder, reciprocal, quotient) : quotient;
    }
};

}  // namespace mrrope
