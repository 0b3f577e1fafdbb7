#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "mrrope/rotary_and_cache.h"
#include "rotary_and_cache_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void write_and_expect(const CacheOptions& options) {
    RotaryAndCacheCase cache(options);
    rotary_and_cache_cpu(cache.args());
    cache.expect_written();
}

TEST(RotaryAndCacheCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 600 && !HasFailure(); ++seed) write_and_expect(random_cache_options(seed));
}

TEST(RotaryAndCacheCpu, EveryCacheOfEveryDTypeAndPairing) {
    for (const DType dtype : all_dtypes) {
        for (const CacheOptions& o : of_both_pairings_in_place_and_not(every_cache(dtype))) {
            write_and_expect(o);
            if (HasFailure()) return;
        }
    }
}

TEST(RotaryAndCacheCpu, PartialRotationWritesTheTail) {
    for (const DType dtype : all_dtypes) {
        for (CacheOptions o : every_cache(dtype)) {
            for (const auto& [head_dim, rotary_dim] : {std::pair{96, 32}, {80, 64}, {17, 16}, {5, 4}}) {
                o.rotary.head_dim = head_dim;
                o.rotary.rotary_dim = rotary_dim;
                o.rotary.in_place = head_dim == 80;
                write_and_expect(o);
                if (HasFailure()) return;
            }
        }
    }
}

TEST(RotaryAndCacheCpu, EveryTokenHasItsTable) {
    for (const CacheOptions& o : with_tables_by_sequence_and_by_index(every_cache(DType::bfloat16))) {
        write_and_expect(o);
        if (HasFailure()) return;
    }
}

TEST(RotaryAndCacheCpu, EveryGroupOfHeadsHasItsTable) {
    for (CacheOptions o : every_cache(DType::bfloat16)) {
        for (const auto& [tables, q_per_table, k_per_table] : {std::tuple{3, 1, 1}, {2, 3, 1}, {2, 4, 2}}) {
            o.rotary.q_heads = tables * q_per_table;
            o.rotary.k_heads = tables * k_per_table;
            o.rotary.tables = {.table_for = TableFor::each_index, .count = 2, .padding = 1, .heads = tables};
            write_and_expect(o);
            o.rotary.tables.table_for = TableFor::all;
            write_and_expect(o);
            if (HasFailure()) return;
        }
    }
}

TEST(RotaryAndCacheCpu, ManyTokensOnAllCores) {
    for (const bool paged : {false, true}) {
        for (const StoredAs cached_as : every_stored_as) {
            CacheOptions o;
            o.rotary.dtype = DType::bfloat16;
            o.rotary.batch = 2;
            o.rotary.tokens = 900;
            o.rotary.head_dim = o.rotary.rotary_dim = 64;
            o.cached_as = cached_as;
            o.paged = paged;
            o.blocks = 40;
            o.block_size = paged ? 64 : 1000;
            write_and_expect(o);
        }
    }
}

TEST(RotaryAndCacheCpu, DoesEveryTokenOnceInAnyOrder) {
    CacheOptions o;
    o.rotary.batch = 3;
    o.rotary.tokens = 7;
    o.blocks = 10;
    RotaryAndCacheCase cache(o);
    rotary_and_cache_cpu(cache.args(), [](int64_t count, int64_t, const RangeBody& body) {
        EXPECT_EQ(count, 21);
        for (int64_t at = count; at > 0; at -= 3) body(at - 3, at);
    });
    cache.expect_written();
}

TEST(RotaryAndCacheCpu, AllTokensLeftOut) {
    for (const StoredAs cached_as : every_stored_as) {
        CacheOptions o;
        o.cached_as = cached_as;
        RotaryAndCacheCase cache(o);
        std::fill(cache.slots().begin(), cache.slots().end(), -1);
        rotary_and_cache_cpu(cache.args());
        cache.expect_written();
    }
}

TEST(RotaryAndCacheCpu, NothingToDo) {
    for (const auto& [batch, tokens, q_heads, k_heads] :
         {std::tuple{0, 3, 2, 1}, {2, 0, 2, 1}, {2, 3, 0, 0}, {2, 3, 2, 0}, {2, 3, 0, 2}}) {
        for (const bool paged : {false, true}) {
            CacheOptions o;
            o.rotary.batch = batch;
            o.rotary.tokens = tokens;
            o.rotary.q_heads = q_heads;
            o.rotary.k_heads = k_heads;
            o.paged = paged;
            write_and_expect(o);
        }
    }
}

TEST(RotaryAndCacheCpu, ACacheWithoutSlotsTakesNothing) {
    for (const auto& [blocks, block_size] : {std::pair{0, 4}, {3, 0}}) {
        CacheOptions o;
        o.blocks = blocks;
        o.block_size = block_size;
        write_and_expect(o);
    }
}

// --- slices ---

TEST(Slice, OfAPagedCacheKeepsTheCache) {
    CacheOptions o;
    o.rotary.batch = 4;
    o.rotary.tokens = 5;
    for (const bool wide : {false, true}) {
        o.slots_are_int64 = wide;
        RotaryAndCacheCase cache(o);
        const RotaryAndCacheArgs whole = cache.args();
        const RotaryAndCacheArgs part = slice(whole, 2, 1, 3, 2);
        EXPECT_EQ(part.rotary.batch, 1);
        EXPECT_EQ(part.rotary.tokens, 2);
        EXPECT_EQ(part.k.view.in, cache.k().head(2, 3, 0));
        EXPECT_EQ(part.v.view.in, cache.v().head(2, 3, 0));
        EXPECT_EQ(part.k.view.out, whole.k.view.out);
        EXPECT_EQ(part.v.view.out, whole.v.view.out);
        EXPECT_EQ(part.slots.blocks, o.blocks);
        EXPECT_EQ(static_cast<const std::byte*>(part.slots.of_tokens.data) -
                      static_cast<const std::byte*>(whole.slots.of_tokens.data),
                  (2 * whole.slots.of_tokens.batch_stride + 3) * (wide ? 8 : 4));
    }
}

TEST(Slice, OfAStaticCacheStepsThroughItsSequences) {
    for (const StoredAs cached_as : every_stored_as) {
        CacheOptions o;
        o.rotary.batch = 4;
        o.rotary.tokens = 5;
        o.paged = false;
        o.cached_as = cached_as;
        RotaryAndCacheCase cache(o);
        const RotaryAndCacheArgs part = slice(cache.args(), 1, 2, 3, 2);
        EXPECT_EQ(part.k.view.in, cache.k().head(1, 3, 0));
        EXPECT_EQ(part.k.view.out, cache.key_cache().bytes.data() + cache.key_cache().byte_of(1, 0, 0));
        EXPECT_EQ(part.v.view.out, cache.value_cache().bytes.data() + cache.value_cache().byte_of(1, 0, 0));
        EXPECT_EQ(part.slots.blocks, 2);
        EXPECT_EQ(part.slots.count(), o.block_size);
    }
}

TEST(RotaryAndCacheCpu, ConjugateIsRefusedAndNothingIsWritten) {
    CacheOptions o;
    o.rotary.conjugate = true;
    RotaryAndCacheCase cache(o);
    EXPECT_THROW(rotary_and_cache_cpu(cache.args()), std::invalid_argument);
    cache.rotary().q().out.expect_untouched();
    EXPECT_EQ(cache.key_cache().bytes, cache.key_cache().before);
    EXPECT_EQ(cache.value_cache().bytes, cache.value_cache().before);
}

}  // namespace
}  // namespace mrrope
