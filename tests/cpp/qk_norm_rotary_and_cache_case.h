#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cache_buffer.h"
#include "elements.h"
#include "float8_elements.h"
#include "head_buffer.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "qk_norm_rotary_case.h"
#include "rotary_and_cache_case.h"

// A qk_norm_rotary_and_cache call with all its buffers, generated from a seed and checked against a reference in long
// double.

namespace mrrope::testing {

enum class QScale { none, all, each_head, computed };

struct NormCacheOptions {
    CacheOptions cache = {};
    NormOver over = NormOver::head;
    double eps = 1e-6;
    double weight_offset = 0.0;
    int64_t weight_misalignment = 0;
    bool norms_q = true;
    bool norms_k = true;
    StoredAs q_stored_as = StoredAs::heads_dtype;
    QScale q_scale = QScale::none;
    int64_t q_out_misalignment = 0;  // of float8 q, in bytes
    bool has_gate = false;
};

inline std::string describe(const NormCacheOptions& o) {
    const char* scales[] = {"", " one scale", " a scale a head", " computed scales"};
    return std::string(o.over == NormOver::head ? "over a head" : "over all heads") + " eps " + std::to_string(o.eps) +
           " offset " + std::to_string(o.weight_offset) + " weights off by " + std::to_string(o.weight_misalignment) +
           (o.norms_q ? " q normed" : "") + (o.norms_k ? " k normed" : "") + " q" + name_of(o.q_stored_as) +
           scales[static_cast<int>(o.q_scale)] + " off by " + std::to_string(o.q_out_misalignment) +
           (o.has_gate ? " gate " : " ") + describe(o.cache);
}

class NormCacheCase {
public:
    explicit NormCacheCase(const NormCacheOptions& options)
        : options_(options),
          cache_(options.cache),
          random_(options.cache.rotary.seed + 2),
          q_weights_(make_weights(rotary_options().q_heads)),
          k_weights_(make_weights(rotary_options().k_heads)) {
        const CaseOptions& o = rotary_options();
        gate_ = make_heads({.dtype = o.dtype,
                            .batch = o.batch,
                            .tokens = o.tokens,
                            .heads = options.has_gate ? o.q_heads : 0,
                            .head_dim = o.head_dim},
                           o.in, random_);
        q_scales_.resize(std::max(1, o.q_heads));
        for (float& scale : q_scales_) scale = 0.002f * static_cast<float>(1 + random_() % 50);
        // Heads before tokens, to differ from q's order.
        computed_strides_ = {.batch = o.q_heads * o.tokens, .token = 1, .head = o.tokens};
        computed_scales_.assign(o.batch * computed_strides_.batch, -1.0f);
        make_float8_q();
    }

    const NormCacheOptions& options() const { return options_; }
    RotaryAndCacheCase& cache() { return cache_; }
    Weights& weights(bool is_q) { return is_q ? q_weights_ : k_weights_; }
    HeadBuffer& gate() { return gate_; }
    CacheBuffer& float8_q() { return float8_q_; }
    std::vector<float>& q_scales() { return q_scales_; }
    std::vector<float>& computed_scales() { return computed_scales_; }

    // Valid during the lifetime of the case.
    QkNormRotaryAndCacheArgs args() {
        QkNormRotaryAndCacheArgs args;
        static_cast<RotaryAndCacheArgs&>(args) = cache_.args();
        if (options_.norms_q) args.q_weight = q_weights_.bytes.data() + q_weights_.first_byte;
        if (options_.norms_k) args.k_weight = k_weights_.bytes.data() + k_weights_.first_byte;
        args.eps = options_.eps;
        args.weight_offset = options_.weight_offset;
        args.over = options_.over;
        args.q_stored_as = options_.q_stored_as;
        if (is_float8(options_.q_stored_as)) {
            args.rotary.q.out = float8_q_.first_head();
            args.rotary.q.out_strides = float8_q_.strides;
        }
        if (options_.q_scale == QScale::all || options_.q_scale == QScale::each_head) {
            args.q_scale = q_scales_.data();
            args.q_scale_stride = options_.q_scale == QScale::each_head;
        }
        if (options_.q_scale == QScale::computed) {
            args.q_scale_out = computed_scales_.data();
            args.q_scale_out_strides = computed_strides_;
        }
        if (gate_.shape.heads > 0) {
            args.gate = {.in = gate_.first_head(),
                         .out = gate_.first_head(),
                         .heads = gate_.shape.heads,
                         .in_strides = gate_.strides,
                         .out_strides = gate_.strides};
        }
        return args;
    }

    // Expects every stored component within one rounding of the reference, values exact, and every other byte
    // unchanged.
    void expect_stored() {
        SCOPED_TRACE(describe(options_));
        expect_q();
        expect_keys();
        cache_.expect_values_cached();
        expect_gate();
    }

private:
    // One head's exact results, and for each its magnitude before cancellation.
    struct Exact {
        std::vector<long double> value;
        std::vector<long double> norm;
    };

    const CaseOptions& rotary_options() const { return options_.cache.rotary; }

    Weights make_weights(int heads) {
        const int64_t rows = options_.over == NormOver::head ? 1 : heads;
        return Weights(rotary_options().dtype, rows * rotary_options().head_dim, options_.weight_misalignment, random_);
    }

    void make_float8_q() {
        if (!is_float8(options_.q_stored_as)) return;
        const CaseOptions& o = rotary_options();
        float8_q_.head_dim = o.head_dim;
        float8_q_.element_size = 1;
        float8_q_.strides = {
            .batch = o.tokens * o.q_heads * o.head_dim, .token = int64_t{o.q_heads} * o.head_dim, .head = o.head_dim};
        float8_q_.allocate(o.batch * float8_q_.strides.batch, options_.q_out_misalignment, random_);
    }

    long double element(const HeadBuffer& heads, int64_t batch, int64_t token, int head, int at) const {
        const DType dtype = heads.shape.dtype;
        return element_at(dtype, heads.head_before(batch, token, head) + int64_t{at} * size_of(dtype));
    }

    Exact exact_head(const HeadBuffer& heads, const Weights* weights, int64_t batch, int64_t token, int head) const {
        const CaseOptions& o = rotary_options();
        std::vector<long double> x(o.head_dim);
        for (int at = 0; at < o.head_dim; ++at) x[at] = element(heads, batch, token, head, at);
        if (weights != nullptr) {
            const bool over_head = options_.over == NormOver::head;
            const int first = over_head ? head : 0;
            const int end = over_head ? head + 1 : heads.shape.heads;
            long double sum = 0;
            for (int other = first; other < end; ++other) {
                for (int at = 0; at < o.head_dim; ++at) {
                    const long double y = element(heads, batch, token, other, at);
                    sum += y * y;
                }
            }
            const long double scale = 1 / std::sqrt(sum / ((end - first) * o.head_dim) + options_.eps);
            const int64_t first_weight = over_head ? 0 : int64_t{head} * o.head_dim;
            for (int at = 0; at < o.head_dim; ++at) {
                x[at] *= scale * (weights->at(first_weight + at) + options_.weight_offset);
            }
        }
        const int half = o.rotary_dim / 2;
        const bool halves = o.pairing == Pairing::halves;
        RotaryCase& rotary = const_cast<NormCacheCase*>(this)->cache_.rotary();
        const bool is_q = &heads == &rotary.q().in;
        const auto cos_sins = rotary.reference_cos_sins(is_q, batch, token, head, heads.shape.heads);
        Exact exact{x, std::vector<long double>(x.size())};
        for (int at = 0; at < o.head_dim; ++at) exact.norm[at] = std::abs(x[at]);
        for (int pair = 0; pair < half; ++pair) {
            const int a = halves ? pair : 2 * pair;
            const int b = halves ? pair + half : a + 1;
            const auto [cos, sin] = cos_sins[pair];
            exact.value[a] = x[a] * cos - x[b] * sin;
            exact.value[b] = x[b] * cos + x[a] * sin;
            exact.norm[a] = exact.norm[b] = std::sqrt((x[a] * x[a] + x[b] * x[b]) * (cos * cos + sin * sin));
        }
        return exact;
    }

    void expect_head(const Exact& exact, const std::byte* actual, StoredAs stored_as, float scale) const {
        const DType dtype = rotary_options().dtype;
        const Format format = format_of(dtype);
        for (int at = 0; at < rotary_options().head_dim; ++at) {
            long double expected = exact.value[at];
            long double slack = exact.norm[at] * norm_error(dtype);
            long double found = 0;
            if (is_float8(stored_as)) {
                const long double largest = largest_finite(stored_as);
                expected = std::clamp(expected / scale, -largest, largest);
                slack = slack / scale + half_ulp_of_float8(expected, stored_as);
                found = value_of_float8(static_cast<uint8_t>(actual[at]), stored_as);
            } else {
                slack += std::ldexp(std::abs(expected), -format.significant_bits) +
                         std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1);
                found = element_at(dtype, actual + int64_t{at} * size_of(dtype));
            }
            ASSERT_LE(std::abs(found - expected), slack) << static_cast<double>(found) << " instead of "
                                                         << static_cast<double>(expected) << ", component " << at;
        }
    }

    void expect_q() {
        SCOPED_TRACE("q");
        const bool float8 = is_float8(options_.q_stored_as);
        Heads& heads = cache_.rotary().q();
        const HeadBuffer& out = cache_.rotary().output(heads);
        const Weights* weights = options_.norms_q ? &q_weights_ : nullptr;
        std::vector<std::byte> expected_bytes = float8_q_.before;
        heads.in.for_each_head([&](int64_t batch, int64_t token, int head) {
            const Exact exact = exact_head(heads.in, weights, batch, token, head);
            if (!float8) return expect_head(exact, out.head(batch, token, head), options_.q_stored_as, 1.0f);
            const int64_t byte = float8_q_.byte_of(batch, token, head);
            std::copy_n(float8_q_.bytes.begin() + byte, float8_q_.head_bytes(), expected_bytes.begin() + byte);
            float scale = options_.q_scale == QScale::none ? 1.0f : q_scales_[0];
            if (options_.q_scale == QScale::each_head) scale = q_scales_[head];
            if (options_.q_scale == QScale::computed) {
                scale = computed_scales_[batch * computed_strides_.batch + token * computed_strides_.token +
                                         head * computed_strides_.head];
                expect_computed_scale(exact, scale);
            }
            expect_head(exact, float8_q_.bytes.data() + byte, options_.q_stored_as, scale);
        });
        if (!float8) {
            out.expect_untouched_outside_heads();
        } else {
            float8_q_.expect_bytes(expected_bytes);
        }
        if (float8 || !rotary_options().in_place) heads.in.expect_untouched();
    }

    void expect_computed_scale(const Exact& exact, float scale) const {
        long double largest = 0;
        long double norm = 0;
        for (int at = 0; at < rotary_options().head_dim; ++at) {
            largest = std::max(largest, std::abs(exact.value[at]));
            norm = std::max(norm, exact.norm[at]);
        }
        const long double expected = std::max(largest / largest_finite(options_.q_stored_as), 0x1p-126L);
        const long double slack = norm / largest_finite(options_.q_stored_as) * norm_error(rotary_options().dtype);
        ASSERT_LE(std::abs(scale - expected), slack + expected * 0x1p-22L) << scale;
    }

    void expect_keys() {
        SCOPED_TRACE("key cache");
        const Weights* weights = options_.norms_k ? &k_weights_ : nullptr;
        expect_only_cached(cache_.k(), cache_.token_slots(), cache_.key_cache(),
                           [&](int64_t batch, int64_t token, int head, const std::byte* actual) {
                               expect_head(exact_head(cache_.k(), weights, batch, token, head), actual,
                                           options_.cache.cached_as, cache_.scale_of(cache_.key_scales(), head));
                           });
    }

    void expect_gate() {
        SCOPED_TRACE("gate");
        const DType dtype = rotary_options().dtype;
        // Of the exponential: an approximation for 16-bit results.
        const long double error = size_of(dtype) == 2 ? 2e-5L : std::ldexp(8.0L, -format_of(dtype).significant_bits);
        gate_.for_each_head([&](int64_t batch, int64_t token, int head) {
            for (int at = 0; at < rotary_options().head_dim; ++at) {
                const long double x = element(gate_, batch, token, head, at);
                const long double expected = 1 / (1 + std::exp(-x));
                const double found = element_at(dtype, gate_.head(batch, token, head) + int64_t{at} * size_of(dtype));
                const Format format = format_of(dtype);
                ASSERT_LE(std::abs(found - expected),
                          expected * (error + std::ldexp(1.0L, -format.significant_bits)) +
                              std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1))
                    << "sigmoid of " << static_cast<double>(x);
            }
        });
        gate_.expect_untouched_outside_heads();
    }

    NormCacheOptions options_;
    RotaryAndCacheCase cache_;
    std::mt19937_64 random_;
    Weights q_weights_, k_weights_;
    HeadBuffer gate_;
    std::vector<float> q_scales_, computed_scales_;
    HeadStrides computed_strides_;
    CacheBuffer float8_q_;
};

inline NormCacheOptions random_norm_cache_options(uint64_t seed) {
    NormCacheOptions o;
    o.cache = random_cache_options(seed);
    std::mt19937_64 random(seed + 2000);
    o.over = random() % 2 == 0 ? NormOver::head : NormOver::all_heads;
    const double all_eps[] = {1e-6, 1e-5, 0.5};
    o.eps = all_eps[random() % 3];
    o.weight_offset = static_cast<double>(random() % 2);
    o.weight_misalignment = random() % 4 == 0 ? 1 : 0;
    o.norms_q = random() % 4 != 0;
    o.norms_k = random() % 4 != 0;
    if (o.cache.rotary.dtype != DType::float64) o.q_stored_as = every_stored_as[random() % 3];
    const QScale scales[] = {QScale::none, QScale::all, QScale::each_head, QScale::computed};
    if (is_float8(o.q_stored_as)) o.q_scale = scales[random() % 4];
    o.q_out_misalignment = random() % 4 == 0 ? 1 : 0;
    o.has_gate = random() % 2 == 0;
    return o;
}

// Calls f with a case for each kind of kernel: vectors or single components, partial rotation, lanes that do not fill a
// team, and heads that do not fit a warp; for each, every dtype that is stored.
template <class F>
void for_each_kind_of_norm_and_cache(F&& f) {
    for_each_kind_of_norm([&](const NormCaseOptions& norm) {
        for (const StoredAs stored_as : every_stored_as) {
            if (is_float8(stored_as) && norm.rotary.dtype == DType::float64) continue;
            NormCacheOptions o;
            o.cache.rotary = norm.rotary;
            o.cache.cached_as = stored_as;
            o.over = norm.over;
            o.weight_offset = 1.0;
            o.q_stored_as = stored_as;
            o.has_gate = true;
            if (is_float8(stored_as)) {
                o.cache.scale_for = ScaleFor::each_head;
                o.q_scale = stored_as == StoredAs::float8_e4m3 ? QScale::computed : QScale::each_head;
            }
            f(o);
            if (::testing::Test::HasFailure()) return;
        }
    });
}

}  // namespace mrrope::testing
