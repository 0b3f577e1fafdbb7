#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cache_buffer.h"
#include "cache_options.h"
#include "float8_elements.h"
#include "head_buffer.h"
#include "mrrope/rotary_and_cache.h"
#include "rotary_case.h"
#include "token_slots.h"

// A rotary_and_cache call with all its buffers, generated from a seed and checked against the reference.

namespace mrrope::testing {

enum class ScaleFor { none, all, each_head };

struct CacheOptions : StorageOptions {
    CaseOptions rotary = {};  // k_heads: of k and of v
    ScaleFor scale_for = ScaleFor::none;
    std::string order = "bsh";  // blocks, slots, heads: "bsh" is nhd, "bhs" is hnd
};

inline std::string describe(const CacheOptions& o) {
    const char* scales[] = {"", " one scale", " a scale a head"};
    return describe(o.rotary) + scales[static_cast<int>(o.scale_for)] + " " + o.order + describe_storage(o);
}

inline CacheBuffer make_cache(const CacheOptions& options, int64_t blocks, std::mt19937_64& random) {
    CacheBuffer cache;
    cache.head_dim = options.rotary.head_dim;
    cache.element_size = size_of(options.cached_as, options.rotary.dtype);
    int64_t step = options.rotary.head_dim + options.padding;
    for (auto dim = options.order.rbegin(); dim != options.order.rend(); ++dim) {
        int64_t& stride = *dim == 'b' ? cache.strides.batch : *dim == 's' ? cache.strides.token : cache.strides.head;
        stride = step;
        step = step * (*dim == 'b'   ? blocks
                       : *dim == 's' ? options.block_size
                                     : options.rotary.k_heads) +
               options.padding;
    }
    cache.allocate(step, options.misalignment, random);
    return cache;
}

class RotaryAndCacheCase {
public:
    explicit RotaryAndCacheCase(const CacheOptions& options)
        : options_(options),
          rotary_(case_without_keys(options.rotary)),
          random_(options.rotary.seed + 1),
          // A word of noise between the rows of slots shows a wrong stride.
          token_slots_(options, options.rotary.batch, options.rotary.tokens, options.rotary.tokens + 1) {
        const CaseOptions& o = options.rotary;
        const HeadsShape shape{
            .dtype = o.dtype, .batch = o.batch, .tokens = o.tokens, .heads = o.k_heads, .head_dim = o.head_dim};
        k_ = make_heads(shape, o.in, random_);
        v_ = make_heads(shape, o.in, random_);
        key_cache_ = make_cache(options, token_slots_.blocks(), random_);
        value_cache_ = make_cache(options, token_slots_.blocks(), random_);
        for (std::vector<float>* scales : {&key_scales_, &value_scales_}) {
            scales->resize(std::max(1, o.k_heads));
            for (float& scale : *scales) scale = 0.002f * static_cast<float>(1 + random_() % 50);
        }
        token_slots_.choose(random_);
    }

    const CacheOptions& options() const { return options_; }
    RotaryCase& rotary() { return rotary_; }
    HeadBuffer& k() { return k_; }
    HeadBuffer& v() { return v_; }
    CacheBuffer& key_cache() { return key_cache_; }
    CacheBuffer& value_cache() { return value_cache_; }
    std::vector<float>& key_scales() { return key_scales_; }
    std::vector<float>& value_scales() { return value_scales_; }
    const TokenSlots& token_slots() const { return token_slots_; }
    std::vector<int64_t>& slots() { return token_slots_.of_tokens(); }
    const std::vector<std::byte>& slot_words() { return token_slots_.words(); }
    float scale_of(const std::vector<float>& scales, int head) const {
        switch (options_.scale_for) {
            case ScaleFor::none: return 1.0f;
            case ScaleFor::all: return scales[0];
            case ScaleFor::each_head: return scales[head];
        }
        return 1.0f;
    }

    // Valid during the lifetime of the case.
    RotaryAndCacheArgs args() {
        RotaryAndCacheArgs args;
        args.rotary = rotary_.args();
        args.k = cached(k_, key_cache_, key_scales_);
        args.v = cached(v_, value_cache_, value_scales_);
        args.slots = token_slots_.view();
        args.cached_as = options_.cached_as;
        return args;
    }

    // Expects q as rotary would leave it, cached keys within one rounding of the reference, cached values exact, and
    // every other byte unchanged.
    void expect_written() const {
        SCOPED_TRACE(describe(options_));
        rotary_.expect_rotated();
        expect_keys_cached();
        expect_values_cached();
    }

    void expect_values_cached() const {
        SCOPED_TRACE("value cache");
        expect_only_cached(v_, token_slots_, value_cache_,
                           [&](int64_t batch, int64_t token, int head, const std::byte* actual) {
                               expect_cached_head(v_.shape, options_.rotary.pairing, v_.head_before(batch, token, head),
                                                  actual, {}, options_.cached_as, scale_of(value_scales_, head));
                           });
    }

private:
    void expect_keys_cached() const {
        SCOPED_TRACE("key cache");
        expect_only_cached(
            k_, token_slots_, key_cache_, [&](int64_t batch, int64_t token, int head, const std::byte* actual) {
                const auto cos_sins = rotary_.reference_cos_sins(/*is_q=*/false, batch, token, head, k_.shape.heads);
                expect_cached_head(k_.shape, options_.rotary.pairing, k_.head_before(batch, token, head), actual,
                                   cos_sins, options_.cached_as, scale_of(key_scales_, head));
            });
    }

    CachedHeads cached(HeadBuffer& heads, CacheBuffer& cache, const std::vector<float>& scales) {
        if (heads.shape.heads == 0) return {};
        CachedHeads cached{.view = {.in = heads.first_head(),
                                    .out = cache.first_head(),
                                    .heads = heads.shape.heads,
                                    .in_strides = heads.strides,
                                    .out_strides = cache.strides}};
        if (options_.scale_for != ScaleFor::none) cached.scale = scales.data();
        if (options_.scale_for == ScaleFor::each_head) cached.scale_stride = 1;
        return cached;
    }

    CacheOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    TokenSlots token_slots_;
    HeadBuffer k_, v_;
    CacheBuffer key_cache_, value_cache_;
    std::vector<float> key_scales_, value_scales_;
};

inline CacheOptions random_cache_options(uint64_t seed) {
    CacheOptions o;
    o.rotary = random_options(seed);
    std::mt19937_64 random(seed + 1000);
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    o.rotary.conjugate = false;
    o.rotary.k_heads = o.rotary.tables.heads * static_cast<int>(upto(1, 4));
    o.rotary.q_heads = o.rotary.tables.heads * static_cast<int>(upto(0, 6));
    if (o.rotary.dtype != DType::float64) o.cached_as = every_stored_as[upto(0, 2)];
    const ScaleFor scales[] = {ScaleFor::none, ScaleFor::all, ScaleFor::each_head};
    if (is_float8(o.cached_as)) o.scale_for = scales[upto(0, 2)];
    o.paged = coin();
    o.order = coin() ? "bsh" : "bhs";
    randomize_blocks_and_slots(o, o.rotary.dtype, random);
    return o;
}

// Every cache layout, dtype and scaling, for heads of one dtype.
inline std::vector<CacheOptions> every_cache(DType dtype) {
    std::vector<CacheOptions> all;
    for (const StoredAs cached_as : every_stored_as) {
        const bool float8 = is_float8(cached_as);
        if (float8 && dtype == DType::float64) continue;
        for (const ScaleFor scale_for : {ScaleFor::none, ScaleFor::all, ScaleFor::each_head}) {
            if (!float8 && scale_for != ScaleFor::none) continue;
            for (const bool paged : {false, true}) {
                for (const char* order : {"bsh", "bhs"}) {
                    CacheOptions o;
                    o.rotary.dtype = dtype;
                    o.rotary.batch = 2;
                    o.rotary.k_heads = 2;
                    o.rotary.head_dim = o.rotary.rotary_dim = 32;
                    o.cached_as = cached_as;
                    o.scale_for = scale_for;
                    o.paged = paged;
                    o.order = order;
                    all.push_back(o);
                }
            }
        }
    }
    return all;
}

}  // namespace mrrope::testing
