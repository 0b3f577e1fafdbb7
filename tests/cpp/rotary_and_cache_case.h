#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "float8_elements.h"
#include "head_buffer.h"
#include "mrrope/rotary_and_cache.h"
#include "reference_rotation.h"
#include "rotary_case.h"

// A rotary_and_cache call with all its buffers, generated from a seed and checked against the reference.

namespace mrrope::testing {

enum class ScaleFor { none, all, each_head };

struct CacheOptions {
    CaseOptions rotary = {};  // k_heads: of k and of v
    StoredAs cached_as = StoredAs::heads_dtype;
    ScaleFor scale_for = ScaleFor::none;
    bool paged = true;
    std::string order = "bsh";  // blocks, slots, heads: "bsh" is nhd, "bhs" is hnd
    int64_t padding = 0;        // elements of padding in the cache after each step of each dimension
    int64_t misalignment = 0;   // of the cache, in elements
    int64_t blocks = 5;         // of a paged cache
    int64_t block_size = 4;
    bool slots_are_int64 = true;
    bool leaves_some_out = true;
};

inline std::string describe(const CacheOptions& o) {
    const char* scales[] = {"", " one scale", " a scale a head"};
    return describe(o.rotary) + name_of(o.cached_as) + scales[static_cast<int>(o.scale_for)] +
           (o.paged ? " paged " : " static ") + o.order + " padding " + std::to_string(o.padding) + " misalignment " +
           std::to_string(o.misalignment) + " blocks " + std::to_string(o.blocks) + " of " +
           std::to_string(o.block_size) + (o.slots_are_int64 ? " int64" : " int32") + " slots" +
           (o.leaves_some_out ? ", some left out" : "");
}

// A cache in a buffer of noise, so that every unwanted write is detected.
struct CacheBuffer {
    HeadStrides strides;
    int element_size = 0;
    int64_t first_byte = 0;
    std::vector<std::byte> bytes;
    std::vector<std::byte> before;

    std::byte* first_head() { return bytes.data() + first_byte; }

    int64_t byte_of(int64_t block, int64_t slot, int64_t head) const {
        const int64_t element = block * strides.batch + slot * strides.token + head * strides.head;
        return first_byte + element * element_size;
    }
};

inline CacheBuffer make_cache(const CacheOptions& options, int64_t blocks, std::mt19937_64& random) {
    constexpr int64_t guard_bytes = 64;
    CacheBuffer cache;
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
    cache.first_byte = guard_bytes + options.misalignment * cache.element_size;
    cache.bytes.resize(cache.first_byte + step * cache.element_size + guard_bytes);
    for (std::byte& byte : cache.bytes) byte = static_cast<std::byte>(random());
    cache.before = cache.bytes;
    return cache;
}

class RotaryAndCacheCase {
public:
    explicit RotaryAndCacheCase(const CacheOptions& options)
        : options_(options), rotary_(without_keys(options.rotary)), random_(options.rotary.seed + 1) {
        const CaseOptions& o = options.rotary;
        const HeadsShape shape{
            .dtype = o.dtype, .batch = o.batch, .tokens = o.tokens, .heads = o.k_heads, .head_dim = o.head_dim};
        k_ = make_heads(shape, o.in, random_);
        v_ = make_heads(shape, o.in, random_);
        key_cache_ = make_cache(options, blocks(), random_);
        value_cache_ = make_cache(options, blocks(), random_);
        for (std::vector<float>* scales : {&key_scales_, &value_scales_}) {
            scales->resize(std::max(1, o.k_heads));
            for (float& scale : *scales) scale = 0.002f * static_cast<float>(1 + random_() % 50);
        }
        choose_slots();
    }

    const CacheOptions& options() const { return options_; }
    RotaryCase& rotary() { return rotary_; }
    HeadBuffer& k() { return k_; }
    HeadBuffer& v() { return v_; }
    CacheBuffer& key_cache() { return key_cache_; }
    CacheBuffer& value_cache() { return value_cache_; }
    std::vector<float>& key_scales() { return key_scales_; }
    std::vector<float>& value_scales() { return value_scales_; }
    std::vector<int64_t>& slots() { return slots_; }  // one per token of the batch
    const std::vector<std::byte>& slot_words() {
        slot_words_.assign((options_.rotary.batch * row_length() + 1) * 8, std::byte{0x55});
        for (size_t i = 0; i < slots_.size(); ++i) {
            const int64_t at = word_of(static_cast<int64_t>(i));
            const auto narrow = static_cast<int32_t>(slots_[i]);
            if (options_.slots_are_int64) {
                std::memcpy(slot_words_.data() + 8 * at, &slots_[i], 8);
            } else {
                std::memcpy(slot_words_.data() + 4 * at, &narrow, 4);
            }
        }
        return slot_words_;
    }
    int64_t blocks() const { return options_.paged ? options_.blocks : options_.rotary.batch; }
    int64_t slot_count() const { return options_.paged ? options_.blocks * options_.block_size : options_.block_size; }

    // Tokens are numbered across the batch.
    bool is_kept(int64_t token) const { return slots_[token] >= 0 && slots_[token] < slot_count(); }
    int64_t byte_of(const CacheBuffer& cache, int64_t token, int head) const {
        const int64_t block = options_.paged ? slots_[token] / options_.block_size : token / options_.rotary.tokens;
        return cache.byte_of(block, slots_[token] % options_.block_size, head);
    }

    // Valid during the lifetime of the case.
    RotaryAndCacheArgs args() {
        RotaryAndCacheArgs args;
        args.rotary = rotary_.args();
        args.k = cached(k_, key_cache_, key_scales_);
        args.v = cached(v_, value_cache_, value_scales_);
        args.slots = {.of_tokens = {.data = slot_words().data(),
                                    .is_int64 = options_.slots_are_int64,
                                    .batch_stride = row_length(),
                                    .token_stride = 1},
                      .paged = options_.paged,
                      .blocks = blocks(),
                      .block_size = options_.block_size};
        args.cached_as = options_.cached_as;
        return args;
    }

    // Expects q as rotary would leave it, cached keys within one rounding of the reference, cached values exact, and
    // every other byte unchanged.
    void expect_written() const {
        SCOPED_TRACE(describe(options_));
        rotary_.expect_rotated();
        k_.expect_untouched();
        v_.expect_untouched();
        expect_cached(k_, key_cache_, key_scales_, true);
        expect_cached(v_, value_cache_, value_scales_, false);
    }

private:
    static CaseOptions without_keys(CaseOptions options) {
        options.k_heads = 0;
        return options;
    }

    int64_t row_length() const { return options_.rotary.tokens + 1; }
    int64_t word_of(int64_t token) const {
        const int64_t tokens = options_.rotary.tokens;
        return token / tokens * row_length() + token % tokens;
    }

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
            const bool left_out = free.empty() || (options_.leaves_some_out && random_() % 4 == 0);
            if (left_out) {
                const int64_t nowhere[] = {-1, -7, slot_count(), std::numeric_limits<int32_t>::min(),
                                           std::numeric_limits<int32_t>::max()};
                slots_.push_back(nowhere[random_() % 5]);
            } else {
                slots_.push_back(free.back());
                free.pop_back();
            }
        }
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

    void expect_cached(const HeadBuffer& heads, const CacheBuffer& cache, const std::vector<float>& scales,
                       bool is_key) const {
        SCOPED_TRACE(is_key ? "key cache" : "value cache");
        const int64_t head_bytes = int64_t{options_.rotary.head_dim} * cache.element_size;
        std::vector<std::byte> expected = cache.before;
        std::vector<ReferenceCosSin> cos_sins;
        heads.for_each_head([&](int64_t batch, int64_t token, int head) {
            const int64_t number = batch * options_.rotary.tokens + token;
            if (!is_kept(number)) return;
            const int64_t byte = byte_of(cache, number, head);
            std::copy_n(cache.bytes.begin() + byte, head_bytes, expected.begin() + byte);
            if (is_key) {
                const int table_head = rotary_.table_head_of(head, heads.shape.heads);
                cos_sins = rotary_.reference_cos_sins(batch, token, table_head);
            }
            const std::byte* before = heads.head_before(batch, token, head);
            const float scale = options_.scale_for == ScaleFor::none  ? 1.0f
                                : options_.scale_for == ScaleFor::all ? scales[0]
                                                                      : scales[head];
            if (is_float8(options_.cached_as)) {
                expect_float8(before, cache.bytes.data() + byte, cos_sins, scale);
            } else {
                expect_rotated_head(heads.shape, options_.rotary.pairing, before, cache.bytes.data() + byte, cos_sins);
            }
            if (::testing::Test::HasFatalFailure()) {
                ADD_FAILURE() << "batch " << batch << " token " << token << " head " << head << " slot "
                              << slots_[number];
            }
        });
        const auto changed = std::mismatch(cache.bytes.begin(), cache.bytes.end(), expected.begin()).first;
        EXPECT_TRUE(changed == cache.bytes.end())
            << "byte " << changed - cache.bytes.begin() << " of " << cache.bytes.size() << " was changed";
    }

    // Unrotated components are the nearest float8 of the float quotient; rotated ones are within one rounding.
    void expect_float8(const std::byte* before, const std::byte* after, const std::vector<ReferenceCosSin>& cos_sins,
                       float scale) const {
        const DType dtype = options_.rotary.dtype;
        const bool halves = options_.rotary.pairing == Pairing::halves;
        const int half = static_cast<int>(cos_sins.size());
        const long double largest = largest_finite(options_.cached_as);
        const auto element = [&](int at) { return element_at(dtype, before + int64_t{at} * size_of(dtype)); };
        for (int at = 0; at < options_.rotary.head_dim; ++at) {
            const auto bits = static_cast<uint8_t>(after[at]);
            if (at >= 2 * half) {
                const float quotient = static_cast<float>(element(at)) / scale;
                ASSERT_EQ(static_cast<int>(bits), static_cast<int>(nearest_float8(quotient, options_.cached_as)))
                    << "component " << at;
                continue;
            }
            const int pair = halves ? at % half : at / 2;
            const bool is_first = halves ? at < half : at % 2 == 0;
            const long double x = element(halves ? pair : 2 * pair);
            const long double y = element(halves ? pair + half : 2 * pair + 1);
            const auto [cos, sin] = cos_sins[pair];
            const long double exact = (is_first ? x * cos - y * sin : y * cos + x * sin) / scale;
            const long double norm = std::sqrt((x * x + y * y) * (cos * cos + sin * sin)) / scale;
            const long double expected = std::clamp<long double>(exact, -largest, largest);
            const long double half_ulp = half_ulp_of_float8(expected, options_.cached_as);
            const double actual = value_of_float8(bits, options_.cached_as);
            ASSERT_LE(std::abs(actual - expected), half_ulp + norm * format_of(dtype).arithmetic_error)
                << actual << " instead of " << static_cast<double>(exact) << ", component " << at;
        }
    }

    CacheOptions options_;
    RotaryCase rotary_;
    std::mt19937_64 random_;
    HeadBuffer k_, v_;
    CacheBuffer key_cache_, value_cache_;
    std::vector<float> key_scales_, value_scales_;
    std::vector<int64_t> slots_;
    std::vector<std::byte> slot_words_;
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
    const int64_t unit = coin() ? 16 / size_of(o.rotary.dtype) : 1;
    o.padding = coin() ? 0 : unit * upto(1, 3);
    o.misalignment = coin() ? 0 : unit * upto(1, 5);
    o.blocks = upto(1, 7);
    o.block_size = upto(1, 20);
    o.slots_are_int64 = coin();
    o.leaves_some_out = coin();
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
