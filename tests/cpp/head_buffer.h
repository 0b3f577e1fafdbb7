#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "mrrope/rotary.h"

// Heads in a buffer filled with noise, so that any stray write is detected.

namespace mrrope::testing {

struct Placement {
    std::string order = "bsh";  // batch, sequence, heads: outermost first
    int64_t padding = 0;        // gap in elements after each step of each dimension
    int64_t misalignment = 0;   // offset of the first head from a 16-byte boundary, in elements
    bool tokens_backwards = false;
};

inline std::string describe(const Placement& p) {
    return p.order + " padding " + std::to_string(p.padding) + " misalignment " + std::to_string(p.misalignment) +
           (p.tokens_backwards ? " backwards" : "");
}

// Half of the placements keep heads 16-byte aligned, if head_dim allows.
inline Placement random_placement(DType dtype, std::mt19937_64& random) {
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const char* orders[] = {"bsh", "bhs", "sbh", "shb", "hbs", "hsb"};
    Placement p;
    p.order = orders[upto(0, 5)];
    const int64_t unit = upto(0, 1) == 1 ? 16 / size_of(dtype) : 1;
    p.padding = upto(0, 1) == 1 ? 0 : unit * upto(1, 3);
    p.misalignment = upto(0, 1) == 1 ? 0 : unit * upto(1, 5);
    p.tokens_backwards = upto(0, 5) == 0;
    return p;
}

struct HeadsShape {
    DType dtype = DType::float32;
    int64_t batch = 0;
    int64_t tokens = 0;
    int heads = 0;
    int head_dim = 0;
};

struct HeadBuffer {
    HeadsShape shape;
    HeadStrides strides;
    int64_t first_byte = 0;
    std::vector<std::byte> bytes;
    std::vector<std::byte> before;  // the initial bytes

    std::byte* first_head() { return bytes.data() + first_byte; }

    const std::byte* head(int64_t batch, int64_t token, int64_t head) const {
        return bytes.data() + byte_of(batch, token, head);
    }
    const std::byte* head_before(int64_t batch, int64_t token, int64_t head) const {
        return before.data() + byte_of(batch, token, head);
    }

    int64_t head_bytes() const { return static_cast<int64_t>(shape.head_dim) * size_of(shape.dtype); }

    int64_t byte_of(int64_t batch, int64_t token, int64_t head) const {
        const int64_t element = batch * strides.batch + token * strides.token + head * strides.head;
        return first_byte + element * size_of(shape.dtype);
    }

    // Calls f(batch, token, head) for every head, until a fatal failure.
    template <class F>
    void for_each_head(F&& f) const {
        for (int64_t batch = 0; batch < shape.batch; ++batch) {
            for (int64_t token = 0; token < shape.tokens; ++token) {
                for (int head = 0; head < shape.heads; ++head) {
                    f(batch, token, head);
                    if (::testing::Test::HasFatalFailure()) return;
                }
            }
        }
    }

    // Detects a rotation by the identity: it turns infinity into NaN.
    void fill_with_infinity(int64_t sequence) {
        for_each_head([&](int64_t batch, int64_t token, int head) {
            if (batch != sequence) return;
            for (int at = 0; at < shape.head_dim; ++at) {
                write_infinity(shape.dtype, bytes.data() + byte_of(batch, token, head) + at * size_of(shape.dtype));
            }
        });
        before = bytes;
    }

    void expect_untouched_outside_heads() const {
        std::vector<std::byte> expected = before;
        for_each_head([&](int64_t batch, int64_t token, int head) {
            const int64_t byte = byte_of(batch, token, head);
            std::copy_n(bytes.begin() + byte, head_bytes(), expected.begin() + byte);
        });
        expect_bytes(expected);
    }

    void expect_untouched() const { expect_bytes(before); }

private:
    void expect_bytes(const std::vector<std::byte>& expected) const {
        ASSERT_EQ(bytes.size(), expected.size());
        const auto changed = std::mismatch(bytes.begin(), bytes.end(), expected.begin()).first;
        EXPECT_TRUE(changed == bytes.end()) << "byte " << changed - bytes.begin() << " of " << bytes.size()
                                            << " was changed, the first head is at byte " << first_byte;
    }
};

inline constexpr int64_t guard_bytes = 128;

inline HeadBuffer make_heads(const HeadsShape& shape, const Placement& placement, std::mt19937_64& random) {
    const int element = size_of(shape.dtype);
    HeadBuffer buffer;
    buffer.shape = shape;
    int64_t step = shape.head_dim + placement.padding;
    for (auto dim = placement.order.rbegin(); dim != placement.order.rend(); ++dim) {
        int64_t& stride = *dim == 'b' ? buffer.strides.batch : *dim == 's' ? buffer.strides.token : buffer.strides.head;
        const int64_t size = *dim == 'b' ? shape.batch : *dim == 's' ? shape.tokens : shape.heads;
        stride = step;
        step = step * size + placement.padding;
    }
    buffer.first_byte = guard_bytes + placement.misalignment * element;
    buffer.bytes.resize(buffer.first_byte + step * element + guard_bytes);
    for (std::byte& byte : buffer.bytes) byte = static_cast<std::byte>(random());
    if (placement.tokens_backwards && shape.tokens > 0) {
        buffer.first_byte += (shape.tokens - 1) * buffer.strides.token * element;
        buffer.strides.token = -buffer.strides.token;
    }
    buffer.for_each_head([&](int64_t batch, int64_t token, int head) {
        std::byte* first = buffer.bytes.data() + buffer.byte_of(batch, token, head);
        for (int at = 0; at < shape.head_dim; ++at) write_random_element(shape.dtype, first + at * element, random);
    });
    buffer.before = buffer.bytes;
    return buffer;
}

}  // namespace mrrope::testing
