#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "float8_elements.h"
#include "head_buffer.h"
#include "mla_rotary_case.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "reference_rotation.h"
#include "rotary_case.h"

// A mla_rotary_and_cache call with all its buffers, generated from a seed and checked against the reference.

namespace mrrope::testing {

struct MlaCacheOptions {
    CaseOptions rotary = {};  // head_dim and rotary_dim are those of the rope part; k_heads is unused
    int latent_dim = 48;
    StoredAs cached_as = StoredAs::heads_dtype;
    bool has_scale = false;
    bool paged = true;
    int64_t padding = 0;       // elements of padding in the cache after each row and each block
    int64_t misalignment = 0;  // of the cache, in elements
    int64_t blocks = 5;        // of a paged cache
    int64_t block_size = 4;
    bool slots_are_int64 = true;
    bool leaves_some_out = true;
};

inline std::string describe(const MlaCacheOptions& o) {
    return describe(o.rotary) + " latent_dim " + std::to_string(o.latent_dim) + name_of(o.cached_as) +
           (o.has_scale ? " with a scale" : "") + (o.paged ? " paged" : " static") + " padding " +
           std::to_string(o.padding) + " misalignment " + std::to_string(o.misalignment) + " blocks " +
           std::to_string(o.blocks) + " of " + std::to_string(o.block_size) +
           (o.slots_are_int64 ? " int64" : " int32") + " slots" + (o.leaves_some_out ? ", some left out" : "");
}

// Cache rows in a buffer of noise, so that every unwanted write is detected.
struct RowCache {
    int element_size = 0;
    int64_t block_stride = 0;  // in elements
    int64_t slot_stride = 0;
    int64_t first_byte = 0;
    std::vector<std::byte> bytes;
    std::vector<std::byte> before;

    std::byte* first_row() { return bytes.data() + first_byte; }
    int64_t byte_of(int64_t block, int64_t slot) const {
        return first_byte + (block * block_stride + slot * slot_stride) * element_size;
    }
};

class MlaRotaryAndCacheCase {
public:
    explicit MlaRotaryAndCacheCase(const MlaCacheOptions& options)
        : options_(options), rotary_(without_keys(options.rotary)), random_(options.rotary.seed + 3) {
        const CaseOptions& o = options.rotary;
        k_rope_ = make_mla_heads(o, 1, o.rotary_dim, o.in, random_);
        latent_ = make_mla_heads(o, 1, options.latent_dim, o.in, random_);
        scale_ = {0.002f * static_cast<float>(1 + random_() % 50)};
        cache_.element_size = is_float8(options.cached_as) ? 1 : size_of(o.dtype);
        cache_.slot_stride = row_dim() + options.padding;
        cache_.block_stride = cache_.slot_stride * options.block_size + options.padding;
        cache_.first_byte = guard_bytes + options.misalignment * cache_.element_size;
        cache_.bytes.resize(cache_.byte_of(blocks(), 0) + guard_bytes);
        for (std::byte& byte : cache_.bytes) byte = static_cast<std::byte>(random_());
        cache_.before = cache_.bytes;
        choose_slots();
    }

    const MlaCacheOptions& options() const { return options_; }
    RotaryCase& rotary() { return rotary_; }
    HeadBuffer& k_rope() { return k_rope_; }
    HeadBuffer& latent() { return latent_; }
    RowCache& cache() { return cache_; }
    std::vector<float>& scale() { return scale_; }
    std::vector<int64_t>& slots() { return slots_; }  // one per token of the batch
    const std::vector<std::byte>& slot_words() {
        const int size = options_.slots_are_int64 ? 8 : 4;
        slot_words_.assign((slots_.size() + 1) * 8, std::byte{0x55});
        for (size_t i = 0; i < slots_.size(); ++i) {
            const auto narrow = static_cast<int32_t>(slots_[i]);
            std::memcpy(slot_words_.data() + i * size,
                        options_.slots_are_int64 ? static_cast<const void*>(&slots_[i]) : &narrow, size);
        }
        return slot_words_;
    }
    int64_t blocks() const { return options_.paged ? options_.blocks : options_.rotary.batch; }
    int64_t row_dim() const { return int64_t{options_.latent_dim} + options_.rotary.rotary_dim; }

    // Valid during the lifetime of the case.
    MlaRotaryAndCacheArgs args() {
        MlaRotaryAndCacheArgs args;
        args.rotary = rotary_.args();
        const HeadStrides cached{.batch = cache_.block_stride, .token = cache_.slot_stride, .head = 0};
        args.latent = {.view = {.in = latent_.first_head(),
                                .out = cache_.first_row(),
                                .heads = 1,
                                .in_strides = latent_.strides,
                                .out_strides = cached},
                       .dim = options_.latent_dim};
        args.rotary.k = {.in = k_rope_.first_head(),
                         .out = cache_.first_row() + options_.latent_dim * cache_.element_size,
                         .heads = 1,
                         .in_strides = k_rope_.strides,
                         .out_strides = cached};
        args.slots = {.of_tokens = {.data = slot_words().data(),
                                    .is_int64 = options_.slots_are_int64,
                                    .batch_stride = options_.rotary.tokens,
                                    .token_stride = 1},
                      .paged = options_.paged,
                      .blocks = blocks(),
                      .block_size = options_.block_size};
        args.cached_as = options_.cached_as;
        if (options_.has_scale) args.scale = scale_.data();
        return args;
    }

    // Expects q as rotary would leave it, the rows of the cache within one rounding of the reference, latents exact,
    // and every other byte unchanged.
    void expect_written() const {
        SCOPED_TRACE(describe(options_));
        rotary_.expect_rotated();
        k_rope_.expect_untouched();
        latent_.expect_untouched();
        std::vector<std::byte> expected = cache_.before;
        k_rope_.for_each_head([&](int64_t batch, int64_t token, int) {
            const int64_t slot = slots_[batch * options_.rotary.tokens + token];
            if (slot < 0 || slot >= slot_count()) return;
            const int64_t block = options_.paged ? slot / options_.block_size : batch;
            const int64_t byte = cache_.byte_of(block, slot % options_.block_size);
            std::copy_n(cache_.bytes.begin() + byte, row_dim() * cache_.element_size, expected.begin() + byte);
            expect_row(batch, token, cache_.bytes.data() + byte);
            if (::testing::Test::HasFatalFailure()) {
                ADD_FAILURE() << "batch " << batch << " token " << token << " slot " << slot;
            }
        });
        const auto changed = std::mismatch(cache_.bytes.begin(), cache_.bytes.end(), expected.begin()).first;
        EXPECT_TRUE(changed == cache_.bytes.end())
            << "byte " << changed - cache_.bytes.begin() << " of " << cache_.bytes.size() << " was changed";
    }

private:
    static CaseOptions without_keys(CaseOptions options) {
        options.k_heads = 0;
        return options;
    }

    int64_t slot_count() const { return options_.paged ? options_.blocks * options_.block_size : options_.block_size; }

    // No two tokens share a slot.
    void choose_slots() {
        const int64_t tokens = options_.rotary.tokens;
        std::vector<int64_t> free;
        for (int64_t i = 0; i < options_.rotary.batch * tokens; ++i) {
            if (i == 0 || (!options_.paged && i % tokens == 0)) {
                free.resize(slot_count());
                std::iota(free.begin(), free.end(), 0);
                std::shuffle(free.begin(), free.end(), random_);
            }
            if (free.empty() || (options_.leaves_some_out && random_() % 4 == 0)) {
                const int64_t nowhere[] = {-1, -7, slot_count(), std::numeric_limits<int32_t>::min(),
                                           std::numeric_limits<int32_t>::max()};
                slots_.push_back(nowhere[random_() % 5]);
            } else {
                slots_.push_back(free.back());
                free.pop_back();
            }
        }
    }

    void expect_row(int64_t batch, int64_t token, const std::byte* row) const {
        const CaseOptions& o = options_.rotary;
        const int size = size_of(o.dtype);
        const std::byte* latent = latent_.head_before(batch, token, 0);
        const std::byte* key = k_rope_.head_before(batch, token, 0);
        const std::vector<ReferenceCosSin> cos_sins = rotary_.reference_cos_sins(batch, token, 0);
        const std::byte* key_row = row + int64_t{options_.latent_dim} * cache_.element_size;
        const StoredAs cached_as = options_.cached_as;
        if (!is_float8(cached_as)) {
            ASSERT_EQ(std::memcmp(row, latent, int64_t{options_.latent_dim} * size), 0) << "latent";
            const HeadsShape rope{.dtype = o.dtype, .heads = 1, .head_dim = o.rotary_dim};
            return expect_rotated_head(rope, o.pairing, key, key_row, cos_sins);
        }
        const float scale = options_.has_scale ? scale_[0] : 1.0f;
        const auto element = [&](const std::byte* of, int at) { return element_at(o.dtype, of + int64_t{at} * size); };
        for (int at = 0; at < options_.latent_dim; ++at) {
            const float quotient = static_cast<float>(element(latent, at)) / scale;
            ASSERT_EQ(static_cast<int>(row[at]), static_cast<int>(nearest_float8(quotient, cached_as)))
                << "latent " << at;
        }
        const bool halves = o.pairing == Pairing::halves;
        const int half = o.rotary_dim / 2;
        for (int at = 0; at < o.rotary_dim; ++at) {
            const int pair = halves ? at % half : at / 2;
            const bool is_first = halves ? at < half : at % 2 == 0;
            const long double x = element(key, halves ? pair : 2 * pair);
            const long double y = element(key, halves ? pair + half : 2 * pair + 1);
            const auto [cos, sin] = cos_sins[pair];
            const long double exact = (is_first ? x * cos - y * sin : y * cos + x * sin) / scale;
            const long double norm = std::sqrt((x * x + y * y) * (cos * cos + sin * sin)) / scale;
            const long double expected =
                std::clamp<long double>(exact, -largest_finite(cached_as), largest_finite(cached_as));
            const long double half_ulp = half_ulp_of_float8(expected, cached_as);
            const double actual = value_of_float8(static_cast<uint8_t>(key_row[at]), cached_as);
            ASSERT_LE(std::abs(actual - expected), half_ulp + norm * format_of(o.dtype).arithmetic_error)
                << actual << " instead of " << static_cast<double>(exact) << ", component " << at << " of the key";
        }
    }

    MlaCacheOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    HeadBuffer k_rope_, latent_;
    RowCache cache_;
    std::vector<float> scale_;
    std::vector<int64_t> slots_;
    std::vector<std::byte> slot_words_;
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
    const int64_t unit = coin() ? 16 / size_of(o.rotary.dtype) : 1;
    o.padding = coin() ? 0 : unit * upto(1, 3);
    o.misalignment = coin() ? 0 : unit * upto(1, 5);
    o.blocks = upto(1, 7);
    o.block_size = upto(1, 20);
    o.slots_are_int64 = coin();
    o.leaves_some_out = coin();
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
