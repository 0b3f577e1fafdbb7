#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "mrrope/frequency_table.h"
#include "mrrope/rotary.h"

// One call of the rotation with everything it reads and writes, made from a seed, and a reference in long double that
// shares no code with the product.

namespace mrrope::testing {

// --- elements
// ----------------------------------------------------------------------------------------------------------

struct Format {
    int significant_bits;
    int smallest_exponent;  // frexp's, of the smallest normal number
    double largest;
    double arithmetic_error;  // of cosine, sine and rotation before the result is rounded, relative to the pair's norm
};

inline Format format_of(DType dtype) {
    constexpr double in_float = 2.5e-7;
    switch (dtype) {
        case DType::float64: return {53, -1021, std::numeric_limits<double>::max(), 5e-16};
        case DType::float32: return {24, -125, std::numeric_limits<float>::max(), in_float};
        case DType::float16: return {11, -13, 65504.0, in_float};
        case DType::bfloat16: return {8, -125, 0x1.fep127, in_float};
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

// Round to nearest, ties to even, overflowing to infinity.
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

// --- where heads lie in memory
// -----------------------------------------------------------------------------------------

struct Placement {
    std::string order = "bsh";  // batch, sequence, heads: outermost first
    int64_t padding = 0;        // elements left free after each step of each dimension
    int64_t misalignment = 0;   // elements by which the first head is off 16 bytes
    bool tokens_backwards = false;
};

struct CaseOptions {
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
    int64_t batch = 1;
    int64_t tokens = 3;
    int q_heads = 2;
    int k_heads = 1;
    int head_dim = 16;
    int rotary_dim = 16;
    bool in_place = false;
    bool conjugate = false;
    double attention_factor = 1.0;
    Placement in = {};
    Placement out = {};
    bool int64_positions = true;
    bool same_positions_for_all_sequences = false;
    bool same_position_for_all_tokens = false;
    int64_t smallest_position = 0;
    int64_t largest_position = 100000;
    uint64_t seed = 1;
};

inline std::string describe(const CaseOptions& o) {
    const auto placement = [](const Placement& p) {
        return p.order + " padding " + std::to_string(p.padding) + " misalignment " + std::to_string(p.misalignment) +
               (p.tokens_backwards ? " backwards" : "");
    };
    return std::string(name_of(o.dtype)) + (o.pairing == Pairing::halves ? " halves" : " interleaved") + " batch " +
           std::to_string(o.batch) + " tokens " + std::to_string(o.tokens) + " heads " + std::to_string(o.q_heads) +
           "+" + std::to_string(o.k_heads) + " head_dim " + std::to_string(o.head_dim) + " rotary_dim " +
           std::to_string(o.rotary_dim) + (o.in_place ? " in place" : "") + (o.conjugate ? " conjugate" : "") +
           " gain " + std::to_string(o.attention_factor) + " in {" + placement(o.in) + "} out {" + placement(o.out) +
           "} positions " + (o.int64_positions ? "int64" : "int32") + " seed " + std::to_string(o.seed);
}

// A buffer filled with noise, so that every byte that must not change can be told.
struct Buffer {
    std::vector<std::byte> bytes;
    HeadStrides strides;
    int64_t first_byte = 0;
};

inline constexpr int64_t guard_bytes = 128;

inline Buffer make_buffer(const CaseOptions& options, const Placement& placement, int heads, std::mt19937_64& random) {
    const int element = size_of(options.dtype);
    Buffer buffer;
    int64_t step = options.head_dim + placement.padding;
    for (auto dim = placement.order.rbegin(); dim != placement.order.rend(); ++dim) {
        int64_t& stride = *dim == 'b' ? buffer.strides.batch : *dim == 's' ? buffer.strides.token : buffer.strides.head;
        const int64_t size = *dim == 'b' ? options.batch : *dim == 's' ? options.tokens : heads;
        stride = step;
        step = step * size + placement.padding;
    }
    buffer.first_byte = guard_bytes + placement.misalignment * element;
    buffer.bytes.resize(buffer.first_byte + step * element + guard_bytes);
    for (std::byte& byte : buffer.bytes) byte = static_cast<std::byte>(random());
    if (placement.tokens_backwards && options.tokens > 0) {
        buffer.first_byte += (options.tokens - 1) * buffer.strides.token * element;
        buffer.strides.token = -buffer.strides.token;
    }
    return buffer;
}

struct Heads {
    int count = 0;
    Buffer in;
    Buffer out;  // in place: unused
    std::vector<std::byte> in_before;
    std::vector<std::byte> out_before;
};

// --- one call
// ----------------------------------------------------------------------------------------------------------

class RotaryCase {
public:
    explicit RotaryCase(const CaseOptions& options) : options_(options), random_(options.seed) {
        const double base = 10000.0;
        const FrequencyTable table = build_table({.method = Method::mrrope_pro,
                                                  .rotary_dim = options.rotary_dim,
                                                  .base = base,
                                                  .original_max_position = 4096,
                                                  .scale = 8,
                                                  .attention_factor = options.attention_factor});
        table_ = packed(table);
        q_ = make_heads(options.q_heads);
        k_ = make_heads(options.k_heads);
        make_positions();
    }

    const CaseOptions& options() const { return options_; }
    Heads& q() { return q_; }
    Heads& k() { return k_; }
    std::vector<uint64_t>& table() { return table_; }
    std::vector<int64_t>& position_words() { return position_words_; }

    RotaryArgs args() {
        RotaryArgs args;
        args.q = view(q_);
        args.k = view(k_);
        args.positions = {.data = position_words_.data(),
                          .is_int64 = options_.int64_positions,
                          .batch_stride = position_batch_stride_,
                          .token_stride = position_token_stride_};
        args.table = table_.data();
        args.batch = options_.batch;
        args.tokens = options_.tokens;
        args.head_dim = options_.head_dim;
        args.rotary_dim = options_.rotary_dim;
        args.dtype = options_.dtype;
        args.pairing = options_.pairing;
        args.conjugate = options_.conjugate;
        return args;
    }

    const Buffer& output(const Heads& heads) const { return options_.in_place ? heads.in : heads.out; }
    Buffer& output(Heads& heads) { return options_.in_place ? heads.in : heads.out; }

    const std::byte* component(const Buffer& buffer, const std::vector<std::byte>& bytes, int64_t batch, int64_t token,
                               int64_t head, int at) const {
        return bytes.data() + byte_of(buffer, batch, token, head, at);
    }

    int64_t position(int64_t batch, int64_t token) const {
        const int64_t index = batch * position_batch_stride_ + token * position_token_stride_;
        const auto* bytes = reinterpret_cast<const std::byte*>(position_words_.data());
        return options_.int64_positions ? read_as<int64_t>(bytes + 8 * index) : read_as<int32_t>(bytes + 4 * index);
    }

    // Every component within one rounding of the long double reference, every other byte as it was.
    void expect_rotated() {
        SCOPED_TRACE(describe(options_));
        expect_rotated(q_, "q");
        expect_rotated(k_, "k");
    }

    // Calls f(batch, token, head, component) for every component of `heads`, until a test has failed for good.
    template <class F>
    void for_each_component(const Heads& heads, F&& f) const {
        for (int64_t batch = 0; batch < options_.batch; ++batch) {
            for (int64_t token = 0; token < options_.tokens; ++token) {
                for (int head = 0; head < heads.count; ++head) {
                    for (int at = 0; at < options_.head_dim; ++at) f(batch, token, head, at);
                    if (::testing::Test::HasFatalFailure()) return;
                }
            }
        }
    }

    // `bytes` is a picture of the output's buffer after the call.
    void expect_untouched_outside_heads(const Heads& heads, const std::vector<std::byte>& bytes) const {
        const Buffer& buffer = output(heads);
        std::vector<std::byte> expected = options_.in_place ? heads.in_before : heads.out_before;
        const int element = size_of(options_.dtype);
        for_each_component(heads, [&](int64_t batch, int64_t token, int64_t head, int at) {
            const int64_t byte = byte_of(buffer, batch, token, head, at);
            std::copy_n(bytes.begin() + byte, element, expected.begin() + byte);
        });
        ASSERT_EQ(bytes.size(), expected.size());
        const auto changed = std::mismatch(bytes.begin(), bytes.end(), expected.begin()).first;
        EXPECT_TRUE(changed == bytes.end()) << "byte " << changed - bytes.begin() << " of " << bytes.size()
                                            << " was changed, the first head is at byte " << buffer.first_byte;
    }

private:
    int64_t byte_of(const Buffer& buffer, int64_t batch, int64_t token, int64_t head, int at) const {
        const HeadStrides& strides = buffer.strides;
        const int64_t element = batch * strides.batch + token * strides.token + head * strides.head + at;
        return buffer.first_byte + element * size_of(options_.dtype);
    }

    Heads make_heads(int count) {
        Heads heads;
        heads.count = count;
        heads.in = make_buffer(options_, options_.in, count, random_);
        if (!options_.in_place) heads.out = make_buffer(options_, options_.out, count, random_);
        for_each_component(heads, [&](int64_t batch, int64_t token, int64_t head, int at) {
            write_random_element(options_.dtype, heads.in.bytes.data() + byte_of(heads.in, batch, token, head, at),
                                 random_);
        });
        heads.in_before = heads.in.bytes;
        heads.out_before = heads.out.bytes;
        return heads;
    }

    void make_positions() {
        position_token_stride_ = options_.same_position_for_all_tokens ? 0 : 1;
        position_batch_stride_ = options_.same_positions_for_all_sequences ? 0 : options_.tokens + 1;
        const int64_t count = (options_.batch + 1) * (options_.tokens + 1);
        std::uniform_int_distribution<int64_t> any(options_.smallest_position, options_.largest_position);
        position_words_.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t position = any(random_);
            auto* bytes = reinterpret_cast<std::byte*>(position_words_.data());
            if (options_.int64_positions) {
                std::memcpy(bytes + 8 * i, &position, 8);
            } else {
                const auto narrow = static_cast<int32_t>(position);
                std::memcpy(bytes + 4 * i, &narrow, 4);
            }
        }
    }

    HeadsView view(Heads& heads) {
        if (heads.count == 0) return {};
        Buffer& out = output(heads);
        return {.in = heads.in.bytes.data() + heads.in.first_byte,
                .out = out.bytes.data() + out.first_byte,
                .heads = heads.count,
                .in_strides = heads.in.strides,
                .out_strides = out.strides};
    }

    struct Turn {
        long double cos;
        long double sin;
    };

    Turn reference_turn(int64_t position, int pair) const {
        const auto phase =
            static_cast<uint64_t>(static_cast<unsigned __int128>(static_cast<__int128>(position)) * table_[pair]);
        const long double angle = std::ldexp(static_cast<long double>(static_cast<int64_t>(phase)), -64) * 2 *
                                  std::numbers::pi_v<long double>;
        const long double gain = std::bit_cast<double>(table_[options_.rotary_dim / 2]);
        return {gain * std::cos(angle), (options_.conjugate ? -gain : gain) * std::sin(angle)};
    }

    void expect_rotated(Heads& heads, const char* name) {
        SCOPED_TRACE(name);
        const Buffer& out = output(heads);
        const int half = options_.rotary_dim / 2;
        const bool halves = options_.pairing == Pairing::halves;
        const Format format = format_of(options_.dtype);
        const double gain = std::bit_cast<double>(table_[half]);
        const long double half_ulp = std::ldexp(1.0L, -format.significant_bits);
        std::vector<Turn> turns(half);
        for_each_component(heads, [&](int64_t batch, int64_t token, int64_t head, int at) {
            const auto before = [&](int i) -> long double {
                return element_at(options_.dtype, component(heads.in, heads.in_before, batch, token, head, i));
            };
            const double actual = element_at(options_.dtype, component(out, out.bytes, batch, token, head, at));
            const auto where = [&] {
                return "batch " + std::to_string(batch) + " token " + std::to_string(token) + " head " +
                       std::to_string(head) + " component " + std::to_string(at) + " position " +
                       std::to_string(position(batch, token));
            };
            if (at >= options_.rotary_dim) {
                ASSERT_EQ(actual, static_cast<double>(before(at))) << "tail, " << where();
                return;
            }
            if (head == 0 && at == 0) {
                for (int i = 0; i < half; ++i) turns[i] = reference_turn(position(batch, token), i);
            }
            const int pair = halves ? at % half : at / 2;
            const bool is_first = halves ? at < half : at % 2 == 0;
            const long double x = before(halves ? pair : 2 * pair);
            const long double y = before(halves ? pair + half : 2 * pair + 1);
            const auto [cos, sin] = turns[pair];
            const long double expected = is_first ? x * cos - y * sin : y * cos + x * sin;
            const long double norm = gain * std::sqrt(x * x + y * y);
            const long double slack = std::abs(expected) * half_ulp + norm * format.arithmetic_error +
                                      std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1);
            ASSERT_LE(std::abs(actual - expected), slack)
                << actual << " instead of " << static_cast<double>(expected) << ", " << where();
        });
        expect_untouched_outside_heads(heads, out.bytes);
        if (!options_.in_place) {
            EXPECT_TRUE(heads.in.bytes == heads.in_before) << "the input was changed";
        }
    }

    CaseOptions options_;
    std::mt19937_64 random_;
    std::vector<uint64_t> table_;
    Heads q_;
    Heads k_;
    std::vector<int64_t> position_words_;
    int64_t position_batch_stride_ = 0;
    int64_t position_token_stride_ = 1;
};

// --- random ones
// -------------------------------------------------------------------------------------------------------

struct RandomLimits {
    int64_t tokens = 9;
    int head_dim = 160;
};

inline CaseOptions random_options(uint64_t seed, RandomLimits limits = {}) {
    std::mt19937_64 random(seed);
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    const char* orders[] = {"bsh", "bhs", "sbh", "shb", "hbs", "hsb"};
    const auto placement = [&](int element) {
        Placement p;
        p.order = orders[upto(0, 5)];
        // Half of them keep 16 bytes aligned, where heads themselves do.
        const int64_t unit = coin() ? 16 / element : 1;
        p.padding = coin() ? 0 : unit * upto(1, 3);
        p.misalignment = coin() ? 0 : unit * upto(1, 5);
        p.tokens_backwards = upto(0, 5) == 0;
        return p;
    };
    CaseOptions o;
    o.seed = seed;
    o.dtype = all_dtypes[upto(0, 3)];
    o.pairing = both_pairings[upto(0, 1)];
    o.batch = upto(1, 3);
    o.tokens = upto(1, limits.tokens);
    o.q_heads = static_cast<int>(upto(1, 7));
    o.k_heads = static_cast<int>(upto(0, 3));
    const int usual_dims[] = {16, 32, 64, 80, 96, 128};
    o.head_dim = coin() ? usual_dims[upto(0, 5)] : static_cast<int>(upto(2, limits.head_dim));
    o.rotary_dim = o.head_dim / 2 * 2;
    if (upto(0, 2) == 0) o.rotary_dim = static_cast<int>(2 * upto(1, o.head_dim / 2));
    if (upto(0, 3) == 0 && o.head_dim % 64 == 0) o.rotary_dim = o.head_dim / 2;
    o.in_place = coin();
    o.conjugate = coin();
    o.attention_factor = coin() ? 1.0 : 1.2772588722239782;
    o.in = placement(size_of(o.dtype));
    o.out = placement(size_of(o.dtype));
    o.int64_positions = coin();
    o.same_positions_for_all_sequences = coin();
    o.same_position_for_all_tokens = upto(0, 5) == 0;
    if (o.int64_positions) {
        o.smallest_position = std::numeric_limits<int64_t>::min();
        o.largest_position = std::numeric_limits<int64_t>::max();
    } else {
        o.smallest_position = std::numeric_limits<int32_t>::min();
        o.largest_position = std::numeric_limits<int32_t>::max();
    }
    if (coin()) {
        o.smallest_position = -5;
        o.largest_position = 200000;
    }
    return o;
}

}  // namespace mrrope::testing
