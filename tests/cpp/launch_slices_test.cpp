#include "launch_slices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "devices.h"
#include "rotary_case.h"
#include "rotary_plan.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int64_t max_threads = std::numeric_limits<int32_t>::max();

TEST(Launches, PartitionTheTokensExactly) {
    for (const int64_t batch : {0, 1, 2, 5}) {
        for (const int64_t tokens : {0, 1, 7, 20}) {
            for (const int64_t per_launch : {1, 2, 3, 7, 19, 20, 40, 100}) {
                CaseOptions options;
                options.batch = batch;
                options.tokens = tokens;
                RotaryCase rotary(options);
                const RotaryArgs whole = rotary.args();
                std::vector<int> visits(batch * tokens);
                int launches = 0;
                const int64_t tokens_per_launch = std::min(per_launch, batch * tokens);
                for_each_launch(whole, tokens_per_launch, [&](const RotaryArgs& part) {
                    ++launches;
                    EXPECT_LE(part.batch * part.tokens, std::max(per_launch, int64_t{0}));
                    const auto* start = static_cast<const char*>(part.q.in);
                    for (int64_t b = 0; b < part.batch; ++b) {
                        for (int64_t t = 0; t < part.tokens; ++t) {
                            const char* at = start + 4 * (b * part.q.in_strides.batch + t * part.q.in_strides.token);
                            const int64_t element = (at - static_cast<const char*>(whole.q.in)) / 4;
                            const int64_t sequence = element / whole.q.in_strides.batch;
                            const int64_t token = element % whole.q.in_strides.batch / whole.q.in_strides.token;
                            ++visits.at(sequence * tokens + token);
                        }
                    }
                });
                for (const int visit : visits) ASSERT_EQ(visit, 1) << batch << " " << tokens << " " << per_launch;
                if (per_launch >= batch * tokens) {
                    EXPECT_EQ(launches, 1);
                }
            }
        }
    }
}

TEST(Launches, InSlicesGiveWhatOneGives) {
    for (uint64_t seed = 1; seed <= 120; ++seed) {
        const CaseOptions options = random_options(seed, {.tokens = 12, .head_dim = 48});
        RotaryCase whole(options);
        rotary_cpu(whole.args());
        for (const int64_t per_launch : {1, 3, 5}) {
            RotaryCase sliced(options);
            const int64_t tokens_per_launch = std::min(per_launch, options.tokens);
            for_each_launch(sliced.args(), tokens_per_launch, [](const RotaryArgs& part) { rotary_cpu(part); });
            EXPECT_TRUE(sliced.output(sliced.q()).bytes == whole.output(whole.q()).bytes) << describe(options);
            EXPECT_TRUE(sliced.output(sliced.k()).bytes == whole.output(whole.k()).bytes) << describe(options);
        }
    }
}

// The table of a token, as TableChoice defines it.
const uint64_t* table_of(const RotaryArgs& args, int64_t batch, int64_t token) {
    const TableChoice& choice = args.choice;
    if (choice.count == 1) return args.table;
    if (choice.index == nullptr) return args.table + batch * choice.stride;
    return args.table + choice.index[batch * choice.batch_stride + token * choice.token_stride] * choice.stride;
}

TEST(Launches, GiveEveryTokenItsTable) {
    for (const TableFor table_for : {TableFor::all, TableFor::each_sequence, TableFor::each_index}) {
        for (const bool one_a_sequence : {false, true}) {
            for (const int64_t rows : {0, 3}) {
                for (const int64_t per_launch : {1, 4, 7, 1000}) {
                    CaseOptions options;
                    options.batch = 5;
                    options.tokens = 7;
                    options.position_rows = rows;
                    options.tables = {
                        .table_for = table_for, .count = 4, .padding = 1, .same_index_for_all_tokens = one_a_sequence};
                    SCOPED_TRACE(describe(options));
                    RotaryCase rotary(options);
                    const RotaryArgs whole = rotary.args();
                    const int64_t tokens_per_launch = per_launch;
                    int64_t visited = 0;  // launches are in token order
                    for_each_launch(whole, tokens_per_launch, [&](const RotaryArgs& part) {
                        for (int64_t b = 0; b < part.batch; ++b) {
                            for (int64_t t = 0; t < part.tokens; ++t, ++visited) {
                                const int64_t batch = visited / options.tokens;
                                const int64_t token = visited % options.tokens;
                                const uint64_t* expected = rotary.tables().words().data() +
                                                           rotary.table_of(batch, token) * rotary.tables().stride();
                                const uint64_t* table = table_of(part, b, t);
                                ASSERT_EQ(table, expected) << batch << " " << token;
                                if (rows == 0) {
                                    ASSERT_EQ(part.positions.row_of_pair, nullptr);
                                } else {
                                    ASSERT_EQ(part.positions.row_of_pair + (table - part.table),
                                              expected + rotary.tables().first_row_word())
                                        << batch << " " << token;
                                }
                            }
                        }
                    });
                    EXPECT_EQ(visited, options.batch * options.tokens);
                }
            }
        }
    }
}

// Pointers serve address arithmetic only and are never dereferenced.
TEST(Launches, OfHugeTensorsAreFewAndComplete) {
    RotaryArgs args;
    args.batch = 3;
    args.tokens = int64_t{1} << 31;
    args.head_dim = args.rotary_dim = 128;
    args.dtype = DType::bfloat16;
    args.q.heads = 32;
    args.q.in = args.q.out = reinterpret_cast<void*>(uintptr_t{4096});
    args.q.in_strides = args.q.out_strides = {.batch = args.tokens * 32 * 128, .token = 32 * 128, .head = 128};
    args.positions.data = reinterpret_cast<void*>(uintptr_t{64});
    args.positions.batch_stride = args.tokens;
    const RotaryPlan planned = plan(shape_of(args), h200);
    int64_t tokens = 0;
    int launches = 0;
    uintptr_t expected_start = 4096;
    uintptr_t expected_positions = 64;
    for_each_launch(args, planned.tokens_per_launch, [&](const RotaryArgs& part) {
        ++launches;
        ASSERT_EQ(part.batch, 1);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.q.in), expected_start);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.q.out), expected_start);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.positions.data), expected_positions);
        EXPECT_EQ(part.k.in, nullptr);
        EXPECT_LE(part.tokens * planned.threads_per_token() + rotary_block_threads, max_threads);
        expected_start += part.tokens * 32 * 128 * 2;
        expected_positions += part.tokens * 8;
        tokens += part.tokens;
    });
    EXPECT_EQ(tokens, args.batch * args.tokens);
    EXPECT_LT(launches, 1000);
}

TEST(Slice, StepsThroughPositionsOfEitherKind) {
    for (const bool wide : {false, true}) {
        RotaryArgs args;
        args.dtype = DType::float64;
        args.q.heads = args.k.heads = 1;
        args.q.in = reinterpret_cast<void*>(uintptr_t{1000});
        args.q.out = reinterpret_cast<void*>(uintptr_t{2000});
        args.k.in = reinterpret_cast<void*>(uintptr_t{3000});
        args.k.out = reinterpret_cast<void*>(uintptr_t{4000});
        args.q.in_strides = {.batch = 50, .token = 5, .head = 1};
        args.q.out_strides = {.batch = 60, .token = 6, .head = 1};
        args.k.in_strides = {.batch = 70, .token = 7, .head = 1};
        args.k.out_strides = {.batch = 80, .token = -8, .head = 1};
        args.positions = {.data = nullptr, .is_int64 = wide, .batch_stride = 100, .token_stride = 2};
        const RotaryArgs part = slice(args, 2, 3, 4, 6);
        EXPECT_EQ(part.batch, 3);
        EXPECT_EQ(part.tokens, 6);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.q.in), 1000u + 8 * (2 * 50 + 4 * 5));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.q.out), 2000u + 8 * (2 * 60 + 4 * 6));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.k.in), 3000u + 8 * (2 * 70 + 4 * 7));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.k.out), 4000u + 8 * (2 * 80 - 4 * 8));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.positions.data), (wide ? 8u : 4u) * (2 * 100 + 4 * 2));
    }
}

RotaryArgs args_with_choice(const uint64_t* tables, const TableChoice& choice) {
    RotaryArgs args;
    args.batch = 8;
    args.tokens = 20;
    args.table = tables;
    args.positions = {.data = nullptr, .batch_stride = 20, .rows = 3, .row_stride = 160, .row_of_pair = tables + 9};
    args.choice = choice;
    return args;
}

TEST(Slice, StepsThroughIndicesAndKeepsTheTables) {
    const std::vector<uint64_t> tables(100);
    const std::vector<int32_t> index(1000);
    for (const auto& [batch_stride, token_stride] : {std::pair{100, 3}, {2, 0}, {0, 2}, {0, 0}}) {
        const TableChoice choice{.count = 5,
                                 .stride = 20,
                                 .index = index.data(),
                                 .batch_stride = batch_stride,
                                 .token_stride = token_stride,
                                 .query_factors = tables.data() + 18};
        const RotaryArgs part = slice(args_with_choice(tables.data(), choice), 2, 3, 4, 6);
        EXPECT_EQ(part.choice.index - index.data(), 2 * batch_stride + 4 * token_stride);
        EXPECT_EQ(part.choice.count, 5);
        EXPECT_EQ(part.choice.stride, 20);
        EXPECT_EQ(part.choice.batch_stride, batch_stride);
        EXPECT_EQ(part.choice.token_stride, token_stride);
        EXPECT_EQ(part.table, tables.data());
        EXPECT_EQ(part.positions.row_of_pair, tables.data() + 9);
        EXPECT_EQ(part.choice.query_factors, tables.data() + 18);
    }
}

TEST(Slice, StepsThroughTheTablesOfSequences) {
    const std::vector<uint64_t> tables(160);
    for (const int64_t batch : {1, 3}) {
        RotaryArgs args =
            args_with_choice(tables.data(), {.count = 8, .stride = 20, .query_factors = tables.data() + 18});
        RotaryArgs part = slice(args, 2, batch, 4, 6);
        EXPECT_EQ(part.choice.index, nullptr);
        EXPECT_EQ(part.choice.count, batch);
        EXPECT_EQ(part.choice.stride, 20);
        EXPECT_EQ(part.table, tables.data() + 2 * 20);
        EXPECT_EQ(part.positions.row_of_pair, tables.data() + 2 * 20 + 9);
        EXPECT_EQ(part.positions.rows, 3);
        EXPECT_EQ(part.positions.row_stride, 160);
        EXPECT_EQ(part.choice.query_factors, tables.data() + 2 * 20 + 18);

        args.positions.row_of_pair = nullptr;
        args.choice.query_factors = nullptr;
        part = slice(args, 2, batch, 4, 6);
        EXPECT_EQ(part.table, tables.data() + 2 * 20);
        EXPECT_EQ(part.positions.row_of_pair, nullptr);
        EXPECT_EQ(part.choice.query_factors, nullptr);
    }
}

TEST(Slice, LeavesTheOnlyTableWhereItIs) {
    const std::vector<uint64_t> tables(20);
    const RotaryArgs part = slice(args_with_choice(tables.data(), {.count = 1, .stride = 20}), 2, 3, 4, 6);
    EXPECT_EQ(part.choice.count, 1);
    EXPECT_EQ(part.table, tables.data());
    EXPECT_EQ(part.positions.row_of_pair, tables.data() + 9);
}

}  // namespace
}  // namespace mrrope
