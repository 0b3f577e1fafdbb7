#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numbers>
#include <string>
#include <tuple>
#include <vector>

#include "mrrope/frequency_table.h"
#include "mrrope/rescale_cache.h"
#include "rescale_cache_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void rescale_and_expect(const RescaleCacheOptions& options) {
    RescaleCacheCase rescale(options);
    rescale.poison_sequences_that_stay();
    rescale_cache_cpu(rescale.args());
    rescale.expect_rescaled();
}

// --- against the reference ---

class EveryKind : public ::testing::TestWithParam<std::tuple<DType, Pairing>> {
protected:
    RescaleCacheOptions options() const {
        RescaleCacheOptions o;
        std::tie(o.dtype, o.pairing) = GetParam();
        return o;
    }
};

INSTANTIATE_TEST_SUITE_P(RescaleCacheCpu, EveryKind,
                         ::testing::Combine(::testing::ValuesIn(all_dtypes), ::testing::ValuesIn(both_pairings)),
                         [](const auto& info) {
                             return std::string(name_of(std::get<0>(info.param))) +
                                    (std::get<1>(info.param) == Pairing::halves ? "_halves" : "_interleaved");
                         });

TEST_P(EveryKind, EveryPairOfTables) {
    constexpr int tables = 3;
    RescaleCacheOptions o = options();
    o.tables = tables;
    o.batch = tables * tables;
    RescaleCacheCase rescale(o);
    for (int32_t from = 0; from < tables; ++from) {
        for (int32_t to = 0; to < tables; ++to) {
            rescale.from()[from * tables + to] = from;
            rescale.to()[from * tables + to] = to;
        }
    }
    rescale.poison_sequences_that_stay();
    rescale_cache_cpu(rescale.args());
    rescale.expect_rescaled();
}

TEST_P(EveryKind, ATableForEveryLayerAndGroupOfHeads) {
    for (const int table_layers : {1, 4}) {
        for (const auto& [table_heads, heads] : {std::tuple{1, 3}, {3, 3}, {2, 6}, {2, 8}}) {
            RescaleCacheOptions o = options();
            o.layers = 5;
            o.heads = heads;
            o.table_layers = table_layers;
            o.table_heads = table_heads;
            rescale_and_expect(o);
        }
    }
}

TEST_P(EveryKind, EveryPairHasThePositionOfItsRow) {
    for (const int64_t rows : {1, 3, 4}) {
        for (const auto& [table_layers, table_heads] : {std::tuple{1, 1}, {1, 3}, {4, 1}, {4, 3}}) {
            for (const bool shared : {false, true}) {
                RescaleCacheOptions o = options();
                o.layers = 4;
                o.table_layers = table_layers;
                o.table_heads = table_heads;
                o.position_rows = rows;
                o.positions.same_for_all_sequences = shared;
                rescale_and_expect(o);
            }
        }
    }
}

// Negated word by word, tables rotate backwards by the same rows.
TEST(RescaleCacheCpu, NegatedTablesNameTheSameRows) {
    RescaleCacheOptions o;
    o.dtype = DType::float64;
    o.position_rows = 3;
    o.batch = 1;
    RescaleCacheCase there(o);
    RescaleCacheCase back(o);
    there.from() = back.to() = {0};
    there.to() = back.from() = {1};
    for (uint64_t& word : there.tables().words()) word = 0 - word;
    rescale_cache_cpu(there.args());
    rescale_cache_cpu(back.args());
    // Either way the angle is position * (step of table 0 - step of table 1); the gains are reciprocal.
    const double gain = back.tables().attention_factor(1) / back.tables().attention_factor(0);
    there.layers()[0].for_each_head([&](int64_t batch, int64_t token, int head) {
        for (int at = 0; at < o.rotary_dim; ++at) {
            const double a = element_at(o.dtype, there.layers()[0].head(batch, token, head) + 8 * at);
            const double b = element_at(o.dtype, back.layers()[0].head(batch, token, head) + 8 * at);
            ASSERT_NEAR(a, b * gain * gain, 1e-13) << token << " " << at;
        }
    });
}

TEST_P(EveryKind, SequencesThatKeepTheirTableAreNotTouched) {
    RescaleCacheOptions o = options();
    o.batch = 4;
    RescaleCacheCase rescale(o);
    rescale.from() = {0, 1, 2, 1};
    rescale.to() = {0, 1, 2, 1};
    rescale.poison_sequences_that_stay();
    rescale_cache_cpu(rescale.args());
    for (const HeadBuffer& layer : rescale.layers()) layer.expect_untouched();
}

TEST_P(EveryKind, DimsThatFitNoVector) {
    for (const int rotary_dim : {2, 6, 10, 34, 66, 258, 516}) {
        RescaleCacheOptions o = options();
        o.head_dim = o.rotary_dim = rotary_dim;
        rescale_and_expect(o);
    }
}

TEST_P(EveryKind, PartialRotationLeavesTheTail) {
    for (const auto& [head_dim, rotary_dim] : {std::tuple{96, 32}, {80, 64}, {17, 16}, {100, 2}, {5, 4}}) {
        RescaleCacheOptions o = options();
        o.head_dim = head_dim;
        o.rotary_dim = rotary_dim;
        rescale_and_expect(o);
    }
}

TEST_P(EveryKind, EveryOrderOfDimensions) {
    for (const char* order : {"bsh", "bhs", "sbh", "shb", "hbs", "hsb"}) {
        for (const bool backwards : {false, true}) {
            RescaleCacheOptions o = options();
            o.placement = {.order = order, .padding = 3, .tokens_backwards = backwards};
            rescale_and_expect(o);
        }
    }
}

TEST_P(EveryKind, UnalignedPointers) {
    for (int64_t misalignment = 0; misalignment < 8; ++misalignment) {
        for (const bool only_last : {false, true}) {
            RescaleCacheOptions o = options();
            o.head_dim = o.rotary_dim = 64;
            o.placement.misalignment = misalignment;
            o.only_last_layer_misaligned = only_last;
            rescale_and_expect(o);
        }
    }
}

TEST_P(EveryKind, PositionsOfEitherKindBroadcastOrNot) {
    for (const bool wide : {false, true}) {
        for (const bool shared : {false, true}) {
            for (const bool same : {false, true}) {
                RescaleCacheOptions o = options();
                o.positions = {.is_int64 = wide, .same_for_all_sequences = shared, .same_for_all_tokens = same};
                rescale_and_expect(o);
            }
        }
    }
}

TEST_P(EveryKind, NegativeAndHugePositions) {
    RescaleCacheOptions o = options();
    o.tokens = 20;
    o.positions.smallest = std::numeric_limits<int64_t>::min();
    o.positions.largest = std::numeric_limits<int64_t>::max();
    rescale_and_expect(o);
    o.positions.smallest = o.positions.largest - 100;
    rescale_and_expect(o);
    o.positions = {.is_int64 = false,
                   .smallest = std::numeric_limits<int32_t>::min(),
                   .largest = std::numeric_limits<int32_t>::max()};
    rescale_and_expect(o);
}

TEST_P(EveryKind, ManyLayersAndTokens) {
    RescaleCacheOptions o = options();
    o.layers = 40;
    rescale_and_expect(o);
    o.layers = 2;
    o.tokens = 200;
    rescale_and_expect(o);
}

TEST(RescaleCacheCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 300 && !::testing::Test::HasFailure(); ++seed) {
        rescale_and_expect(random_rescale_options(seed));
    }
}

// --- against rotary ---

// Keys rotated by one table become the keys that the other table gives.
TEST(RescaleCacheCpu, MakesKeysOfOneTableIntoKeysOfTheOther) {
    constexpr int dim = 64;
    constexpr int64_t tokens = 7;
    const FrequencyTable small = build_table(
        {.method = Method::mrrope_pro, .rotary_dim = dim, .base = 5e5, .original_max_position = 8192, .scale = 2});
    const FrequencyTable large = build_table(
        {.method = Method::mrrope_pro, .rotary_dim = dim, .base = 5e5, .original_max_position = 8192, .scale = 16});
    std::vector<uint64_t> tables = packed(small);
    const std::vector<uint64_t> second = packed(large);
    tables.insert(tables.end(), second.begin(), second.end());

    std::mt19937_64 random(11);
    const HeadBuffer heads = make_heads({DType::float64, 1, tokens, 1, dim}, {}, random);
    const PositionWords positions({.largest = 131071}, 1, 1, tokens, random);
    const auto rotated_by = [&](const uint64_t* table) {
        HeadBuffer keys = heads;
        RotaryArgs args;
        args.q = {.in = keys.first_head(),
                  .out = keys.first_head(),
                  .heads = 1,
                  .in_strides = keys.strides,
                  .out_strides = keys.strides};
        args.positions = positions.view();
        args.table = table;
        args.batch = 1;
        args.tokens = tokens;
        args.head_dim = args.rotary_dim = dim;
        args.dtype = DType::float64;
        rotary_cpu(args);
        return keys;
    };
    HeadBuffer rescaled = rotated_by(tables.data());
    const HeadBuffer expected = rotated_by(tables.data() + dim / 2 + 1);
    void* const keys = rescaled.first_head();
    const int32_t from = 0;
    const int32_t to = 1;
    rescale_cache_cpu({.keys = std::span(&keys, 1),
                       .strides = rescaled.strides,
                       .positions = positions.view(),
                       .tables = tables.data(),
                       .table_count = 2,
                       .from = &from,
                       .to = &to,
                       .batch = 1,
                       .tokens = tokens,
                       .heads = 1,
                       .rotary_dim = dim,
                       .dtype = DType::float64});
    // Elements are within 4 of zero and gains below 1.3; there are three rotations, each rounded.
    const double slack = 3 * 4 * std::numbers::sqrt2 * 1.3 * (format_of(DType::float64).arithmetic_error + 0x1p-53);
    expected.for_each_head([&](int64_t batch, int64_t token, int head) {
        for (int at = 0; at < dim; ++at) {
            ASSERT_NEAR(element_at(DType::float64, rescaled.head(batch, token, head) + 8 * at),
                        element_at(DType::float64, expected.head(batch, token, head) + 8 * at), slack)
                << token << " " << at;
        }
    });
}

// --- threads ---

TEST(RescaleCacheCpu, TheCallersThreadsDoNotChangeTheResult) {
    for (uint64_t seed = 1000; seed < 1040; ++seed) {
        const RescaleCacheOptions options = random_rescale_options(seed);
        RescaleCacheCase own(options);
        rescale_cache_cpu(own.args());
        RescaleCacheCase pieces(options);
        rescale_cache_cpu(pieces.args(), [](int64_t count, int64_t, const RangeBody& body) {
            for (int64_t i = count - 1; i >= 0; --i) body(i, i + 1);
        });
        for (int layer = 0; layer < options.layers; ++layer) {
            EXPECT_TRUE(own.layers()[layer].bytes == pieces.layers()[layer].bytes) << describe(options);
        }
    }
}

TEST(RescaleCacheCpu, NothingToRescaleStartsNoThread) {
    const auto refuse = [](int64_t, int64_t, const RangeBody&) { FAIL() << "no work to distribute"; };
    for (const auto& [layers, batch, tokens, heads] :
         {std::tuple{0, 2, 3, 1}, {2, 0, 3, 1}, {2, 2, 0, 1}, {2, 2, 3, 0}, {2, 2, 3, 1}}) {
        RescaleCacheOptions o;
        o.layers = layers;
        o.batch = batch;
        o.tokens = tokens;
        o.heads = heads;
        RescaleCacheCase rescale(o);
        const bool is_empty = layers * batch * tokens * heads == 0;
        rescale.from().assign(batch, 1);
        rescale.to().assign(batch, is_empty ? 0 : 1);
        rescale_cache_cpu(rescale.args(), refuse);
        for (const HeadBuffer& layer : rescale.layers()) layer.expect_untouched();
    }
}

}  // namespace
}  // namespace mrrope
