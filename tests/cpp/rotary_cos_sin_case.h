#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "mrrope/rotary_cos_sin.h"
#include "rotary_case.h"

// A call of rotary_cos_sin with all its buffers, checked against long double. Cosines and sines are any numbers:
// nothing requires that their squares add up to one.

namespace mrrope::testing {

struct CosSinCaseOptions {
    CaseOptions rotary = {};  // positions and tables are unused
    bool float32_columns = false;
    bool full_width = true;  // a column per component, not per pair
    bool broadcast_batch = false;
    int padding = 0;  // columns of noise before the first token and after each
};

inline std::string describe(const CosSinCaseOptions& o) {
    return std::string(o.float32_columns ? "float32 columns" : "columns of the heads' dtype") +
           (o.full_width ? ", one per component" : ", one per pair") + (o.broadcast_batch ? ", of one sequence" : "") +
           ", padding " + std::to_string(o.padding) + " " + describe(o.rotary);
}

class CosSinCase {
public:
    explicit CosSinCase(const CosSinCaseOptions& options)
        : options_(options), rotary_(options.rotary), cos(make_columns(1)), sin(make_columns(2)) {}

    RotaryCase& rotary() { return rotary_; }
    DType columns_dtype() const { return options_.float32_columns ? DType::float32 : options_.rotary.dtype; }
    int64_t first_byte() const { return int64_t{options_.padding} * size_of(columns_dtype()); }

    RotaryCosSinArgs args() {
        RotaryCosSinArgs args;
        args.rotary = rotary_.args();
        args.rotary.positions = {};
        args.rotary.table = nullptr;
        args.rotary.choice = {};
        args.cos = view(cos.data());
        args.sin = view(sin.data());
        args.columns_dtype = columns_dtype();
        args.columns_per_pair = columns_per_pair();
        return args;
    }

    // Columns that start at `data`.
    ColumnsView view(const std::byte* data) const {
        return {.data = data + first_byte(),
                .batch_stride = options_.broadcast_batch ? 0 : token_stride() * options_.rotary.tokens,
                .token_stride = token_stride()};
    }

    void expect_rotated() {
        SCOPED_TRACE(describe(options_));
        expect_rotated(rotary_.q(), "q");
        expect_rotated(rotary_.k(), "k");
    }

private:
    int half() const { return options_.rotary.rotary_dim / 2; }
    int64_t token_stride() const { return (options_.full_width ? 2 : 1) * half() + options_.padding; }
    int columns_per_pair() const {
        return options_.full_width && options_.rotary.pairing == Pairing::interleaved ? 2 : 1;
    }

    // Noise, also in the columns that repeat others: they must not be read.
    std::vector<std::byte> make_columns(uint64_t seed) const {
        std::mt19937_64 random(options_.rotary.seed + seed);
        const int64_t tokens = (options_.broadcast_batch ? 1 : options_.rotary.batch) * options_.rotary.tokens;
        const int64_t count = options_.padding + tokens * token_stride();
        std::vector<std::byte> bytes(count * size_of(columns_dtype()));
        for (int64_t i = 0; i < count; ++i) {
            write_random_element(columns_dtype(), bytes.data() + i * size_of(columns_dtype()), random);
        }
        return bytes;
    }

    long double column(const std::vector<std::byte>& columns, int64_t batch, int64_t token, int pair) const {
        const ColumnsView at = view(columns.data());
        const int64_t index = batch * at.batch_stride + token * at.token_stride + int64_t{pair} * columns_per_pair();
        return element_at(columns_dtype(), static_cast<const std::byte*>(at.data) + index * size_of(columns_dtype()));
    }

    void expect_rotated(const Heads& heads, const char* name) {
        SCOPED_TRACE(name);
        const HeadBuffer& out = rotary_.output(heads);
        const long double direction = options_.rotary.conjugate ? -1 : 1;
        heads.in.for_each_head([&](int64_t batch, int64_t token, int head) {
            std::vector<ReferenceCosSin> by(half());
            for (int i = 0; i < half(); ++i) {
                by[i] = {column(cos, batch, token, i), direction * column(sin, batch, token, i)};
            }
            expect_rotated_head(heads.in.shape, options_.rotary.pairing, heads.in.head_before(batch, token, head),
                                out.head(batch, token, head), by);
        });
        out.expect_untouched_outside_heads();
        if (!options_.rotary.in_place) heads.in.expect_untouched();
    }

    CosSinCaseOptions options_;
    RotaryCase rotary_;

public:
    std::vector<std::byte> cos, sin;
};

inline CosSinCaseOptions random_cos_sin_options(uint64_t seed, RandomLimits limits = {}) {
    std::mt19937_64 random(seed);
    CosSinCaseOptions o;
    o.rotary = random_options(seed, limits);
    o.rotary.position_rows = 0;
    o.rotary.tables = {};
    o.rotary.attention_factor = 1.0;
    o.float32_columns = random() % 2 == 0;
    o.full_width = random() % 2 == 0;
    o.broadcast_batch = random() % 3 == 0;
    o.padding = random() % 2 == 0 ? 0 : static_cast<int>(random() % 9);
    return o;
}

}  // namespace mrrope::testing
