#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "head_buffer.h"
#include "mrrope/learnable_rotary.h"
#include "mrrope/learnable_rotary_phase.h"
#include "reference_rotation.h"
#include "rotary_case.h"

// A learnable_rotary call, or its backward pass, with all its buffers, generated from a seed and checked against a
// reference in long double. phase_step_of has tests of its own.

namespace mrrope::testing {

struct LearnableCaseOptions {
    CaseOptions rotary = {};  // out of place, with one row of positions; its table is unused
    int tables = 1;
    DType table_dtype = DType::float64;
    bool wants_heads = true;
};

inline std::string describe(const LearnableCaseOptions& o) {
    return std::to_string(o.tables) + " tables of " + name_of(o.table_dtype) +
           (o.wants_heads ? " " : " without the heads' gradient ") + describe(o.rotary);
}

// Numbers of a table's dtype, in memory as the library takes them.
struct TableWords {
    DType dtype;
    std::vector<std::byte> bytes;

    TableWords(DType dtype, int64_t count) : dtype(dtype), bytes(count * size_of(dtype)) {}

    double at(int64_t i) const { return element_at(dtype, bytes.data() + i * size_of(dtype)); }
    void set(int64_t i, double value) {
        const auto narrow = static_cast<float>(value);
        if (dtype == DType::float64) {
            std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
        } else {
            std::memcpy(bytes.data() + i * sizeof narrow, &narrow, sizeof narrow);
        }
    }
};

class LearnableCase {
public:
    explicit LearnableCase(const LearnableCaseOptions& options)
        : options_(options),
          rotary_(options.rotary),
          random_(options.rotary.seed + 1),
          frequencies(options.table_dtype, int64_t{options.tables} * half()),
          factors(options.table_dtype, options.tables),
          frequency_gradients(options.table_dtype, int64_t{options.tables} * half()),
          factor_gradients(options.table_dtype, options.tables),
          packed_tables(row_words(), 7),
          q_gradient(make_gradient(options.rotary.q_heads)),
          k_gradient(make_gradient(options.rotary.k_heads)) {
        std::uniform_real_distribution<double> exponent(-12.0, 1.0);
        for (int64_t i = 0; i < int64_t{options.tables} * half(); ++i) {
            frequencies.set(i, std::exp(exponent(random_)) * (random_() % 4 == 0 ? -1 : 1));
        }
        for (int table = 0; table < options.tables; ++table) {
            factors.set(table, 0.5 + static_cast<double>(random_() % 1000) / 1000);
        }
    }

    RotaryCase& rotary() { return rotary_; }
    int half() const { return options_.rotary.rotary_dim / 2; }
    int64_t row_words() const { return int64_t{options_.tables} * (half() + 1); }
    const LearnableCaseOptions& options() const { return options_; }

    LearnableRotaryArgs args() {
        LearnableRotaryArgs args;
        args.rotary = rotary_.args();
        args.rotary.table = nullptr;
        args.frequencies = frequencies.bytes.data();
        args.attention_factors = factors.bytes.data();
        args.table_dtype = options_.table_dtype;
        args.tables = options_.tables;
        args.packed_tables = packed_tables.data();
        return args;
    }

    // As the forward pass leaves them.
    void pack_tables() {
        for (int table = 0; table < options_.tables; ++table) {
            uint64_t* words = packed_tables.data() + int64_t{table} * (half() + 1);
            for (int i = 0; i < half(); ++i) words[i] = phase_step_of(frequencies.at(int64_t{table} * half() + i));
            words[half()] = attention_factor_word(factors.at(table), true);
        }
    }

    // Without table_sums, whose size is computed from these arguments. They read no frequencies.
    LearnableRotaryGradientArgs gradient_args() {
        LearnableRotaryGradientArgs args;
        args.call = this->args();
        args.call.frequencies = args.call.attention_factors = nullptr;
        if (!options_.wants_heads) args.call.rotary.q.out = args.call.rotary.k.out = nullptr;
        args.q = {.data = q_gradient.first_head(), .strides = q_gradient.strides};
        if (options_.rotary.k_heads > 0) args.k = {.data = k_gradient.first_head(), .strides = k_gradient.strides};
        args.frequencies = frequency_gradients.bytes.data();
        args.attention_factors = factor_gradients.bytes.data();
        return args;
    }

    // Noise, so that sums that are not written show.
    std::vector<double> partial_sums(int64_t rows) {
        return std::vector<double>(rows * row_words(), std::numeric_limits<double>::quiet_NaN());
    }

    void expect_rotated() {
        SCOPED_TRACE(describe(options_));
        for_each_head([&](bool is_q, int64_t batch, int64_t token, int head) {
            const int table = table_of(is_q, head);
            std::vector<ReferenceCosSin> by(half());
            for (int i = 0; i < half(); ++i) by[i] = cos_sin(table, i, batch, token, factors.at(table), 1);
            expect_rotated_head(input(is_q).shape, options_.rotary.pairing, input(is_q).head_before(batch, token, head),
                                output(is_q).head(batch, token, head), by);
        });
        expect_untouched_outside();
    }

    void expect_gradients() {
        SCOPED_TRACE(describe(options_));
        const int64_t words = row_words();
        std::vector<long double> sums(words), magnitudes(words);
        int64_t terms = 1;
        const bool halves = options_.rotary.pairing == Pairing::halves;
        for_each_head([&](bool is_q, int64_t batch, int64_t token, int head) {
            ++terms;
            const int table = table_of(is_q, head);
            const HeadBuffer& gradient = is_q ? q_gradient : k_gradient;
            const long double position = rotary_.positions().at(0, batch, token);
            const long double direction = options_.rotary.conjugate ? -1 : 1;
            std::vector<ReferenceCosSin> back(half());
            for (int i = 0; i < half(); ++i) {
                back[i] = cos_sin(table, i, batch, token, factors.at(table), -1);
                const auto [cos, sin] = cos_sin(table, i, batch, token, 1.0L, -1);
                const int a = halves ? i : 2 * i;
                const int b = halves ? i + half() : 2 * i + 1;
                const long double x1 = at(input(is_q), batch, token, head, a);
                const long double x2 = at(input(is_q), batch, token, head, b);
                const long double g1 = at(gradient, batch, token, head, a);
                const long double g2 = at(gradient, batch, token, head, b);
                const long double v1 = g1 * cos - g2 * sin;
                const long double v2 = g2 * cos + g1 * sin;
                const long double magnitude = std::hypot(x1, x2) * std::hypot(g1, g2);
                const int64_t row = int64_t{table} * (half() + 1);
                sums[row + i] += factors.at(table) * direction * position * (v2 * x1 - v1 * x2);
                magnitudes[row + i] += std::abs(factors.at(table) * position) * magnitude;
                sums[row + half()] += v1 * x1 + v2 * x2;
                magnitudes[row + half()] += magnitude;
            }
            if (!options_.wants_heads) return;
            expect_rotated_head(gradient.shape, options_.rotary.pairing, gradient.head_before(batch, token, head),
                                output(is_q).head(batch, token, head), back);
        });
        if (options_.wants_heads) {
            expect_untouched_outside();
        } else {
            output(true).expect_untouched();
            output(false).expect_untouched();
        }
        // A term's products and additions, then the double sum over all terms and the rounding of the result.
        const DType dtype = options_.rotary.dtype;
        const long double of_term =
            format_of(dtype).arithmetic_error + 16 * std::ldexp(1.0L, dtype == DType::float64 ? -53 : -24);
        const long double of_sum = terms * half() * std::ldexp(1.0L, -53);
        const long double rounding = std::ldexp(1.0L, options_.table_dtype == DType::float64 ? -53 : -24);
        for (int table = 0; table < options_.tables; ++table) {
            for (int i = 0; i <= half(); ++i) {
                const int64_t word = int64_t{table} * (half() + 1) + i;
                const double actual =
                    i < half() ? frequency_gradients.at(int64_t{table} * half() + i) : factor_gradients.at(table);
                const long double slack =
                    (of_term + of_sum) * magnitudes[word] + rounding * std::abs(sums[word]) + 1e-300L;
                ASSERT_LE(std::abs(actual - sums[word]), slack)
                    << actual << " instead of " << static_cast<double>(sums[word]) << ", table " << table << " word "
                    << i;
            }
        }
    }

private:
    HeadBuffer make_gradient(int heads) {
        const CaseOptions& o = options_.rotary;
        return make_heads(
            {.dtype = o.dtype, .batch = o.batch, .tokens = o.tokens, .heads = heads, .head_dim = o.head_dim}, o.in,
            random_);
    }

    int table_of(bool is_q, int head) const {
        return head / ((is_q ? options_.rotary.q_heads : options_.rotary.k_heads) / options_.tables);
    }

    // `direction` -1: by the negated angle.
    ReferenceCosSin cos_sin(int table, int pair, int64_t batch, int64_t token, long double gain, int direction) const {
        const uint64_t step = phase_step_of(frequencies.at(int64_t{table} * half() + pair));
        const long double angle = reference_angle(rotary_.positions().at(0, batch, token), step);
        return reference_cos_sin((options_.rotary.conjugate ? -direction : direction) * angle, gain);
    }

    HeadBuffer& input(bool is_q) { return (is_q ? rotary_.q() : rotary_.k()).in; }
    HeadBuffer& output(bool is_q) { return (is_q ? rotary_.q() : rotary_.k()).out; }

    long double at(const HeadBuffer& buffer, int64_t batch, int64_t token, int head, int component) const {
        return element_at(buffer.shape.dtype,
                          buffer.head_before(batch, token, head) + int64_t{component} * size_of(buffer.shape.dtype));
    }

    template <class F>
    void for_each_head(F&& f) {
        for (const bool is_q : {true, false}) {
            input(is_q).for_each_head([&](int64_t batch, int64_t token, int head) { f(is_q, batch, token, head); });
        }
    }

    void expect_untouched_outside() {
        for (const bool is_q : {true, false}) {
            output(is_q).expect_untouched_outside_heads();
            input(is_q).expect_untouched();
        }
    }

    LearnableCaseOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;

public:
    TableWords frequencies, factors, frequency_gradients, factor_gradients;
    std::vector<uint64_t> packed_tables;
    HeadBuffer q_gradient, k_gradient;
};

inline LearnableCaseOptions random_learnable_options(uint64_t seed) {
    std::mt19937_64 random(seed);
    LearnableCaseOptions o;
    o.rotary = random_options(seed);
    o.rotary.in_place = false;
    o.rotary.position_rows = 0;
    o.rotary.tables = {};
    o.rotary.attention_factor = 1.0;
    o.tables = 1 + static_cast<int>(random() % 3);
    o.rotary.q_heads *= o.tables;
    o.rotary.k_heads *= o.tables;
    o.table_dtype = random() % 2 == 0 ? DType::float32 : DType::float64;
    o.wants_heads = random() % 4 != 0;
    return o;
}

}  // namespace mrrope::testing
