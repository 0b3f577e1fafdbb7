#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"

// float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity. float8_e5m2: 5 exponent bits, 2 mantissa bits.

namespace mrrope {

// Rounds to nearest even and saturates: infinity, too, becomes the largest finite value. For processors without a
// conversion instruction.
MRROPE_HOST_DEVICE uint8_t float8_bits(float x, StoredAs format) {
    const bool is_e5m2 = format == StoredAs::float8_e5m2;
    const int dropped_bits = is_e5m2 ? 21 : 20;
    const uint32_t rebias = is_e5m2 ? 0x38000000u : 0x3c000000u;
    const uint32_t largest = is_e5m2 ? 0x7bu : 0x7eu;
    // Adding it lets the float unit round to multiples of the smallest subnormal, 2^-16 or 2^-9.
    const float subnormal_rounder = is_e5m2 ? 0x1p7f : 0x1p14f;
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t below_half = (1u << (dropped_bits - 1)) - 1u;
    const uint32_t normal = (magnitude + (below_half - rebias) + ((magnitude >> dropped_bits) & 1u)) >> dropped_bits;
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + subnormal_rounder) -
                               std::bit_cast<uint32_t>(subnormal_rounder);
    const uint32_t smallest_normal = rebias + 0x00800000u;
    const uint32_t nearest = magnitude < smallest_normal ? subnormal : normal;
    const uint32_t finite = nearest < largest ? nearest : largest;
    return static_cast<uint8_t>(sign | (magnitude > 0x7f800000u ? 0x7fu : finite));
}

// Scales that float8 results can have. The reciprocal of a larger one is subnormal, which GPUs take for 0, and that of
// a subnormal one overflows.
inline constexpr float smallest_float8_scale = 0x1p-126f;
inline constexpr float largest_float8_scale = 0x1p126f;

MRROPE_HOST_DEVICE bool is_float8_scale(float scale) {
    return smallest_float8_scale <= std::abs(scale) && std::abs(scale) <= largest_float8_scale;
}

// The ratio to a scale, or NaN where the scale is impossible: results are NaN rather than wrong. Kernels check ratios
// and not loaded scales, since the compiler would wait for a scale before it loads the next head: 14 % at one token.
MRROPE_HOST_DEVICE float nan_unless_float8_scale(float scale, float ratio) {
    return is_float8_scale(scale) ? ratio : NAN;
}

// Divides by the scale before rounding to float8: multiplies by a reciprocal that need not be exact, then corrects the
// quotient by its FMA remainder. Quotients from 2^16 on saturate in both formats and skip the correction, which turns
// infinity into NaN.
struct Float8Scale {
    float scale;
    float reciprocal;

    MRROPE_HOST_DEVICE float divide(float x) const {
        const float quotient = x * reciprocal;
        const float remainder = std::fma(-quotient, scale, x);
        return std::abs(quotient) < 0x1p16f ? std::fma(remainder, reciprocal, quotient) : quotient;
    }
};

// The largest magnitude of a format, for the scales of heads.
struct Float8Range {
    float largest;
    float reciprocal;

    MRROPE_HOST_DEVICE static Float8Range of(StoredAs format) {
        return format == StoredAs::float8_e5m2 ? Float8Range{57344.0f, 1.0f / 57344.0f}
                                               : Float8Range{448.0f, 1.0f / 448.0f};
    }

    // The scale that maps the largest magnitude of a head to the largest float8. At least 2^-126, whose inverse is
    // finite: a head of zeros has that scale, and one of NaN. Infinity counts as the largest float, and saturates. No
    // division: on a GPU its slow path would cost registers.
    MRROPE_HOST_DEVICE float scale_of(float largest_magnitude) const {
        const float x = std::fmin(std::fmax(largest_magnitude, largest * FLT_MIN), FLT_MAX);
        const float quotient = x * reciprocal;
        return std::fma(std::fma(-quotient, largest, x), reciprocal, quotient);
    }
};

}  // namespace mrrope
