#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "mrrope/rotation.h"

// The words of a packed table, from frequencies and an attention factor in floating point, for host and device.

namespace mrrope {

// False for NaN, too. From 2^50 on, the products below leave the range of 64-bit integers.
MRROPE_HOST_DEVICE bool is_frequency(double radians) {
    return std::fabs(radians) < 0x1p50;
}

// The phase step nearest to a frequency in radians per position. 1 / 2pi has 106 bits, so that the error is that of
// rounding to a multiple of 2^-64 revolutions.
MRROPE_HOST_DEVICE uint64_t phase_step_of(double radians) {
    constexpr double per_turn = 0x1.45f306dc9c883p-3;
    constexpr double per_turn_rest = -0x1.6b01ec5417056p-57;
    double turns = radians * per_turn;
    const double rest = std::fma(radians, per_turn, -turns) + radians * per_turn_rest;
    turns -= std::rint(turns);
    // In two parts: 0.5 revolutions are 2^63, which no int64_t holds.
    const double twos = std::rint(turns * 0x1p63);
    const double ones = std::rint((turns * 0x1p64 - 2.0 * twos) + rest * 0x1p64);
    return 2 * static_cast<uint64_t>(static_cast<int64_t>(twos)) + static_cast<uint64_t>(static_cast<int64_t>(ones));
}

// The last word of a packed table. A negative factor would decode to another one: see without_negation. What cannot be
// packed is NaN, without a sign.
MRROPE_HOST_DEVICE uint64_t attention_factor_word(double factor, bool has_frequencies) {
    constexpr uint64_t nan = 0x7ff8000000000000;
    return has_frequencies && factor >= 0 ? std::bit_cast<uint64_t>(factor) : nan;
}

}  // namespace mrrope
