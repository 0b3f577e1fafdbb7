#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "elements.h"
#include "float8_elements.h"
#include "head_buffer.h"
#include "mrrope/rotary.h"
#include "reference_rotation.h"
#include "token_slots.h"

// Caches, and the checks of what is written to them.

namespace mrrope::testing {

// A cache in a buffer of noise, so that every unwanted write is detected.
struct CacheBuffer {
    int64_t head_dim = 0;  // of a head or row, in elements
    int element_size = 0;
    HeadStrides strides;
    int64_t first_byte = 0;
    std::vector<std::byte> bytes;
    std::vector<std::byte> before;

    void allocate(int64_t elements, int64_t misalignment, std::mt19937_64& random) {
        first_byte = guard_bytes + misalignment * element_size;
        bytes.resize(first_byte + elements * element_size + guard_bytes);
        for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
        before = bytes;
    }

    std::byte* first_head() { return bytes.data() + first_byte; }

    int64_t head_bytes() const { return head_dim * element_size; }

    int64_t byte_of(int64_t block, int64_t slot, int64_t head = 0) const {
        const int64_t element = block * strides.batch + slot * strides.token + head * strides.head;
        return first_byte + element * element_size;
    }

    void expect_bytes(const std::vector<std::byte>& expected) const {
        const auto changed = std::mismatch(bytes.begin(), bytes.end(), expected.begin()).first;
        EXPECT_TRUE(changed == bytes.end())
            << "byte " << changed - bytes.begin() << " of " << bytes.size() << " was changed";
    }
};

// Calls expect_head(batch, token, head, bytes) for every head that was cached. Expects every other byte of the cache,
// and the heads themselves, unchanged.
template <class F>
void expect_only_cached(const HeadBuffer& heads, const TokenSlots& slots, const CacheBuffer& cache, F&& expect_head) {
    heads.expect_untouched();
    std::vector<std::byte> expected = cache.before;
    heads.for_each_head([&](int64_t batch, int64_t token, int head) {
        const int64_t number = batch * heads.shape.tokens + token;
        if (!slots.is_kept(number)) return;
        const int64_t byte = cache.byte_of(slots.block_of(number), slots.slot_in_block(number), head);
        std::copy_n(cache.bytes.begin() + byte, cache.head_bytes(), expected.begin() + byte);
        expect_head(batch, token, head, cache.bytes.data() + byte);
        if (::testing::Test::HasFatalFailure()) {
            ADD_FAILURE() << "batch " << batch << " token " << token << " head " << head << " block "
                          << slots.block_of(number) << " slot " << slots.slot_in_block(number);
        }
    });
    cache.expect_bytes(expected);
}

// Unrotated components are the nearest float8 of the float quotient; rotated ones are within one rounding.
inline void expect_rotated_float8_head(const HeadsShape& shape, Pairing pairing, const std::byte* before,
                                       const std::byte* after, const std::vector<ReferenceCosSin>& cos_sins,
                                       StoredAs stored_as, float scale) {
    const bool halves = pairing == Pairing::halves;
    const int half = static_cast<int>(cos_sins.size());
    const long double largest = largest_finite(stored_as);
    const auto element = [&](int at) { return element_at(shape.dtype, before + int64_t{at} * size_of(shape.dtype)); };
    for (int at = 0; at < shape.head_dim; ++at) {
        const auto bits = static_cast<uint8_t>(after[at]);
        if (at >= 2 * half) {
            const float quotient = static_cast<float>(element(at)) / scale;
            ASSERT_EQ(static_cast<int>(bits), static_cast<int>(nearest_float8(quotient, stored_as)))
                << "component " << at;
            continue;
        }
        const int pair = halves ? at % half : at / 2;
        const bool is_first = halves ? at < half : at % 2 == 0;
        const long double x = element(halves ? pair : 2 * pair);
        const long double y = element(halves ? pair + half : 2 * pair + 1);
        const auto [cos, sin] = cos_sins[pair];
        const long double exact = (is_first ? x * cos - y * sin : y * cos + x * sin) / scale;
        const long double norm = std::sqrt((x * x + y * y) * (cos * cos + sin * sin)) / scale;
        const long double expected = std::clamp<long double>(exact, -largest, largest);
        const long double half_ulp = half_ulp_of_float8(expected, stored_as);
        const double actual = value_of_float8(bits, stored_as);
        ASSERT_LE(std::abs(actual - expected), half_ulp + norm * format_of(shape.dtype).arithmetic_error)
            << actual << " instead of " << static_cast<double>(exact) << ", component " << at;
    }
}

// Expects the rotated components of one head within one rounding of the reference and the others exact.
inline void expect_cached_head(const HeadsShape& shape, Pairing pairing, const std::byte* before,
                               const std::byte* after, const std::vector<ReferenceCosSin>& cos_sins, StoredAs cached_as,
                               float scale) {
    if (is_float8(cached_as)) {
        expect_rotated_float8_head(shape, pairing, before, after, cos_sins, cached_as, scale);
    } else {
        expect_rotated_head(shape, pairing, before, after, cos_sins);
    }
}

}  // namespace mrrope::testing
