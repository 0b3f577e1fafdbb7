#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numbers>
#include <vector>

#include "elements.h"
#include "head_buffer.h"
#include "mrrope/rotary.h"

// Reference rotation in long double, independent of the library's code.

namespace mrrope::testing {

struct ReferenceCosSin {
    long double cos;  // both include the attention factor
    long double sin;
};

// In [-pi, pi).
inline long double reference_angle(int64_t position, uint64_t phase_step) {
    const auto phase =
        static_cast<uint64_t>(static_cast<unsigned __int128>(static_cast<__int128>(position)) * phase_step);
    return std::ldexp(static_cast<long double>(static_cast<int64_t>(phase)), -64) * 2 * std::numbers::pi_v<long double>;
}

inline ReferenceCosSin reference_cos_sin(long double angle, long double gain) {
    return {gain * std::cos(angle), gain * std::sin(angle)};
}

// Expects the rotated components of one head within one rounding of the reference and the tail unchanged.
inline void expect_rotated_head(const HeadsShape& shape, Pairing pairing, const std::byte* before,
                                const std::byte* after, const std::vector<ReferenceCosSin>& cos_sins) {
    const Format format = format_of(shape.dtype);
    const long double half_ulp = std::ldexp(1.0L, -format.significant_bits);
    const long double smallest_half_ulp = std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1);
    const bool halves = pairing == Pairing::halves;
    const int half = static_cast<int>(cos_sins.size());
    const auto element = [&](const std::byte* head, int at) {
        return element_at(shape.dtype, head + static_cast<int64_t>(at) * size_of(shape.dtype));
    };
    const int64_t rotated_bytes = 2 * static_cast<int64_t>(half) * size_of(shape.dtype);
    const int64_t head_bytes = static_cast<int64_t>(shape.head_dim) * size_of(shape.dtype);
    ASSERT_EQ(std::memcmp(after + rotated_bytes, before + rotated_bytes, head_bytes - rotated_bytes), 0) << "tail";
    for (int at = 0; at < 2 * half; ++at) {
        const double actual = element(after, at);
        const int pair = halves ? at % half : at / 2;
        const bool is_first = halves ? at < half : at % 2 == 0;
        const long double x = element(before, halves ? pair : 2 * pair);
        const long double y = element(before, halves ? pair + half : 2 * pair + 1);
        const auto [cos, sin] = cos_sins[pair];
        const long double expected = is_first ? x * cos - y * sin : y * cos + x * sin;
        const long double norm = std::sqrt((x * x + y * y) * (cos * cos + sin * sin));
        const long double slack = std::abs(expected) * half_ulp + norm * format.arithmetic_error + smallest_half_ulp;
        ASSERT_LE(std::abs(actual - expected), slack)
            << actual << " instead of " << static_cast<double>(expected) << ", component " << at;
    }
}

}  // namespace mrrope::testing
