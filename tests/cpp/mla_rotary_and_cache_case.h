#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cache_buffer.h"
#include "cache_options.h"
#include "float8_elements.h"
#include "head_buffer.h"
#include "mla_rotary_case.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "rotary_case.h"
#include "token_slots.h"

// A mla_rotary_and_cache call with all its buffers, generated from a seed and checked against the reference.

namespace mrrope::testing {

struct MlaCacheOptions : StorageOptions {
    CaseOptions rotary = {};  // head_dim and rotary_dim are those of the rope part; k_heads is unused
    int latent_dim = 48;
    bool has_scale = false;
};

inline std::string describe(const MlaCacheOptions& o) {
    return describe(o.rotary) + " latent_dim " + std::to_string(o.latent_dim) + (o.has_scale ? " with a scale" : "") +
           describe_storage(o);
}

class MlaRotaryAndCacheCase {
public:
    explicit MlaRotaryAndCacheCase(const MlaCacheOptions& options)
        : options_(options),
          rotary_(case_without_keys(options.rotary)),
          random_(options.rotary.seed + 3),
          token_slots_(options, options.rotary.batch, options.rotary.tokens, options.rotary.tokens) {
        const CaseOptions& o = options.rotary;
        k_rope_ = make_mla_heads(o, 1, o.rotary_dim, o.in, random_);
        latent_ = make_mla_heads(o, 1, options.latent_dim, o.in, random_);
        scale_ = {0.002f * static_cast<float>(1 + random_() % 50)};
        cache_.head_dim = row_dim();
        cache_.element_size = size_of(options.cached_as, o.dtype);
        cache_.strides.token = row_dim() + options.padding;
        cache_.strides.batch = cache_.strides.token * options.block_size + options.padding;
        cache_.allocate(token_slots_.blocks() * cache_.strides.batch, options.misalignment, random_);
        token_slots_.choose(random_);
    }

    const MlaCacheOptions& options() const { return options_; }
    RotaryCase& rotary() { return rotary_; }
    HeadBuffer& k_rope() { return k_rope_; }
    HeadBuffer& latent() { return latent_; }
    CacheBuffer& cache() { return cache_; }
    std::vector<float>& scale() { return scale_; }
    std::vector<int64_t>& slots() { return token_slots_.of_tokens(); }
    const std::vector<std::byte>& slot_words() { return token_slots_.words(); }
    int64_t row_dim() const { return int64_t{options_.latent_dim} + options_.rotary.rotary_dim; }

    // Valid during the lifetime of the case.
    MlaRotaryAndCacheArgs args() {
        MlaRotaryAndCacheArgs args;
        args.rotary = rotary_.args();
        args.latent = {.view = {.in = latent_.first_head(),
                                .out = cache_.first_head(),
                                .heads = 1,
                                .in_strides = latent_.strides,
                                .out_strides = cache_.strides},
                       .dim = options_.latent_dim};
        args.rotary.k = {.in = k_rope_.first_head(),
                         .out = cache_.first_head() + options_.latent_dim * cache_.element_size,
                         .heads = 1,
                         .in_strides = k_rope_.strides,
                         .out_strides = cache_.strides};
        args.slots = token_slots_.view();
        args.cached_as = options_.cached_as;
        if (options_.has_scale) args.scale = scale_.data();
        return args;
    }

    // Expects q as rotary would leave it, the rows of the cache within one rounding of the reference, latents exact,
    // and every other byte unchanged.
    void expect_written() const {
        SCOPED_TRACE(describe(options_));
        rotary_.expect_rotated();
        latent_.expect_untouched();
        expect_only_cached(k_rope_, token_slots_, cache_, [&](int64_t batch, int64_t token, int, const std::byte* row) {
            expect_row(batch, token, row);
        });
    }

private:
    void expect_row(int64_t batch, int64_t token, const std::byte* row) const {
        const Pairing pairing = options_.rotary.pairing;
        const float scale = options_.has_scale ? scale_[0] : 1.0f;
        {
            SCOPED_TRACE("latent");
            expect_cached_head(latent_.shape, pairing, latent_.head_before(batch, token, 0), row, {},
                               options_.cached_as, scale);
        }
        SCOPED_TRACE("key");
        const std::byte* key_row = row + int64_t{options_.latent_dim} * cache_.element_size;
        expect_cached_head(k_rope_.shape, pairing, k_rope_.head_before(batch, token, 0), key_row,
                           rotary_.reference_cos_sins(batch, token, 0), options_.cached_as, scale);
    }

    MlaCacheOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    TokenSlots token_slots_;
    HeadBuffer k_rope_, latent_;
    CacheBuffer cache_;
    std::vector<float> scale_;
};

inline MlaCacheOptions random_mla_cache_options(uint64_t seed) {
    MlaCacheOptions o;
    o.rotary = random_mla_options(seed).rotary;
    std::mt19937_64 random(seed + 3000);
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    o.rotary.conjugate = false;
    o.rotary.in_place = coin();
    o.rotary.q_heads = static_cast<int>(upto(0, 7));
    o.latent_dim = coin() ? static_cast<int>(16 * upto(0, 20)) : static_cast<int>(upto(0, 300));
    if (o.rotary.dtype != DType::float64 && coin()) o.cached_as = both_float8[coin()];
    o.has_scale = is_float8(o.cached_as) && coin();
    o.paged = coin();
    randomize_blocks_and_slots(o, o.rotary.dtype, random);
    return o;
}

// Every kind of cache, for heads of one dtype.
inline std::vector<MlaCacheOptions> every_mla_cache(DType dtype) {
    std::vector<MlaCacheOptions> all;
    for (const StoredAs cached_as : every_stored_as) {
        if (is_float8(cached_as) && dtype == DType::float64) continue;
        for (const bool has_scale : {false, true}) {
            if (has_scale && !is_float8(cached_as)) continue;
            for (const bool paged : {false, true}) {
                MlaCacheOptions o;
                o.rotary.dtype = dtype;
                o.rotary.batch = 2;
                o.rotary.head_dim = o.rotary.rotary_dim = 32;
                o.cached_as = cached_as;
                o.has_scale = has_scale;
                o.paged = paged;
                all.push_back(o);
            }
        }
    }
    return all;
}

}  // namespace mrrope::testing
