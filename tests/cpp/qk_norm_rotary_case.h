#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "head_buffer.h"
#include "mrrope/qk_norm_rotary.h"
#include "rotary_case.h"

// A qk_norm_rotary call, or its backward pass, with all its buffers, generated from a seed and checked against a
// reference in long double.

namespace mrrope::testing {

struct NormCaseOptions {
    CaseOptions rotary = {};
    NormOver over = NormOver::head;
    double eps = 1e-6;
    double weight_offset = 0.0;
    int64_t weight_misalignment = 0;
    bool wants_weight_gradients = true;
};

inline std::string describe(const NormCaseOptions& o) {
    return std::string(o.over == NormOver::head ? "over a head" : "over all heads") + " eps " + std::to_string(o.eps) +
           " offset " + std::to_string(o.weight_offset) + " weights off by " + std::to_string(o.weight_misalignment) +
           " " + describe(o.rotary);
}

// Error before rounding, relative to the pair's norm: of a rotation, of the sum of squares, its inverse root and the
// products.
inline long double norm_error(DType dtype) {
    return format_of(dtype).arithmetic_error + 16 * std::ldexp(1.0L, dtype == DType::float64 ? -53 : -24);
}

// The weights of q or k, in a buffer of noise.
struct Weights {
    DType dtype = DType::float32;
    int64_t first_byte = 0;
    std::vector<std::byte> bytes;

    Weights(DType dtype, int64_t count, int64_t misalignment, std::mt19937_64& random)
        : dtype(dtype), first_byte(misalignment * size_of(dtype)), bytes(first_byte + count * size_of(dtype)) {
        for (int64_t i = 0; i < count; ++i) write_random_element(dtype, bytes.data() + byte_of(i), random);
    }

    int64_t byte_of(int64_t i) const { return first_byte + i * size_of(dtype); }
    long double at(int64_t i) const { return element_at(dtype, bytes.data() + byte_of(i)); }
};

class NormCase {
public:
    explicit NormCase(const NormCaseOptions& options)
        : options_(options),
          rotary_(options.rotary),
          random_(options.rotary.seed + 1),
          q_weights_(make_weights(options.rotary.q_heads)),
          k_weights_(make_weights(options.rotary.k_heads)),
          q_gradient_(make_gradient(options.rotary.q_heads)),
          k_gradient_(make_gradient(options.rotary.k_heads)) {}

    const NormCaseOptions& options() const { return options_; }
    RotaryCase& rotary() { return rotary_; }
    Weights& weights(bool is_q) { return is_q ? q_weights_ : k_weights_; }
    HeadBuffer& gradient(bool is_q) { return is_q ? q_gradient_ : k_gradient_; }
    std::vector<double>& weight_sums(bool is_q) { return is_q ? q_sums_ : k_sums_; }
    std::vector<std::byte>& weight_gradient(bool is_q) { return is_q ? q_weight_gradient_ : k_weight_gradient_; }

    QkNormRotaryArgs args() {
        QkNormRotaryArgs args;
        args.rotary = rotary_.args();
        args.q_weight = q_weights_.bytes.data() + q_weights_.first_byte;
        if (options_.rotary.k_heads > 0) args.k_weight = k_weights_.bytes.data() + k_weights_.first_byte;
        args.eps = options_.eps;
        args.weight_offset = options_.weight_offset;
        args.over = options_.over;
        return args;
    }

    // Without the gradients of the weights; the size of weight_sums is computed from these arguments.
    QkNormRotaryGradientArgs gradient_args() {
        QkNormRotaryGradientArgs args;
        args.call = this->args();
        args.q = {.data = q_gradient_.first_head(), .strides = q_gradient_.strides};
        if (options_.rotary.k_heads > 0) args.k = {.data = k_gradient_.first_head(), .strides = k_gradient_.strides};
        return args;
    }

    // Allocates the gradients of the weights and their partial sums, filled with noise. Sums are doubles, of which
    // float sums use half the bytes.
    void allocate_weight_gradients(const WeightSumRows& rows) {
        for (const bool is_q : {true, false}) {
            const int64_t weights = weight_count(heads(is_q));
            weight_sums(is_q).resize((is_q ? rows.q : rows.k) * weights);
            for (double& sum : weight_sums(is_q)) sum = 1e300 * static_cast<double>(random_() % 3);
            weight_gradient(is_q).resize(weights * size_of(options_.rotary.dtype));
            for (std::byte& byte : weight_gradient(is_q)) byte = static_cast<std::byte>(random_());
        }
    }

    int64_t weight_count(int heads) const {
        return static_cast<int64_t>(options_.over == NormOver::head ? 1 : heads) * options_.rotary.head_dim;
    }

    // Expects every component within one rounding, and every other byte unchanged.
    void expect_normed() {
        SCOPED_TRACE(describe(options_));
        for_each_row([&](const Row& row) {
            const std::vector<long double> x = read(input(row.is_q), row);
            const long double scale = inverse_rms(x);
            std::vector<long double> normed(x.size());
            for (size_t i = 0; i < x.size(); ++i) normed[i] = x[i] * scale * weight(row.is_q, i);
            const RotatedRow rotated = rotate(row, normed, 1);
            for (size_t i = 0; i < x.size(); ++i) expect_near(row, i, rotated.value[i], rotated.norm[i]);
        });
        expect_untouched_outside();
    }

    // Expects the gradients of the input, within one rounding, and of the weights.
    void expect_gradients() {
        SCOPED_TRACE(describe(options_));
        std::vector<long double> weight_gradients[2], magnitudes[2];
        for (const bool is_q : {true, false}) {
            weight_gradients[is_q].resize(weight_count(heads(is_q)));
            magnitudes[is_q].resize(weight_count(heads(is_q)));
        }
        int64_t terms = 1;
        for_each_row([&](const Row& row) {
            ++terms;
            const std::vector<long double> x = read(input(row.is_q), row);
            const RotatedRow v = rotate(row, read(gradient(row.is_q), row), -1);
            const long double scale = inverse_rms(x);
            long double mean = 0;
            long double mean_magnitude = 0;
            for (size_t i = 0; i < x.size(); ++i) {
                mean += v.value[i] * weight(row.is_q, i) * x[i] / x.size();
                mean_magnitude += v.norm[i] * std::abs(weight(row.is_q, i) * x[i]) / x.size();
            }
            const long double cube = scale * scale * scale;
            for (size_t i = 0; i < x.size(); ++i) {
                const long double across = scale * weight(row.is_q, i);
                const long double magnitude = std::abs(across) * v.norm[i] + std::abs(x[i]) * cube * mean_magnitude;
                expect_near(row, i, across * v.value[i] - x[i] * cube * mean, 3 * magnitude);
                weight_gradients[row.is_q][i] += x[i] * scale * v.value[i];
                magnitudes[row.is_q][i] += std::abs(x[i]) * scale * v.norm[i];
            }
        });
        expect_untouched_outside();
        if (!options_.wants_weight_gradients) return;
        for (const bool is_q : {true, false}) {
            const DType dtype = options_.rotary.dtype;
            const Format format = format_of(dtype);
            const long double error = norm_error(dtype) + terms * std::ldexp(1.0L, dtype == DType::float64 ? -53 : -24);
            const int64_t count = weight_count(heads(is_q));
            for (int64_t i = 0; heads(is_q) > 0 && i < count; ++i) {
                const double found = element_at(dtype, weight_gradient(is_q).data() + i * size_of(dtype));
                const long double expected = weight_gradients[is_q][i];
                const long double slack = std::ldexp(std::abs(expected), -format.significant_bits) +
                                          3 * error * magnitudes[is_q][i] +
                                          std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1);
                ASSERT_LE(std::abs(found - expected), slack) << found << " instead of " << static_cast<double>(expected)
                                                             << ", weight " << i << (is_q ? " of q" : " of k");
            }
        }
    }

private:
    // The heads that share one mean square.
    struct Row {
        bool is_q;
        int64_t batch;
        int64_t token;
        int first;
        int heads;
    };

    // A rotated row, and the norm of each component's pair.
    struct RotatedRow {
        std::vector<long double> value;
        std::vector<long double> norm;
    };

    Weights make_weights(int heads) {
        return Weights(options_.rotary.dtype, weight_count(heads), options_.weight_misalignment, random_);
    }

    HeadBuffer make_gradient(int heads) {
        const CaseOptions& o = options_.rotary;
        return make_heads(
            {.dtype = o.dtype, .batch = o.batch, .tokens = o.tokens, .heads = heads, .head_dim = o.head_dim}, o.in,
            random_);
    }

    int heads(bool is_q) const { return is_q ? options_.rotary.q_heads : options_.rotary.k_heads; }
    Heads& both(bool is_q) { return is_q ? rotary_.q() : rotary_.k(); }
    const HeadBuffer& input(bool is_q) { return both(is_q).in; }
    long double weight(bool is_q, int64_t i) { return weights(is_q).at(i) + options_.weight_offset; }

    template <class F>
    void for_each_row(F&& f) {
        for (const bool is_q : {true, false}) {
            const int in_row = options_.over == NormOver::head ? 1 : std::max(1, heads(is_q));
            input(is_q).for_each_head([&](int64_t batch, int64_t token, int head) {
                if (head % in_row == 0) f(Row{is_q, batch, token, head, in_row});
            });
        }
    }

    std::vector<long double> read(const HeadBuffer& buffer, const Row& row) const {
        std::vector<long double> x;
        for (int head = 0; head < row.heads; ++head) {
            for (int at = 0; at < options_.rotary.head_dim; ++at) {
                x.push_back(element_at(buffer.shape.dtype, buffer.head_before(row.batch, row.token, row.first + head) +
                                                               int64_t{at} * size_of(buffer.shape.dtype)));
            }
        }
        return x;
    }

    long double inverse_rms(const std::vector<long double>& x) const {
        long double mean = 0;
        for (const long double value : x) mean += value * value / x.size();
        return 1 / std::sqrt(mean + options_.eps);
    }

    // `direction` -1: by the negated angle.
    RotatedRow rotate(const Row& row, const std::vector<long double>& x, int direction) const {
        const CaseOptions& o = options_.rotary;
        const int half = o.rotary_dim / 2;
        const bool halves = o.pairing == Pairing::halves;
        RotatedRow rotated{x, std::vector<long double>(x.size())};
        for (int head = 0; head < row.heads; ++head) {
            const int start = head * o.head_dim;
            const std::vector<ReferenceCosSin> cos_sins =
                rotary_.reference_cos_sins(row.is_q, row.batch, row.token, row.first + head, heads(row.is_q));
            for (int at = 0; at < o.head_dim; ++at) rotated.norm[start + at] = std::abs(x[start + at]);
            for (int pair = 0; pair < half; ++pair) {
                const int a = start + (halves ? pair : 2 * pair);
                const int b = halves ? a + half : a + 1;
                const auto [cos, sin] = cos_sins[pair];
                rotated.value[a] = x[a] * cos - direction * x[b] * sin;
                rotated.value[b] = x[b] * cos + direction * x[a] * sin;
                rotated.norm[a] = rotated.norm[b] = std::sqrt((x[a] * x[a] + x[b] * x[b]) * (cos * cos + sin * sin));
            }
        }
        return rotated;
    }

    void expect_near(const Row& row, int64_t i, long double expected, long double magnitude) {
        const CaseOptions& o = options_.rotary;
        const Format format = format_of(o.dtype);
        const HeadBuffer& out = rotary_.output(both(row.is_q));
        const auto head = static_cast<int>(row.first + i / o.head_dim);
        const int at = static_cast<int>(i % o.head_dim);
        const double actual =
            element_at(o.dtype, out.head(row.batch, row.token, head) + int64_t{at} * size_of(o.dtype));
        const long double slack = std::ldexp(std::abs(expected), -format.significant_bits) +
                                  magnitude * norm_error(o.dtype) +
                                  std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1);
        ASSERT_LE(std::abs(actual - expected), slack)
            << actual << " instead of " << static_cast<double>(expected) << ", component " << at << " of head " << head
            << (row.is_q ? " of q" : " of k") << ", batch " << row.batch << " token " << row.token;
    }

    void expect_untouched_outside() {
        for (const bool is_q : {true, false}) {
            rotary_.output(both(is_q)).expect_untouched_outside_heads();
            if (!options_.rotary.in_place) both(is_q).in.expect_untouched();
        }
    }

    NormCaseOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    Weights q_weights_, k_weights_;
    HeadBuffer q_gradient_, k_gradient_;
    std::vector<double> q_sums_, k_sums_;
    std::vector<std::byte> q_weight_gradient_, k_weight_gradient_;
};

inline NormCaseOptions random_norm_options(uint64_t seed) {
    std::mt19937_64 random(seed + 7);
    NormCaseOptions o;
    o.rotary = random_options(seed);
    o.over = random() % 2 == 0 ? NormOver::head : NormOver::all_heads;
    const double all_eps[] = {1e-6, 1e-5, 0.5};
    o.eps = all_eps[random() % 3];
    o.weight_offset = static_cast<double>(random() % 2);
    o.weight_misalignment = random() % 3 == 0 ? 1 : 0;
    o.wants_weight_gradients = random() % 4 != 0;
    return o;
}

// Calls f with a case for each kind of kernel: vectors or single components, partial rotation, lanes that do not fill a
// team, and heads that do not fit a warp.
template <class F>
void for_each_kind_of_norm(F&& f) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
                for (const auto& [head_dim, rotary_dim] : {std::pair{128, 128},
                                                           {64, 64},
                                                           {80, 80},
                                                           {96, 96},
                                                           {256, 256},
                                                           {256, 64},
                                                           {128, 64},
                                                           {80, 32},
                                                           {72, 64},
                                                           {17, 16},
                                                           {6, 2},
                                                           {576, 576}}) {
                    NormCaseOptions o;
                    o.rotary.dtype = dtype;
                    o.rotary.pairing = pairing;
                    o.rotary.batch = 2;
                    o.rotary.q_heads = 5;
                    o.rotary.k_heads = 2;
                    o.rotary.head_dim = head_dim;
                    o.rotary.rotary_dim = rotary_dim;
                    o.rotary.attention_factor = 1.25;
                    o.over = over;
                    f(o);
                    if (::testing::Test::HasFailure()) return;
                }
            }
        }
    }
}

}  // namespace mrrope::testing
