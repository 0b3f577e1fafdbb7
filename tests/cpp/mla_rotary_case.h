#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "head_buffer.h"
#include "mrrope/mla_rotary.h"
#include "reference_rotation.h"
#include "rotary_case.h"

// Calls of mla_rotary and of its gradient with all their buffers, generated from a seed and checked against the
// reference.

namespace mrrope::testing {

struct MlaOptions {
    // head_dim and rotary_dim are those of the rope part. k_heads: of the key. `in` places what is read, `out` what is
    // written.
    CaseOptions rotary = {};
    int nope_dim = 32;
};

inline std::string describe(const MlaOptions& o) {
    return describe(o.rotary) + " nope_dim " + std::to_string(o.nope_dim);
}

// Positions and tables, without heads.
inline RotaryCase case_without_heads(CaseOptions options) {
    options.q_heads = options.k_heads = 0;
    return RotaryCase(options);
}

inline HeadBuffer make_mla_heads(const CaseOptions& o, int heads, int head_dim, const Placement& placement,
                                 std::mt19937_64& random) {
    return make_heads({.dtype = o.dtype, .batch = o.batch, .tokens = o.tokens, .heads = heads, .head_dim = head_dim},
                      placement, random);
}

inline HeadsView view_of(HeadBuffer& in, HeadBuffer& out) {
    if (in.shape.heads == 0) return {};
    return {.in = in.first_head(),
            .out = out.first_head(),
            .heads = in.shape.heads,
            .in_strides = in.strides,
            .out_strides = out.strides};
}

inline HeadsView behind(HeadsView heads, int64_t components, DType dtype) {
    if (heads.heads == 0) return heads;
    heads.in = static_cast<const std::byte*>(heads.in) + components * size_of(dtype);
    heads.out = static_cast<std::byte*>(heads.out) + components * size_of(dtype);
    return heads;
}

// Expects the leading part of every head of `out` to have the bits of `copied`, and the rope part behind it to be that
// of `rotated`, at `first` components in its heads, rotated.
inline void expect_joined_heads(const RotaryCase& rotary, const HeadBuffer& copied, const HeadBuffer& rotated,
                                int64_t first, const HeadBuffer& out) {
    const CaseOptions& o = rotary.options();
    const int64_t nope_bytes = out.head_bytes() - int64_t{o.rotary_dim} * size_of(o.dtype);
    const HeadsShape rope{.dtype = o.dtype, .heads = 1, .head_dim = o.rotary_dim};
    out.for_each_head([&](int64_t batch, int64_t token, int head) {
        const std::byte* after = out.head(batch, token, head);
        ASSERT_EQ(std::memcmp(after, copied.head_before(batch, token, head), nope_bytes), 0) << "copied part";
        const int rotated_head = rotated.shape.heads == 1 ? 0 : head;
        expect_rotated_head(rope, o.pairing, rotated.head_before(batch, token, rotated_head) + first * size_of(o.dtype),
                            after + nope_bytes, rotary.reference_cos_sins(batch, token, 0));
        if (::testing::Test::HasFatalFailure()) {
            ADD_FAILURE() << "batch " << batch << " token " << token << " head " << head;
        }
    });
    out.expect_untouched_outside_heads();
}

class MlaRotaryCase {
public:
    explicit MlaRotaryCase(const MlaOptions& options)
        : options_(options), rotary_(case_without_heads(options.rotary)), random_(options.rotary.seed + 1) {
        const CaseOptions& o = options.rotary;
        const int head_dim = options.nope_dim + o.rotary_dim;
        q_ = make_mla_heads(o, o.q_heads, head_dim, o.in, random_);
        k_nope_ = make_mla_heads(o, o.k_heads, options.nope_dim, o.in, random_);
        k_rope_ = make_mla_heads(o, 1, o.rotary_dim, o.in, random_);
        q_out_ = make_mla_heads(o, o.q_heads, head_dim, o.out, random_);
        key_ = make_mla_heads(o, o.k_heads, head_dim, o.out, random_);
    }

    RotaryCase& rotary() { return rotary_; }
    std::vector<HeadBuffer*> buffers() { return {&q_, &k_nope_, &k_rope_, &q_out_, &key_}; }

    // Valid during the lifetime of the case.
    MlaRotaryArgs args() {
        const CaseOptions& o = options_.rotary;
        MlaRotaryArgs args{.rotary = rotary_.args(), .q_nope = {}, .k_nope = {}};
        args.q_nope = {.view = view_of(q_, q_out_), .dim = options_.nope_dim};
        args.k_nope = {.view = view_of(k_nope_, key_), .dim = options_.nope_dim};
        args.rotary.q = behind(args.q_nope.view, options_.nope_dim, o.dtype);
        if (o.k_heads == 0) return args;
        args.rotary.k = behind(args.k_nope.view, options_.nope_dim, o.dtype);
        args.rotary.k.in = k_rope_.first_head();
        args.rotary.k.in_strides = k_rope_.strides;
        args.rotary.k.in_strides.head = 0;
        return args;
    }

    void expect_written() const {
        SCOPED_TRACE(describe(options_));
        for (const HeadBuffer* input : {&q_, &k_nope_, &k_rope_}) input->expect_untouched();
        {
            SCOPED_TRACE("q");
            expect_joined_heads(rotary_, q_, q_, options_.nope_dim, q_out_);
        }
        SCOPED_TRACE("key");
        expect_joined_heads(rotary_, k_nope_, k_rope_, 0, key_);
    }

private:
    MlaOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    HeadBuffer q_, k_nope_, k_rope_, q_out_, key_;
};

class MlaRotaryGradientCase {
public:
    explicit MlaRotaryGradientCase(const MlaOptions& options)
        : options_(options), rotary_(case_without_heads(options.rotary)), random_(options.rotary.seed + 2) {
        const CaseOptions& o = options.rotary;
        const int head_dim = options.nope_dim + o.rotary_dim;
        q_ = make_mla_heads(o, o.q_heads, head_dim, o.in, random_);
        key_ = make_mla_heads(o, o.k_heads, head_dim, o.in, random_);
        q_out_ = make_mla_heads(o, o.q_heads, head_dim, o.out, random_);
        k_rope_ = make_mla_heads(o, 1, o.rotary_dim, o.out, random_);
    }

    RotaryCase& rotary() { return rotary_; }
    std::vector<HeadBuffer*> buffers() { return {&q_, &key_, &q_out_, &k_rope_}; }

    MlaRotaryGradientArgs args() {
        const CaseOptions& o = options_.rotary;
        MlaRotaryGradientArgs args{.rotary = rotary_.args(), .q_nope = {}};
        args.q_nope = {.view = view_of(q_, q_out_), .dim = options_.nope_dim};
        args.rotary.q = behind(args.q_nope.view, options_.nope_dim, o.dtype);
        if (o.k_heads == 0) return args;
        args.rotary.k = behind(view_of(key_, k_rope_), options_.nope_dim, o.dtype);
        args.rotary.k.out = k_rope_.first_head();
        args.rotary.k.out_strides.head = 0;
        return args;
    }

    void expect_written() const {
        SCOPED_TRACE(describe(options_));
        q_.expect_untouched();
        key_.expect_untouched();
        {
            SCOPED_TRACE("q");
            expect_joined_heads(rotary_, q_, q_, options_.nope_dim, q_out_);
        }
        if (options_.rotary.k_heads == 0) return k_rope_.expect_untouched();
        SCOPED_TRACE("k_rope");
        k_rope_.for_each_head([&](int64_t batch, int64_t token, int) { expect_rotated_sum(batch, token); });
        k_rope_.expect_untouched_outside_heads();
    }

private:
    // Within one rounding of the reference, and the error of a float sum before it.
    void expect_rotated_sum(int64_t batch, int64_t token) const {
        const CaseOptions& o = options_.rotary;
        const int size = size_of(o.dtype);
        std::vector<long double> sum(o.rotary_dim), magnitude(o.rotary_dim);
        for (int head = 0; head < o.k_heads; ++head) {
            const std::byte* rope = key_.head_before(batch, token, head) + int64_t{options_.nope_dim} * size;
            for (int at = 0; at < o.rotary_dim; ++at) {
                sum[at] += element_at(o.dtype, rope + int64_t{at} * size);
                magnitude[at] += std::abs(element_at(o.dtype, rope + int64_t{at} * size));
            }
        }
        const Format format = format_of(o.dtype);
        const long double half_ulp = std::ldexp(1.0L, -format.significant_bits);
        const long double smallest_half_ulp = std::ldexp(1.0L, format.smallest_exponent - format.significant_bits - 1);
        const long double sum_error = o.k_heads * (o.dtype == DType::float64 ? 0x1p-53L : 0x1p-24L);
        const std::vector<ReferenceCosSin> cos_sins = rotary_.reference_cos_sins(batch, token, 0);
        const bool halves = o.pairing == Pairing::halves;
        const int half = o.rotary_dim / 2;
        for (int at = 0; at < o.rotary_dim; ++at) {
            const int pair = halves ? at % half : at / 2;
            const bool is_first = halves ? at < half : at % 2 == 0;
            const int first = halves ? pair : 2 * pair;
            const int second = halves ? pair + half : 2 * pair + 1;
            const auto [cos, sin] = cos_sins[pair];
            const long double expected =
                is_first ? sum[first] * cos - sum[second] * sin : sum[second] * cos + sum[first] * sin;
            const long double gain = std::sqrt(cos * cos + sin * sin);
            const long double slack =
                std::abs(expected) * half_ulp + smallest_half_ulp +
                (magnitude[first] + magnitude[second]) * gain * (format.arithmetic_error + sum_error);
            const double actual = element_at(o.dtype, k_rope_.head(batch, token, 0) + int64_t{at} * size);
            ASSERT_LE(std::abs(actual - expected), slack) << actual << " instead of " << static_cast<double>(expected)
                                                          << ", component " << at << " of token " << token;
        }
    }

    MlaOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    HeadBuffer q_, key_, q_out_, k_rope_;
};

inline MlaOptions random_mla_options(uint64_t seed) {
    MlaOptions o;
    o.rotary = random_options(seed);
    std::mt19937_64 random(seed + 2000);
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    o.rotary.position_rows = 0;
    o.rotary.tables.heads = 1;
    o.rotary.tables.has_query_factors = false;
    o.rotary.in_place = false;
    o.rotary.k_heads = static_cast<int>(upto(0, 9));
    const int usual_dims[] = {16, 32, 64, 128};
    o.rotary.rotary_dim = coin() ? usual_dims[upto(0, 3)] : static_cast<int>(2 * upto(1, 40));
    o.rotary.head_dim = o.rotary.rotary_dim;
    o.nope_dim = coin() ? static_cast<int>(16 * upto(0, 9)) : static_cast<int>(upto(0, 100));
    return o;
}

}  // namespace mrrope::testing
