#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "mla_rotary_and_cache_case.h"
#include "mrrope/mla_rotary_and_cache.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void write_and_expect(const MlaCacheOptions& options) {
    MlaRotaryAndCacheCase cache(options);
    mla_rotary_and_cache_cpu(cache.args());
    cache.expect_written();
}

TEST(MlaRotaryAndCacheCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 600 && !HasFailure(); ++seed) write_and_expect(random_mla_cache_options(seed));
}

TEST(MlaRotaryAndCacheCpu, EveryCacheOfEveryDTypeAndPairing) {
    for (const DType dtype : all_dtypes) {
        for (const MlaCacheOptions& o : of_both_pairings_in_place_and_not(every_mla_cache(dtype))) {
            write_and_expect(o);
            if (HasFailure()) return;
        }
    }
}

TEST(MlaRotaryAndCacheCpu, EveryTokenHasItsTable) {
    for (const MlaCacheOptions& o : with_tables_by_sequence_and_by_index(every_mla_cache(DType::bfloat16))) {
        write_and_expect(o);
        if (HasFailure()) return;
    }
}

TEST(MlaRotaryAndCacheCpu, ManyTokensOnAllCores) {
    for (const bool paged : {false, true}) {
        for (const StoredAs cached_as : every_stored_as) {
            MlaCacheOptions o;
            o.rotary.dtype = DType::bfloat16;
            o.rotary.batch = 2;
            o.rotary.tokens = 400;
            o.rotary.head_dim = o.rotary.rotary_dim = 64;
            o.latent_dim = 128;
            o.cached_as = cached_as;
            o.paged = paged;
            o.blocks = 20;
            o.block_size = paged ? 64 : 500;
            write_and_expect(o);
        }
    }
}

TEST(MlaRotaryAndCacheCpu, AllTokensLeftOut) {
    for (const StoredAs cached_as : every_stored_as) {
        MlaCacheOptions o;
        o.cached_as = cached_as;
        MlaRotaryAndCacheCase cache(o);
        std::fill(cache.slots().begin(), cache.slots().end(), -1);
        mla_rotary_and_cache_cpu(cache.args());
        cache.expect_written();
    }
}

TEST(MlaRotaryAndCacheCpu, NothingToDo) {
    for (const auto& [batch, tokens, q_heads] : {std::tuple{0, 3, 2}, {2, 0, 2}, {2, 3, 0}}) {
        for (const bool paged : {false, true}) {
            MlaCacheOptions o;
            o.rotary.batch = batch;
            o.rotary.tokens = tokens;
            o.rotary.q_heads = q_heads;
            o.paged = paged;
            write_and_expect(o);
        }
    }
}

TEST(MlaRotaryAndCacheCpu, ACacheWithoutSlotsTakesNothing) {
    for (const auto& [blocks, block_size] : {std::pair{0, 4}, {3, 0}}) {
        MlaCacheOptions o;
        o.blocks = blocks;
        o.block_size = block_size;
        write_and_expect(o);
    }
}

// --- slices ---

TEST(Slice, OfAPagedCacheKeepsTheCache) {
    MlaCacheOptions o;
    o.rotary.batch = 4;
    o.rotary.tokens = 5;
    for (const bool wide : {false, true}) {
        o.slots_are_int64 = wide;
        MlaRotaryAndCacheCase cache(o);
        const MlaRotaryAndCacheArgs whole = cache.args();
        const MlaRotaryAndCacheArgs part = slice(whole, 2, 1, 3, 2);
        EXPECT_EQ(part.rotary.k.in, cache.k_rope().head(2, 3, 0));
        EXPECT_EQ(part.latent.view.in, cache.latent().head(2, 3, 0));
        EXPECT_EQ(part.rotary.k.out, whole.rotary.k.out);
        EXPECT_EQ(part.latent.view.out, whole.latent.view.out);
        EXPECT_EQ(part.slots.blocks, o.blocks);
        EXPECT_EQ(static_cast<const std::byte*>(part.slots.of_tokens.data) -
                      static_cast<const std::byte*>(whole.slots.of_tokens.data),
                  (2 * 5 + 3) * (wide ? 8 : 4));
    }
}

TEST(Slice, OfAStaticCacheStepsThroughItsSequences) {
    for (const StoredAs cached_as : every_stored_as) {
        MlaCacheOptions o;
        o.rotary.batch = 4;
        o.rotary.tokens = 5;
        o.paged = false;
        o.cached_as = cached_as;
        MlaRotaryAndCacheCase cache(o);
        const MlaRotaryAndCacheArgs part = slice(cache.args(), 1, 2, 3, 2);
        const std::byte* row = cache.cache().bytes.data() + cache.cache().byte_of(1, 0);
        EXPECT_EQ(part.latent.view.out, row);
        EXPECT_EQ(part.rotary.k.out, row + o.latent_dim * cache.cache().element_size);
        EXPECT_EQ(part.slots.blocks, 2);
        EXPECT_EQ(part.slots.count(), o.block_size);
    }
}

}  // namespace
}  // namespace mrrope
