#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

// Reading and rounding of float8_e4m3fn, independent of the library's code.

namespace mrrope::testing {

inline constexpr double largest_float8 = 448.0;

inline double value_of_float8(uint8_t bits) {
    const int exponent = (bits >> 3) & 15;
    const int mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
    return bits & 0x80 ? -magnitude : magnitude;
}

// The nearest value by exhaustive search, ties to even; only NaN gives NaN.
inline uint8_t nearest_float8(double value) {
    if (std::isnan(value)) return 0x7f;
    const double magnitude = std::abs(value);
    int nearest = 0;
    for (int bits = 1; bits < 0x7f; ++bits) {
        const double distance = std::abs(value_of_float8(static_cast<uint8_t>(bits)) - magnitude);
        const double before = std::abs(value_of_float8(static_cast<uint8_t>(nearest)) - magnitude);
        if (distance < before || (distance == before && bits % 2 == 0)) nearest = bits;
    }
    if (magnitude >= largest_float8) nearest = 0x7e;
    return static_cast<uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0));
}

}  // namespace mrrope::testing
