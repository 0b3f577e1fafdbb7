#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "mrrope/rotary.h"

// Reading, rounding and random generation of elements of every dtype, independent of the library's code.

namespace mrrope::testing {

struct Format {
    int significant_bits;
    int smallest_exponent;  // of the smallest normal number, as frexp gives it
    double largest;
    double arithmetic_error;  // of cos, sin and rotation before the final rounding, relative to the pair's norm
};

inline Format format_of(DType dtype) {
    constexpr double in_float = 2.5e-7;
    constexpr double by_special_function_units = 1e-6;
    switch (dtype) {
        case DType::float64: return {53, -1021, std::numeric_limits<double>::max(), 5e-16};
        case DType::float32: return {24, -125, std::numeric_limits<float>::max(), in_float};
        case DType::float16: return {11, -13, 65504.0, by_special_function_units};
        case DType::bfloat16: return {8, -125, 0x1.fep127, by_special_function_units};
    }
    return {};
}

inline const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::float64: return "float64";
        case DType::float32: return "float32";
        case DType::float16: return "float16";
        case DType::bfloat16: return "bfloat16";
    }
    return "unknown";
}

inline constexpr DType all_dtypes[] = {DType::float64, DType::float32, DType::float16, DType::bfloat16};
inline constexpr Pairing both_pairings[] = {Pairing::halves, Pairing::interleaved};

inline double value_of_float16(uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 1023;
    double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) {
        magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    }
    return bits & 0x8000 ? -magnitude : magnitude;
}

inline double value_of_bfloat16(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

template <class T>
T read_as(const std::byte* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline double element_at(DType dtype, const std::byte* at) {
    switch (dtype) {
        case DType::float64: return read_as<double>(at);
        case DType::float32: return read_as<float>(at);
        case DType::float16: return value_of_float16(read_as<uint16_t>(at));
        case DType::bfloat16: return value_of_bfloat16(read_as<uint16_t>(at));
    }
    return 0.0;
}

// Rounds to nearest even; overflows to infinity.
inline double rounded_to(DType dtype, double value) {
    if (value == 0.0 || !std::isfinite(value)) return value;
    const Format format = format_of(dtype);
    int exponent = 0;
    std::frexp(value, &exponent);
    exponent = std::max(exponent, format.smallest_exponent);
    const int last_bit = exponent - format.significant_bits;
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -last_bit)), last_bit);
    return std::abs(rounded) > format.largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

inline void write_random_element(DType dtype, std::byte* at, std::mt19937_64& random) {
    const uint64_t bits = random();
    const auto write = [&](auto value) { std::memcpy(at, &value, sizeof value); };
    const double uniform = static_cast<double>(static_cast<int64_t>(bits)) * 0x1p-61;  // within 4 of zero
    switch (dtype) {
        case DType::float64: return write(uniform);
        case DType::float32: return write(static_cast<float>(uniform));
        case DType::float16: return write(static_cast<uint16_t>((bits & 0x83ff) | (11 + (bits >> 16) % 6) << 10));
        case DType::bfloat16: return write(static_cast<uint16_t>((bits & 0x807f) | (123 + (bits >> 16) % 6) << 7));
    }
}

inline void write_infinity(DType dtype, std::byte* at) {
    const auto write = [&](auto value) { std::memcpy(at, &value, sizeof value); };
    switch (dtype) {
        case DType::float64: return write(std::numeric_limits<double>::infinity());
        case DType::float32: return write(std::numeric_limits<float>::infinity());
        case DType::float16: return write(uint16_t{0x7c00});
        case DType::bfloat16: return write(uint16_t{0x7f80});
    }
}

}  // namespace mrrope::testing
