#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "mrrope/rotary.h"

// Reading and rounding of float8_e4m3fn and float8_e5m2, independent of the library's code.

namespace mrrope::testing {

inline constexpr StoredAs both_float8[] = {StoredAs::float8_e4m3, StoredAs::float8_e5m2};
inline constexpr StoredAs every_stored_as[] = {StoredAs::heads_dtype, StoredAs::float8_e4m3, StoredAs::float8_e5m2};

inline std::string name_of(StoredAs stored_as) {
    const char* names[] = {"", " e4m3", " e5m2"};
    return names[static_cast<int>(stored_as)];
}

struct Float8Format {
    int mantissa_bits;
    int bias;
    int largest_bits;  // of the largest finite value
};

inline Float8Format float8_format(StoredAs stored_as) {
    return stored_as == StoredAs::float8_e5m2 ? Float8Format{2, 15, 0x7b} : Float8Format{3, 7, 0x7e};
}

inline double value_of_float8(uint8_t bits, StoredAs stored_as) {
    const auto [mantissa_bits, bias, largest_bits] = float8_format(stored_as);
    const int magnitude_bits = bits & 0x7f;
    if (magnitude_bits > largest_bits) {
        const bool is_infinity = stored_as == StoredAs::float8_e5m2 && magnitude_bits == largest_bits + 1;
        return is_infinity ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    }
    const int exponent = magnitude_bits >> mantissa_bits;
    const int mantissa = magnitude_bits & ((1 << mantissa_bits) - 1);
    const double magnitude = exponent == 0
                                 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                 : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    return bits & 0x80 ? -magnitude : magnitude;
}

inline double largest_finite(StoredAs stored_as) {
    return value_of_float8(static_cast<uint8_t>(float8_format(stored_as).largest_bits), stored_as);
}

// Half of the distance to the next value.
inline long double half_ulp_of_float8(long double value, StoredAs stored_as) {
    const auto [mantissa_bits, bias, largest_bits] = float8_format(stored_as);
    return std::fmax(std::abs(value) * std::ldexp(1.0L, -mantissa_bits - 1), std::ldexp(1.0L, -bias - mantissa_bits));
}

// The nearest value by exhaustive search, ties to even; only NaN gives NaN.
inline uint8_t nearest_float8(double value, StoredAs stored_as) {
    if (std::isnan(value)) return 0x7f;
    const int largest_bits = float8_format(stored_as).largest_bits;
    const double magnitude = std::abs(value);
    int nearest = 0;
    for (int bits = 1; bits <= largest_bits; ++bits) {
        const double distance = std::abs(value_of_float8(static_cast<uint8_t>(bits), stored_as) - magnitude);
        const double before = std::abs(value_of_float8(static_cast<uint8_t>(nearest), stored_as) - magnitude);
        if (distance < before || (distance == before && bits % 2 == 0)) nearest = bits;
    }
    if (magnitude >= largest_finite(stored_as)) nearest = largest_bits;
    return static_cast<uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0));
}

}  // namespace mrrope::testing
