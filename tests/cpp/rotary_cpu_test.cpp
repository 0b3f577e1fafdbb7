#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/rotate_tokens.h"
#include "mrrope/frequency_table.h"
#include "mrrope/rotary.h"
#include "rotary_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void on_this_thread(int64_t count, int64_t, const RangeBody& body) {
    body(0, count);
}

void rotate_and_expect(const CaseOptions& options) {
    RotaryCase rotary(options);
    rotary_cpu(rotary.args());
    rotary.expect_rotated();
}

// --- against the reference ---

class EveryKind : public ::testing::TestWithParam<std::tuple<DType, Pairing>> {
protected:
    CaseOptions options() const {
        CaseOptions o;
        std::tie(o.dtype, o.pairing) = GetParam();
        return o;
    }
};

std::string name_of_kind(const ::testing::TestParamInfo<std::tuple<DType, Pairing>>& info) {
    const auto [dtype, pairing] = info.param;
    return std::string(name_of(dtype)) + (pairing == Pairing::halves ? "_halves" : "_interleaved");
}

INSTANTIATE_TEST_SUITE_P(RotaryCpu, EveryKind,
                         ::testing::Combine(::testing::ValuesIn(all_dtypes), ::testing::ValuesIn(both_pairings)),
                         name_of_kind);

TEST_P(EveryKind, OutOfPlaceAndInPlace) {
    CaseOptions o = options();
    o.batch = 2;
    o.head_dim = o.rotary_dim = 128;
    rotate_and_expect(o);
    o.in_place = true;
    rotate_and_expect(o);
}

TEST_P(EveryKind, QueriesAlone) {
    CaseOptions o = options();
    o.k_heads = 0;
    rotate_and_expect(o);
    o.in_place = true;
    rotate_and_expect(o);
}

TEST_P(EveryKind, PartialRotationCopiesTheTail) {
    for (const auto& [head_dim, rotary_dim] : {std::pair{96, 32}, {80, 64}, {17, 16}, {100, 2}, {5, 4}}) {
        CaseOptions o = options();
        o.head_dim = head_dim;
        o.rotary_dim = rotary_dim;
        rotate_and_expect(o);
        o.in_place = true;
        rotate_and_expect(o);
    }
}

TEST_P(EveryKind, EveryOrderOfDimensions) {
    for (const char* in_order : {"bsh", "bhs", "sbh", "hsb"}) {
        for (const char* out_order : {"bsh", "bhs"}) {
            CaseOptions o = options();
            o.batch = 2;
            o.tokens = 5;
            o.q_heads = 4;
            o.k_heads = 2;
            o.in = {.order = in_order, .padding = 3};
            o.out = {.order = out_order};
            rotate_and_expect(o);
        }
    }
}

TEST_P(EveryKind, UnalignedPointersAndOddStrides) {
    for (int64_t misalignment = 0; misalignment < 8; ++misalignment) {
        CaseOptions o = options();
        o.head_dim = o.rotary_dim = 64;
        o.in = {.order = "bhs", .padding = 1, .misalignment = misalignment};
        o.out = {.order = "bsh", .padding = 5, .misalignment = 7 - misalignment};
        rotate_and_expect(o);
        o.in_place = true;
        rotate_and_expect(o);
    }
}

TEST_P(EveryKind, HeadsWiderThanATileOfPairs) {
    for (const auto& [head_dim, rotary_dim] : {std::pair{258, 258}, {512, 512}, {600, 516}, {1026, 770}}) {
        for (const bool in_place : {false, true}) {
            CaseOptions o = options();
            o.head_dim = head_dim;
            o.rotary_dim = rotary_dim;
            o.in_place = in_place;
            rotate_and_expect(o);
        }
    }
}

TEST_P(EveryKind, MoreTokensThanATile) {
    for (const int64_t tokens : {63, 64, 65, 129, 200}) {
        CaseOptions o = options();
        o.batch = 2;
        o.tokens = tokens;
        o.head_dim = o.rotary_dim = 8;
        rotate_and_expect(o);
    }
}

TEST_P(EveryKind, PositionsOfEitherKindBroadcastOrNot) {
    for (const bool wide : {false, true}) {
        for (const bool shared : {false, true}) {
            for (const bool same : {false, true}) {
                CaseOptions o = options();
                o.batch = 3;
                o.positions.is_int64 = wide;
                o.positions.same_for_all_sequences = shared;
                o.positions.same_for_all_tokens = same;
                rotate_and_expect(o);
            }
        }
    }
}

TEST_P(EveryKind, NegativeAndHugePositions) {
    CaseOptions o = options();
    o.tokens = 20;
    o.positions.smallest = std::numeric_limits<int64_t>::min();
    o.positions.largest = std::numeric_limits<int64_t>::max();
    rotate_and_expect(o);
    o.positions.smallest = o.positions.largest - 100;
    rotate_and_expect(o);
    o.positions.smallest = std::numeric_limits<int64_t>::min();
    o.positions.largest = o.positions.smallest + 100;
    rotate_and_expect(o);
    o.positions.is_int64 = false;
    o.positions.smallest = std::numeric_limits<int32_t>::min();
    o.positions.largest = std::numeric_limits<int32_t>::max();
    rotate_and_expect(o);
}

TEST_P(EveryKind, ConjugateAndAttentionFactor) {
    for (const bool conjugate : {false, true}) {
        for (const double factor : {1.0, 1.2772588722239782, 0.25}) {
            CaseOptions o = options();
            o.conjugate = conjugate;
            o.attention_factor = factor;
            rotate_and_expect(o);
        }
    }
}

TEST_P(EveryKind, StridesThatRunBackwards) {
    CaseOptions o = options();
    o.tokens = 7;
    o.in = {.order = "bsh", .tokens_backwards = true};
    o.out = {.order = "bhs", .padding = 2, .tokens_backwards = true};
    rotate_and_expect(o);
}

// --- several tables ---

TEST_P(EveryKind, ATableForEverySequence) {
    for (const int64_t padding : {0, 3}) {
        CaseOptions o = options();
        o.batch = 4;
        o.tables = {.table_for = TableFor::each_sequence, .padding = padding};
        rotate_and_expect(o);
        o.in_place = true;
        rotate_and_expect(o);
    }
}

TEST_P(EveryKind, ATableByIndexOfASequence) {
    for (const bool shared : {false, true}) {
        CaseOptions o = options();
        o.batch = 5;
        o.tables = {.table_for = TableFor::each_index,
                    .count = 3,
                    .same_index_for_all_sequences = shared,
                    .same_index_for_all_tokens = true};
        rotate_and_expect(o);
    }
}

// More tokens than a tile, each with cosines and sines of its own table.
TEST_P(EveryKind, ATableByIndexOfAToken) {
    for (const int64_t batch : {1, 2}) {
        CaseOptions o = options();
        o.batch = batch;
        o.tokens = 70;
        o.head_dim = o.rotary_dim = 8;
        o.tables = {.table_for = TableFor::each_index, .count = 4, .padding = 1};
        rotate_and_expect(o);
    }
}

TEST_P(EveryKind, TheOnlyTableOfAStack) {
    for (const TableFor table_for : {TableFor::each_sequence, TableFor::each_index}) {
        CaseOptions o = options();
        o.tables = {.table_for = table_for, .count = 1};
        rotate_and_expect(o);
    }
}

TEST_P(EveryKind, HeadsWiderThanATileOfPairsWithTablesAndRows) {
    for (const TableFor table_for : {TableFor::all, TableFor::each_sequence, TableFor::each_index}) {
        for (const int64_t rows : {0, 3}) {
            CaseOptions o = options();
            o.batch = 2;
            o.head_dim = o.rotary_dim = 516;
            o.position_rows = rows;
            o.tables = {.table_for = table_for, .count = 3};
            rotate_and_expect(o);
        }
    }
}

TEST_P(EveryKind, EveryTableHasPositionRowsOfItsOwn) {
    for (const TableFor table_for : {TableFor::all, TableFor::each_sequence, TableFor::each_index}) {
        for (const int64_t rows : {1, 3}) {
            for (const bool shared : {false, true}) {
                CaseOptions o = options();
                o.batch = 3;
                o.positions = {.is_int64 = shared, .same_for_all_sequences = shared};
                o.position_rows = rows;
                o.tables = {.table_for = table_for, .count = 2, .padding = 1, .same_index_for_all_tokens = shared};
                rotate_and_expect(o);
            }
        }
    }
}

// --- head tables ---

// One, three and four query heads per table, with and without k; the tables' words at odd strides.
TEST_P(EveryKind, ATableForEveryGroupOfHeads) {
    for (const auto& [tables, q_per_table, k_per_table] :
         {std::tuple{3, 1, 1}, {2, 3, 1}, {3, 4, 1}, {2, 1, 3}, {4, 3, 0}, {1, 3, 1}}) {
        for (const TableFor table_for : {TableFor::all, TableFor::each_sequence, TableFor::each_index}) {
            for (const int64_t rows : {0, 2}) {
                const int64_t padding = rows == 0 ? 0 : 1;
                CaseOptions o = options();
                o.batch = 2;
                o.q_heads = tables * q_per_table;
                o.k_heads = tables * k_per_table;
                o.head_dim = 24;
                o.rotary_dim = rows == 0 ? 24 : 16;
                o.in_place = rows == 0;
                o.in = {.order = "bhs", .padding = padding};
                o.position_rows = rows;
                o.tables = {.table_for = table_for, .count = 3, .padding = padding, .heads = tables};
                rotate_and_expect(o);
                o.tables.has_query_factors = true;
                rotate_and_expect(o);
            }
        }
    }
}

TEST_P(EveryKind, HeadTablesOfMoreTokensThanATileAndWiderHeads) {
    CaseOptions o = options();
    o.tokens = 70;
    o.q_heads = 4;
    o.k_heads = 2;
    o.head_dim = o.rotary_dim = 260;
    o.tables.heads = 2;
    rotate_and_expect(o);
}

// --- random cases ---

TEST(RotaryCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 400 && !::testing::Test::HasFailure(); ++seed)
        rotate_and_expect(random_options(seed));
}

TEST(RotaryCpu, InPlaceEqualsOutOfPlaceBitForBit) {
    for (uint64_t seed = 1000; seed < 1050; ++seed) {
        CaseOptions options = random_options(seed);
        options.out = options.in;
        options.in_place = false;
        RotaryCase out_of_place(options);
        rotary_cpu(out_of_place.args());

        RotaryArgs args = out_of_place.args();
        for (HeadsView* view : {&args.q, &args.k}) view->out = const_cast<void*>(view->in);
        rotary_cpu(args);
        for (const Heads* heads : {&out_of_place.q(), &out_of_place.k()}) {
            heads->in.for_each_head([&](int64_t batch, int64_t token, int head) {
                ASSERT_EQ(std::memcmp(heads->in.head(batch, token, head), heads->out.head(batch, token, head),
                                      heads->in.head_bytes()),
                          0)
                    << describe(options);
            });
        }
    }
}

// rotary_cpu selects the best instruction set; the baseline must be right, too. Not bit-identical, because it may lack
// FMA.
TEST(RotaryCpu, TheBaselineInstructionSetIsRightToo) {
    for (uint64_t seed = 3000; seed < 3100; ++seed) {
        const CaseOptions options = random_options(seed);
        RotaryCase rotary(options);
        baseline::rotate_tokens(rotary.args(), 0, options.batch * options.tokens);
        rotary.expect_rotated();
    }
}

// Against angle = position * inv_freq, without fixed point.
TEST(RotaryCpu, RotatesByPositionTimesFrequency) {
    const FrequencyTable table = build_table(
        {.method = Method::mrrope_pro, .rotary_dim = 64, .base = 5e5, .original_max_position = 8192, .scale = 16});
    const std::vector<uint64_t> words = packed(table);
    const std::vector<int64_t> positions{0, 1, 17, 1000, 131071};
    std::vector<double> heads(positions.size() * 64, 1.0);
    RotaryArgs args;
    args.q = {
        .in = heads.data(), .out = heads.data(), .heads = 1, .in_strides = {.token = 64}, .out_strides = {.token = 64}};
    args.positions = {.data = positions.data()};
    args.table = words.data();
    args.batch = 1;
    args.tokens = static_cast<int64_t>(positions.size());
    args.head_dim = args.rotary_dim = 64;
    args.dtype = DType::float64;
    rotary_cpu(args);
    for (size_t t = 0; t < positions.size(); ++t) {
        for (int i = 0; i < 32; ++i) {
            const double angle = static_cast<double>(positions[t]) * table.inv_freq[i];
            const double gain = table.attention_factor;
            // Half a unit of the phase step and the roundings of inv_freq and of this product, times the position.
            const double off = static_cast<double>(positions[t]) * 0x1p-65 * 2 * std::numbers::pi + 0x1p-52 * angle;
            const double slack = 2.0 * (off + 5e-16);
            EXPECT_NEAR(heads[t * 64 + i], gain * (std::cos(angle) - std::sin(angle)), slack) << t << " " << i;
            EXPECT_NEAR(heads[t * 64 + 32 + i], gain * (std::cos(angle) + std::sin(angle)), slack) << t << " " << i;
        }
    }
}

TEST(RotaryCpu, EmptyTensorsTouchNothing) {
    for (const bool in_place : {false, true}) {
        for (const auto& [batch, tokens, q_heads, k_heads] :
             {std::tuple{0, 5, 2, 1}, {2, 0, 2, 1}, {0, 0, 1, 0}, {2, 5, 0, 0}}) {
            CaseOptions o;
            o.batch = batch;
            o.tokens = tokens;
            o.q_heads = q_heads;
            o.k_heads = k_heads;
            o.in_place = in_place;
            rotate_and_expect(o);
        }
    }
    RotaryArgs nothing;
    nothing.head_dim = nothing.rotary_dim = 64;
    rotary_cpu(nothing, [](int64_t, int64_t, const RangeBody&) { FAIL() << "no work to distribute"; });
}

TEST(RotaryCpu, KeysWithoutQueries) {
    CaseOptions o;
    o.q_heads = 0;
    o.k_heads = 3;
    rotate_and_expect(o);
}

// --- half precision ---

class HalfPrecision : public ::testing::TestWithParam<DType> {
protected:
    // All 65536 bit patterns, each paired with zero, rotated at position 0 with this gain.
    std::vector<uint16_t> all_patterns_times(double gain, Pairing pairing, bool in_second_half) const {
        constexpr int pairs = 64;
        constexpr int patterns = 65536;
        std::vector<uint16_t> heads(2 * patterns);
        const auto place = [&](int pattern) {
            const int head = pattern / pairs;
            const int pair = pattern % pairs;
            const int at = pairing == Pairing::halves ? pair + in_second_half * pairs : 2 * pair + in_second_half;
            return head * 2 * pairs + at;
        };
        for (int pattern = 0; pattern < patterns; ++pattern) heads[place(pattern)] = static_cast<uint16_t>(pattern);
        std::vector<uint64_t> table(pairs, 2935890503282001226u);
        table.push_back(std::bit_cast<uint64_t>(gain));
        const int64_t position = 0;
        RotaryArgs args;
        args.q = {.in = heads.data(),
                  .out = heads.data(),
                  .heads = patterns / pairs,
                  .in_strides = {.head = 2 * pairs},
                  .out_strides = {.head = 2 * pairs}};
        args.positions = {.data = &position};
        args.table = table.data();
        args.batch = args.tokens = 1;
        args.head_dim = args.rotary_dim = 2 * pairs;
        args.dtype = GetParam();
        args.pairing = pairing;
        rotary_cpu(args);
        std::vector<uint16_t> results(patterns);
        for (int pattern = 0; pattern < patterns; ++pattern) results[pattern] = heads[place(pattern)];
        return results;
    }

    double value(uint16_t bits) const {
        return GetParam() == DType::float16 ? value_of_float16(bits) : value_of_bfloat16(bits);
    }
};

INSTANTIATE_TEST_SUITE_P(RotaryCpu, HalfPrecision, ::testing::Values(DType::float16, DType::bfloat16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(HalfPrecision, PositionZeroKeepsEveryBitPattern) {
    for (const Pairing pairing : both_pairings) {
        for (const bool second : {false, true}) {
            const std::vector<uint16_t> results = all_patterns_times(1.0, pairing, second);
            for (int pattern = 0; pattern < 65536; ++pattern) {
                const double before = value(static_cast<uint16_t>(pattern));
                if (std::isnan(before)) {
                    ASSERT_TRUE(std::isnan(value(results[pattern]))) << std::hex << pattern;
                } else if (before == 0.0) {
                    ASSERT_EQ(value(results[pattern]), 0.0) << std::hex << pattern;
                } else {
                    ASSERT_EQ(results[pattern], pattern) << std::hex << pattern;
                }
            }
        }
    }
}

// Gains with few bits, so that the product is exact in float32 and rounds once. Gains like 1.5 produce ties for every
// other full mantissa.
TEST_P(HalfPrecision, RoundsToNearestEven) {
    for (const double gain :
         {1.5, 1.25, 0.75, 1.0 + 0x1p-10, 1.0 + 0x1p-7, 1.0 - 0x1p-9, 3.0, 0x1p-3, 0x1.8p-6, 0x1p-12}) {
        const std::vector<uint16_t> results = all_patterns_times(gain, Pairing::halves, true);
        for (int pattern = 0; pattern < 65536; ++pattern) {
            const double before = value(static_cast<uint16_t>(pattern));
            const double after = value(results[pattern]);
            if (std::isnan(before)) {
                ASSERT_TRUE(std::isnan(after)) << std::hex << pattern;
                continue;
            }
            // Below float32's smallest normal number the product is inexact.
            if (GetParam() == DType::bfloat16 && std::abs(before * gain) < 0x1p-126) continue;
            ASSERT_EQ(after, rounded_to(GetParam(), before * gain)) << std::hex << pattern << " times " << gain;
        }
    }
}

// --- threads ---

TEST(OnAllCores, CoversEveryIndexExactlyOnce) {
    for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000, 100003}) {
        for (const int64_t grain : {0, 1, 2, 3, 100, 99999, 1000000}) {
            std::vector<std::atomic<int>> visits(count);
            std::atomic<int> ranges = 0;
            std::atomic<bool> too_small = false;
            on_all_cores(count, grain, [&](int64_t begin, int64_t end) {
                ++ranges;
                if (end - begin < std::min(count, grain)) too_small = true;
                for (int64_t i = begin; i < end; ++i) ++visits.at(i);
            });
            for (const auto& visit : visits) ASSERT_EQ(visit, 1) << count << " " << grain;
            EXPECT_FALSE(too_small) << count << " " << grain;
            EXPECT_GE(ranges, 1);
        }
    }
}

TEST(OnAllCores, AnExceptionOfAnyThreadReachesTheCaller) {
    for (const int64_t thrower : {0, 999}) {
        const auto throw_at = [&](int64_t begin, int64_t end) {
            if (begin <= thrower && thrower < end) throw std::runtime_error("no memory");
        };
        EXPECT_THROW(on_all_cores(1000, 1, throw_at), std::runtime_error) << thrower;
    }
    const auto throw_everywhere = [](int64_t, int64_t) { throw std::runtime_error("no memory"); };
    EXPECT_THROW(on_all_cores(1000, 1, throw_everywhere), std::runtime_error);
}

TEST(ParallelForOfTheCaller, GetsEveryTokenOfTheBatchOnce) {
    CaseOptions o;
    o.batch = 3;
    o.tokens = 70;
    RotaryCase rotary(o);
    int calls = 0;
    rotary_cpu(rotary.args(), [&](int64_t count, int64_t grain, const RangeBody& body) {
        ++calls;
        EXPECT_EQ(count, 3 * 70);
        EXPECT_GE(grain, 1);
        // In descending order, with boundaries inside sequences.
        for (int64_t end = count; end > 0; end -= std::min<int64_t>(end, 23)) body(std::max<int64_t>(end - 23, 0), end);
    });
    EXPECT_EQ(calls, 1);
    rotary.expect_rotated();
}

TEST(ParallelForOfTheCaller, DoesNotChangeTheResult) {
    for (uint64_t seed = 2000; seed < 2040; ++seed) {
        const CaseOptions options = random_options(seed, {.tokens = 150, .head_dim = 40});
        RotaryCase serial(options);
        rotary_cpu(serial.args(), on_this_thread);
        RotaryCase pieces(options);
        rotary_cpu(pieces.args(), [](int64_t count, int64_t, const RangeBody& body) {
            for (int64_t i = 0; i < count; ++i) body(i, i + 1);
        });
        RotaryCase threads(options);
        rotary_cpu(threads.args(), [](int64_t count, int64_t, const RangeBody& body) { on_all_cores(count, 1, body); });
        for (RotaryCase* other : {&pieces, &threads}) {
            EXPECT_TRUE(other->output(other->q()).bytes == serial.output(serial.q()).bytes) << describe(options);
            EXPECT_TRUE(other->output(other->k()).bytes == serial.output(serial.k()).bytes) << describe(options);
        }
    }
}

TEST(ParallelForOfTheCaller, GetsAGrainWorthAThread) {
    CaseOptions o;
    o.q_heads = 32;
    o.k_heads = 8;
    o.head_dim = o.rotary_dim = 128;
    RotaryCase rotary(o);
    rotary_cpu(rotary.args(), [&](int64_t count, int64_t grain, const RangeBody& body) {
        EXPECT_GE(grain * 40 * 128, 16384);
        EXPECT_LE(grain * 40 * 128, 262144);
        body(0, count);
    });
    rotary.expect_rotated();
}

TEST(SizeOf, EveryElement) {
    EXPECT_EQ(size_of(DType::float64), 8);
    EXPECT_EQ(size_of(DType::float32), 4);
    EXPECT_EQ(size_of(DType::float16), 2);
    EXPECT_EQ(size_of(DType::bfloat16), 2);
}

}  // namespace
}  // namespace mrrope
