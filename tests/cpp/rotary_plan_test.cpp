#include "rotary_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "devices.h"
#include "elements.h"
#include "every_plan.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int64_t max_threads = std::numeric_limits<int32_t>::max();

template <class F>
void for_each_shape(F&& f) {
    for (const int heads : {1, 2, 3, 4, 5, 7, 8, 40, 71, 72}) {
        for (const int head_dim : {2, 4, 6, 16, 30, 64, 80, 96, 100, 128, 192, 256, 512}) {
            for (const int rotary_dim : {2, 16, head_dim / 4 * 2, head_dim - 2, head_dim}) {
                if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2 != 0) continue;
                for (const int element_size : {2, 4, 8}) {
                    for (const int alignment : {element_size, 16}) {
                        for (const int64_t batch : {int64_t{1}, int64_t{3}, int64_t{1} << 20}) {
                            for (const int64_t tokens :
                                 {int64_t{0}, int64_t{1}, int64_t{17}, int64_t{4096}, int64_t{131072},
                                  (int64_t{1} << 31) - 1, int64_t{1} << 31, int64_t{1} << 33}) {
                                if (batch * tokens > int64_t{1} << 40) continue;  // more than fits in memory
                                f(RotaryShape{.batch = batch,
                                              .tokens = tokens,
                                              .heads = heads,
                                              .head_dim = head_dim,
                                              .rotary_dim = rotary_dim,
                                              .element_size = element_size,
                                              .alignment = alignment});
                                if (::testing::Test::HasFailure()) return;
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(HeadSplit, HasVectorsOf16BytesButForFloat64) {
    EXPECT_EQ(full_vector(2), 8);
    EXPECT_EQ(full_vector(4), 4);
    EXPECT_EQ(full_vector(8), 1);
}

int count(const RotaryKernels& kernels, const RotaryKernel& kernel) {
    return static_cast<int>(std::count(kernels.begin(), kernels.end(), kernel));
}

TEST(Kernels, AreListedOnce) {
    for (const int element_size : {2, 4, 8}) {
        for (const RotaryKernels& kernels : {rotary_kernels(element_size), rotary_cos_sin_kernels(element_size)}) {
            ASSERT_LE(kernels.count, static_cast<int>(std::size(kernels.of)));
            for (const RotaryKernel& kernel : kernels) EXPECT_EQ(count(kernels, kernel), 1);
        }
    }
    EXPECT_EQ(rotary_kernels(2).count, 41) << "of a 16-bit dtype; a wheel has them for two dtypes and seven GPUs";
    EXPECT_EQ(rotary_kernels(4).count, 18);
    EXPECT_EQ(rotary_kernels(8).count, 2);
}

// Every pairing, alignment, lookup and table, of both ops: a plan without a kernel would throw at its launch.
TEST(Kernels, ServeEveryShape) {
    for_each_shape([&](RotaryShape shape) {
        if (shape.batch > 1 || (shape.tokens != 1 && shape.tokens != 4096) || shape.alignment < 16) return;
        for (const int alignment : {0, 2, 4, 8, 16}) {
            shape.alignment = std::max(alignment, alignment > 0 ? shape.element_size : 0);
            for (const Pairing pairing : both_pairings) {
                shape.pairing = pairing;
                for (const TableLookup lookup :
                     {TableLookup::single, TableLookup::indexed, TableLookup::position_rows}) {
                    shape.lookup = lookup;
                    for (const int tables : {0, 1, shape.heads}) {  // 0: one, with query factors
                        shape.has_query_factors = tables == 0;
                        shape.table_heads = std::max(1, tables);
                        for (const bool copies_tail : {false, shape.rotary_dim < shape.head_dim}) {
                            shape.copies_tail = copies_tail;
                            const RotaryPlan planned = plan(shape, h200);
                            ASSERT_TRUE(serves(planned, shape)) << describe(shape);
                            ASSERT_EQ(count(rotary_kernels(shape.element_size), planned), 1) << describe(shape);
                        }
                    }
                }
                shape.lookup = TableLookup::single;
                shape.table_heads = 1;
                const RotaryKernels kernels = rotary_cos_sin_kernels(shape.element_size);
                ASSERT_EQ(count(kernels, plan(shape, h200, kernels)), 1) << describe(shape);
            }
        }
    });
}

TEST(Kernels, OfAnyShapeAreTheLastResort) {
    for_each_shape([&](const RotaryShape& shape) {
        const int half = shape.rotary_dim / 2;
        const int tail = shape.head_dim - shape.rotary_dim;
        const int shortest = shape.element_size == 2 ? 2 : 8 / shape.element_size;  // components of a vector
        const bool has_vectors = shape.element_size <= 4 && shortest * shape.element_size <= shape.alignment &&
                                 half % shortest == 0 && tail % shortest == 0;
        const bool has_one_table_kernel = shape.element_size == 2;  // by single components
        EXPECT_EQ(plan(shape, h200).any_shape, !has_vectors && !has_one_table_kernel) << describe(shape);
    });
}

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for_each_shape([&](const RotaryShape& shape) {
        SCOPED_TRACE(describe(shape));
        const RotaryPlan planned = plan(shape, h200);
        const int full = full_vector(shape.element_size);
        const int half = shape.rotary_dim / 2;
        EXPECT_EQ(planned.lanes * planned.vector, half);
        EXPECT_GE(planned.heads_per_thread, 1);
        EXPECT_LE(planned.heads_per_thread, planned.vector == full && full > 1 ? 3 : 1) << "with one table";
        EXPECT_GE(planned.head_groups * planned.heads_per_thread, shape.heads);
        EXPECT_LT((planned.head_groups - 1) * planned.heads_per_thread, shape.heads);
        // Thread indices of the last block exceed the last thread's, and must fit in 32 bits, too.
        EXPECT_LE(planned.tokens_per_launch * planned.threads_per_token() + rotary_block_threads, max_threads);
        const int64_t all_tokens = shape.batch * shape.tokens;
        EXPECT_LE(planned.tokens_per_launch, all_tokens);
        EXPECT_EQ(planned.tokens_per_launch == 0, all_tokens == 0);
        if (planned.tokens_per_launch < all_tokens) {
            EXPECT_LE(planned.tokens_per_launch, shape.tokens) << "a slice lies in one sequence";
        }
    });
}

TEST(Plan, LaunchesAsManyTokensAsFit) {
    for_each_shape([&](const RotaryShape& shape) {
        const RotaryPlan planned = plan(shape, h200);
        const int64_t all_tokens = shape.batch * shape.tokens;
        if (planned.tokens_per_launch == all_tokens || planned.tokens_per_launch == shape.tokens) return;
        EXPECT_GT((planned.tokens_per_launch + 1) * planned.threads_per_token() + rotary_block_threads, max_threads)
            << describe(shape);
    });
}

TEST(Plan, GivesAThreadOneHeadInSmallLaunches) {
    RotaryShape shape{
        .batch = 1, .tokens = 1, .heads = 40, .head_dim = 128, .rotary_dim = 128, .element_size = 2, .alignment = 16};
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 1);
    shape.tokens = 131072;
    EXPECT_GT(plan(shape, h200).heads_per_thread, 1);
    shape.heads = 1;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 2) << "no kernel takes one head by full vectors";
}

TEST(Plan, DividesFewHeadsEvenly) {
    RotaryShape shape{
        .batch = 1, .tokens = 131072, .head_dim = 128, .rotary_dim = 128, .element_size = 2, .alignment = 16};
    for (const auto& [heads, heads_per_thread] : {std::pair{2, 2}, {3, 3}, {4, 2}, {5, 3}, {6, 2}, {9, 2}, {40, 2}}) {
        shape.heads = heads;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, heads_per_thread) << heads;
    }
    shape.heads = 5;
    shape.pairing = Pairing::interleaved;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 2);
    shape.alignment = 2;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 1);
}

// One of 16-bit heads alone; others look the only table up.
TEST(Plan, OfHeadsWithTablesOfTheirOwn) {
    RotaryShape shape{.batch = 1,
                      .tokens = 8192,
                      .heads = 40,
                      .head_dim = 128,
                      .rotary_dim = 128,
                      .element_size = 2,
                      .alignment = 16,
                      .has_query_factors = true};
    EXPECT_EQ(plan(shape, h200).lookup, TableLookup::single);
    shape.pairing = Pairing::interleaved;
    EXPECT_EQ(plan(shape, h200).lookup, TableLookup::indexed);
    EXPECT_EQ(plan(shape, h200).vector, 8);
    shape.lookup = TableLookup::position_rows;
    EXPECT_TRUE(plan(shape, h200).any_shape);
    shape.pairing = Pairing::halves;
    EXPECT_EQ(plan(shape, h200).vector, 8);
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 2);
    shape.tokens = 1;
    EXPECT_EQ(plan(shape, h200).vector, 8) << "the only kernel for position rows and tables per head";
}

TEST(Plan, FollowsMemoryInLargeLaunches) {
    RotaryShape shape{.batch = 1,
                      .tokens = 8192,
                      .heads = 40,
                      .head_dim = 128,
                      .rotary_dim = 128,
                      .element_size = 2,
                      .alignment = 16};
    EXPECT_FALSE(plan(shape, h200).tokens_inside);
    shape.tokens_adjacent = true;
    EXPECT_TRUE(plan(shape, h200).tokens_inside);
    shape.tokens = 64;
    EXPECT_FALSE(plan(shape, h200).tokens_inside);
}

TEST(Plan, TellsAdjacentTokensByStrides) {
    RotaryArgs args;
    args.q.heads = 4;
    args.k.heads = 2;
    for (const auto& [token, head, adjacent] : {std::tuple{64, 6400, true}, {256, 64, false}, {-64, 6400, true}}) {
        for (HeadsView* view : {&args.q, &args.k}) {
            view->in_strides = view->out_strides = {.token = token, .head = head};
        }
        EXPECT_EQ(shape_of(args).tokens_adjacent, adjacent) << token << " " << head;
    }
    args.k.out_strides = {.token = 256, .head = 64};
    args.q.in_strides = args.q.out_strides = args.k.in_strides = {.token = 64, .head = 6400};
    EXPECT_FALSE(shape_of(args).tokens_adjacent) << "k is written otherwise";
    args.k.heads = 1;
    EXPECT_TRUE(shape_of(args).tokens_adjacent) << "one head is far from no other";
}

TEST(Plan, CopiesTailsByLanesOfTheirOwn) {
    RotaryShape shape{.batch = 1,
                      .tokens = 1,
                      .heads = 40,
                      .head_dim = 128,
                      .rotary_dim = 32,
                      .element_size = 2,
                      .alignment = 16,
                      .copies_tail = true};
    for (const int64_t tokens : {1, 64, 8192}) {
        shape.tokens = tokens;
        const RotaryPlan planned = plan(shape, h200);
        EXPECT_TRUE(planned.whole_heads);
        EXPECT_EQ(planned.lanes * planned.vector * 2, shape.head_dim);
        EXPECT_LE(planned.tokens_per_launch * planned.threads_per_token() + rotary_block_threads, max_threads);
    }
    shape.copies_tail = false;
    EXPECT_FALSE(plan(shape, h200).whole_heads) << "in place the tail stays where it is";
    shape.copies_tail = true;
    shape.rotary_dim = 112;
    EXPECT_TRUE(plan(shape, h200).whole_heads);
    shape.head_dim = 120;  // a tail of one vector
    EXPECT_FALSE(plan(shape, h200).whole_heads);
    shape.head_dim = 128;
    shape.alignment = 8;
    EXPECT_FALSE(plan(shape, h200).whole_heads);
}

TEST(Plan, UsesLongerVectorsForMoreTokens) {
    RotaryShape shape{.batch = 1, .heads = 8, .element_size = 2, .alignment = 16};
    for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
        shape.head_dim = shape.rotary_dim = head_dim;
        for (const auto& [tokens, vector] : {std::pair{1, 1}, {200, 4}, {8192, 8}}) {
            shape.tokens = tokens;
            EXPECT_EQ(plan(shape, h200).vector, vector) << head_dim << " " << tokens;
        }
    }
    shape.tokens = 8192;
    for (const auto& [head_dim, vector] : {std::pair{120, 4}, {100, 2}, {72, 4}, {90, 1}}) {
        shape.head_dim = shape.rotary_dim = head_dim;
        shape.alignment = 8;
        EXPECT_EQ(plan(shape, h200).vector, vector) << head_dim;
    }
}

TEST(Plan, DividesTheHeadsOfATable) {
    const auto planned = [](int heads, int table_heads, int64_t tokens, const Device& device = h200) {
        return plan({.batch = 1,
                     .tokens = tokens,
                     .heads = heads,
                     .head_dim = 128,
                     .rotary_dim = 128,
                     .element_size = 2,
                     .alignment = 16,
                     .table_heads = table_heads},
                    device);
    };
    for (const auto& [heads, tables, heads_per_thread, groups] : {std::tuple{40, 8, 3, 16},
                                                                  {12, 3, 2, 6},
                                                                  {16, 8, 2, 8},
                                                                  {8, 8, 2, 8},
                                                                  {24, 8, 3, 8},
                                                                  {42, 6, 2, 24},
                                                                  {72, 8, 3, 24}}) {
        const RotaryPlan large = planned(heads, tables, 1 << 17);
        EXPECT_EQ(large.heads_per_thread, heads_per_thread) << heads << " heads of " << tables << " tables";
        EXPECT_EQ(large.head_groups, groups) << heads << " heads of " << tables << " tables";
        const RotaryPlan small = planned(heads, tables, 1);
        EXPECT_EQ(small.heads_per_thread, 1);
        EXPECT_EQ(small.head_groups, heads) << "no thread more than with one table";
    }
    // One thread takes all heads of a table in at most half a wave of 4 blocks of 128 threads per SM, or in nine tenths
    // of one or more. A token of 8 tables and 8 lanes is half a block: 1056 tokens fill 132 SMs, 864 fill 108.
    for (const auto& [device, tokens, heads_per_thread, groups] : {std::tuple{h200, 256, 5, 8},
                                                                   {h200, 528, 5, 8},
                                                                   {h200, 529, 3, 16},
                                                                   {h200, 768, 3, 16},
                                                                   {h200, 1024, 5, 8},
                                                                   {h200, 1056, 5, 8},
                                                                   {h200, 1057, 3, 16},
                                                                   {a100, 864, 5, 8},
                                                                   {a100, 865, 3, 16},
                                                                   {Device{.sms = 12}, 256, 3, 16}}) {
        const RotaryPlan middle = planned(40, 8, tokens, device);
        EXPECT_EQ(middle.heads_per_thread, heads_per_thread) << tokens << " tokens on " << device.sms << " SMs";
        EXPECT_EQ(middle.head_groups, groups) << tokens << " tokens on " << device.sms << " SMs";
    }
    EXPECT_EQ(planned(5, 1, 1 << 12).heads_per_thread, 3) << "instantiated with head tables only";
    // An even number of heads goes by two from 3 * 2^14 threads on, 12 heads of 8 lanes from 512 tokens on.
    for (const auto& [tables, tokens, heads_per_thread, vector] :
         {std::tuple{3, 511, 1, 4}, {3, 512, 2, 8}, {1, 512, 1, 4}, {4, 512, 1, 4}, {12, 512, 1, 4}}) {
        const RotaryPlan middle = planned(12, tables, tokens);
        EXPECT_EQ(middle.heads_per_thread, heads_per_thread) << tables << " tables, " << tokens << " tokens";
        EXPECT_EQ(middle.vector, vector) << tables << " tables, " << tokens << " tokens";
    }
}

RotaryArgs aligned_args(DType dtype) {
    RotaryArgs args;
    args.batch = 2;
    args.tokens = 3;
    args.head_dim = 64;
    args.rotary_dim = 32;
    args.dtype = dtype;
    uintptr_t at = 1 << 20;
    for (HeadsView* view : {&args.q, &args.k}) {
        view->in = reinterpret_cast<void*>(at += 4096);
        view->out = reinterpret_cast<void*>(at += 4096);
        view->heads = 2;
        view->in_strides = view->out_strides = {.batch = 1024, .token = 128, .head = 64};
    }
    return args;
}

TEST(Alignment, OfEveryHeadIsDetected) {
    for (const DType dtype : all_dtypes) {
        const RotaryShape shape = shape_of(aligned_args(dtype));
        EXPECT_EQ(shape.alignment, 16);
        EXPECT_EQ(shape.batch, 2);
        EXPECT_EQ(shape.tokens, 3);
        EXPECT_EQ(shape.heads, 4);
        EXPECT_EQ(shape.head_dim, 64);
        EXPECT_EQ(shape.rotary_dim, 32);
        EXPECT_EQ(shape.element_size, size_of(dtype));
    }
}

TEST(Alignment, IsLostByOneElementAnywhere) {
    for (const DType dtype : all_dtypes) {
        const int element = size_of(dtype);
        const auto moved = [&](const void* pointer) {
            return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + element);
        };
        for (HeadsView RotaryArgs::* const side : {&RotaryArgs::q, &RotaryArgs::k}) {
            RotaryArgs args = aligned_args(dtype);
            (args.*side).in = moved((args.*side).in);
            EXPECT_EQ(shape_of(args).alignment, element) << name_of(dtype);
            args = aligned_args(dtype);
            (args.*side).out = moved((args.*side).out);
            EXPECT_EQ(shape_of(args).alignment, element) << name_of(dtype);
            for (HeadStrides HeadsView::* const strides : {&HeadsView::in_strides, &HeadsView::out_strides}) {
                for (int64_t HeadStrides::* const stride :
                     {&HeadStrides::batch, &HeadStrides::token, &HeadStrides::head}) {
                    args = aligned_args(dtype);
                    args.*side.*strides.*stride += 1;
                    EXPECT_EQ(shape_of(args).alignment, element) << name_of(dtype);
                    args.*side.*strides.*stride += 16 / element - 1;
                    EXPECT_EQ(shape_of(args).alignment, 16) << name_of(dtype);
                }
            }
        }
    }
}

TEST(Alignment, OfAbsentKeysDoesNotMatter) {
    RotaryArgs args = aligned_args(DType::float32);
    args.k = {};
    args.k.in_strides = {.batch = 1, .token = 1, .head = 1};
    EXPECT_EQ(shape_of(args).alignment, 16);
    EXPECT_EQ(shape_of(args).heads, 2);
}

}  // namespace
}  // namespace mrrope
