#include "rotary_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "devices.h"
#include "every_plan.h"
#include "kernel_lanes.h"
#include "launch_slices.h"
#include "rotary_case.h"
#include "rotary_map.h"
#include "rotary_schedule.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int64_t max_threads = std::numeric_limits<int32_t>::max();

std::string describe(const RotaryShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.heads) + " head_dim " + std::to_string(s.head_dim) + " rotary_dim " +
           std::to_string(s.rotary_dim) + " element " + std::to_string(s.element_size) +
           (s.aligned ? " aligned" : " unaligned") +
           (s.table_heads == 1 ? "" : " head tables " + std::to_string(s.table_heads));
}

// q and k with this many heads, one after the other: the head with this number through q and then k starts at
// `components_per_head` times its number.
RotaryArgs contiguous_args(float* memory, int q_heads, int k_heads, int64_t components_per_head) {
    const HeadStrides strides{.head = components_per_head};
    float* k = memory + q_heads * components_per_head;
    RotaryArgs args;
    args.q = {.in = memory, .out = memory, .heads = q_heads, .in_strides = strides, .out_strides = strides};
    args.k = {.in = k, .out = k, .heads = k_heads, .in_strides = strides, .out_strides = strides};
    return args;
}

// --- invariants of every plan

template <class F>
void for_each_shape(F&& f) {
    for (const int heads : {1, 2, 3, 4, 5, 7, 8, 40, 71, 72}) {
        for (const int head_dim : {2, 4, 6, 16, 30, 64, 80, 96, 100, 128, 192, 256, 512}) {
            for (const int rotary_dim : {2, 16, head_dim / 4 * 2, head_dim - 2, head_dim}) {
                if (rotary_dim < 2 || rotary_dim > head_dim || rotary_dim % 2 != 0) continue;
                for (const int element_size : {2, 4, 8}) {
                    for (const bool aligned : {false, true}) {
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
                                              .aligned = aligned});
                                if (::testing::Test::HasFailure()) return;
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for_each_shape([&](const RotaryShape& shape) {
        SCOPED_TRACE(describe(shape));
        const RotaryPlan planned = plan(shape, h200);
        const int full_vector = 16 / shape.element_size;
        const int half = shape.rotary_dim / 2;
        const int tail = shape.head_dim - shape.rotary_dim;
        const bool may_use_vectors = shape.aligned && half % full_vector == 0 && tail % full_vector == 0;
        if (!may_use_vectors) {
            EXPECT_EQ(planned.vector, 1);
        } else if (planned.vector != full_vector) {
            EXPECT_TRUE(planned.vector == full_vector / 2 || planned.vector == 1) << planned.vector;
            EXPECT_EQ(planned.heads_per_thread, 1) << "the only instantiations with short vectors";
        }
        EXPECT_EQ(planned.lanes * planned.vector, half);
        EXPECT_GE(planned.heads_per_thread, 1);
        EXPECT_LE(planned.heads_per_thread, planned.vector == full_vector && full_vector > 1 ? 3 : 2);
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

TEST(Plan, SpeculatesOnTheTableIndexInSmallLaunches) {
    const auto speculates = [](int64_t batch, int64_t tokens, int heads, const Device& device = h200) {
        return plan({.batch = batch,
                     .tokens = tokens,
                     .heads = heads,
                     .head_dim = 128,
                     .rotary_dim = 128,
                     .element_size = 2,
                     .aligned = true},
                    device)
            .speculates_table;
    };
    // Two heads per thread, 8 lanes per head.
    EXPECT_TRUE(speculates(1, 8192, 72));    // 8192 * 36 * 8 threads
    EXPECT_FALSE(speculates(2, 16384, 40));  // 2 * 16384 * 20 * 8
    // Three heads per thread.
    EXPECT_TRUE(speculates(1, 65536, 5));    // 65536 * 2 * 8
    EXPECT_FALSE(speculates(1, 131072, 5));  // 131072 * 2 * 8
    EXPECT_FALSE(speculates(1, 16, 40, a100)) << "no PDL, nothing to overlap with";
}

TEST(Plan, GivesAThreadOneHeadInSmallLaunches) {
    RotaryShape shape{
        .batch = 1, .tokens = 1, .heads = 40, .head_dim = 128, .rotary_dim = 128, .element_size = 2, .aligned = true};
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 1);
    shape.tokens = 131072;
    EXPECT_GT(plan(shape, h200).heads_per_thread, 1);
    shape.heads = 1;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 1);
}

TEST(Plan, DividesFewHeadsEvenly) {
    RotaryShape shape{
        .batch = 1, .tokens = 131072, .head_dim = 128, .rotary_dim = 128, .element_size = 2, .aligned = true};
    for (const auto& [heads, heads_per_thread] : {std::pair{2, 2}, {3, 3}, {4, 2}, {5, 3}, {6, 2}, {9, 2}, {40, 2}}) {
        shape.heads = heads;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, heads_per_thread) << heads;
    }
    shape.heads = 5;
    shape.aligned = false;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 2);
}

TEST(Plan, UsesTheOnlyInstantiationForPositionRows) {
    for_each_shape([&](RotaryShape shape) {
        shape.with_rows = true;
        const RotaryPlan planned = plan(shape, h200);
        EXPECT_EQ(planned.heads_per_thread, heads_per_thread_with_rows) << describe(shape);
        EXPECT_TRUE(planned.vector == 1 || planned.vector == 16 / shape.element_size) << describe(shape);
        EXPECT_EQ(planned.head_groups, (shape.heads + heads_per_thread_with_rows - 1) / heads_per_thread_with_rows);
    });
}

TEST(Plan, FollowsMemoryInLargeLaunches) {
    RotaryShape shape{.batch = 1,
                      .tokens = 8192,
                      .heads = 40,
                      .head_dim = 128,
                      .rotary_dim = 128,
                      .element_size = 2,
                      .aligned = true};
    EXPECT_FALSE(plan(shape, h200).tokens_inside);
    shape.tokens_adjacent = true;
    EXPECT_TRUE(plan(shape, h200).tokens_inside);
    shape.tokens = 64;
    EXPECT_FALSE(plan(shape, h200).tokens_inside);
}

TEST(Plan, TellsAdjacentTokensByStrides) {
    float memory[1] = {};
    RotaryArgs args = contiguous_args(memory, 4, 2, 64);
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
                      .aligned = true,
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
    shape.aligned = false;
    EXPECT_FALSE(plan(shape, h200).whole_heads);
}

TEST(Plan, FastHeadDimsUseLongerVectorsForMoreTokens) {
    for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
        for (const auto& [tokens, vector] : {std::pair{1, 1}, {200, 4}, {8192, 8}}) {
            const RotaryPlan planned = plan({.batch = 1,
                                             .tokens = tokens,
                                             .heads = 8,
                                             .head_dim = head_dim,
                                             .rotary_dim = head_dim,
                                             .element_size = 2,
                                             .aligned = true},
                                            h200);
            EXPECT_EQ(planned.vector, vector) << head_dim << " " << tokens;
        }
    }
}

// --- schedule of the kernel

constexpr TableLookup all_lookups[] = {TableLookup::single, TableLookup::speculative, TableLookup::indexed,
                                       TableLookup::position_rows};

TEST(Schedule, IsPlainWithoutPdl) {
    for (const TableLookup lookup : all_lookups) {
        for (const int heads : {1, 2, 3, 5}) {
            const RotarySchedule schedule = rotary_schedule(lookup, heads, /*pdl=*/false);
            EXPECT_FALSE(schedule.speculates_index);
            EXPECT_FALSE(schedule.orders_verification_last);
            EXPECT_FALSE(schedule.prefetches_positions);
            EXPECT_TRUE(schedule.loads_heads_before_table);
        }
    }
}

TEST(Schedule, TriggersAfterTheWaitInSmallLaunches) {
    using Trigger = RotarySchedule::Trigger;
    for (const TableLookup lookup : all_lookups) {
        EXPECT_EQ(rotary_schedule(lookup, 1, true).trigger, Trigger::after_wait);
        for (const int heads : {2, 3, 5}) {
            EXPECT_EQ(rotary_schedule(lookup, heads, true).trigger,
                      lookup == TableLookup::speculative ? Trigger::after_wait_if_small : Trigger::after_cos_sin);
        }
    }
}

TEST(Schedule, LoadsHeadsWhileAnIndexIsInFlight) {
    for (const TableLookup lookup : all_lookups) {
        EXPECT_EQ(rotary_schedule(lookup, 1, true).loads_heads_before_table, lookup == TableLookup::indexed);
        EXPECT_EQ(rotary_schedule(lookup, 1, true).speculates_index, lookup == TableLookup::speculative);
    }
}

TEST(Schedule, PrefetchesPositionsInLargeLaunches) {
    for (const TableLookup lookup : all_lookups) {
        const bool is_plain = lookup == TableLookup::single || lookup == TableLookup::indexed;
        EXPECT_FALSE(rotary_schedule(lookup, 1, true).prefetches_positions);
        EXPECT_EQ(rotary_schedule(lookup, 2, true).prefetches_positions, is_plain);
        EXPECT_TRUE(rotary_schedule(lookup, 3, true).prefetches_positions);
        EXPECT_FALSE(rotary_schedule(lookup, heads_of_whole_table, true).prefetches_positions) << "one wave";
    }
}

// --- thread-to-element map of the kernel

// Counts how often each component is rotated or copied, over all threads of a launch, and expects every head's table.
class Coverage {
public:
    Coverage(const RotaryShape& shape, const RotaryPlan& plan, Pairing pairing, int q_heads)
        : shape_(shape),
          plan_(plan),
          pairing_(pairing),
          args_(contiguous_args(memory_, q_heads, shape.heads - q_heads, 1)),
          map_(RotaryMap<PlainDivmod>::of(plan, shape.tokens)),
          head_groups_(HeadGroupsMap<PlainDivmod>::of(plan, args_)),
          touched_(shape.batch * shape.tokens * shape.heads * shape.head_dim) {}

    void run() {
        const int64_t threads = shape_.batch * shape_.tokens * plan_.threads_per_token();
        with_pairing_and_vector(pairing_, plan_.vector, [&]<Pairing pairing, int Vector>() {
            for (int64_t thread = 0; thread < threads; ++thread) run<pairing, Vector>(static_cast<int>(thread));
        });
    }

    void expect_each_component_once() const {
        for (size_t i = 0; i < touched_.size(); ++i) {
            ASSERT_EQ(touched_[i], 1) << "component " << i % shape_.head_dim << " of head "
                                      << i / shape_.head_dim % shape_.heads;
        }
    }

private:
    template <Pairing pairing, int Vector>
    void run(int thread) {
        const RotaryPlace place =
            plan_.tokens_inside ? map_.template place<true>(thread) : map_.template place<false>(thread);
        const int half = shape_.rotary_dim / 2;
        const WholeHeadLayout<pairing, Vector> layout{place.lane, half};
        int group = place.group;
        const HeadsOfTable of_table = head_groups_.table_of(group);
        const HeadRange heads(group, plan_.heads_per_thread, of_table.count());
        ASSERT_GE(heads.count, 1) << "an idle thread";
        for (int number = heads.first; number < heads.first + heads.count; ++number) {
            const auto head = static_cast<int>(HeadPointers<float>(args_, of_table, 0, 0, number).out - memory_);
            expect_table(head, of_table.table);
            const auto touch_component = [&](int at) { touch(place, head, at); };
            if (layout.rotates()) {
                rotate_components<pairing, Vector>(layout.rotated, half, touch_component);
            } else {
                ASSERT_TRUE(plan_.whole_heads);
                for (const int first : {layout.first(), layout.second()}) {
                    ASSERT_EQ(first % Vector, 0) << "an unaligned access";
                    for (int j = 0; j < Vector; ++j) touch_component(first + j);
                }
            }
            for (int at = plan_.whole_heads ? shape_.head_dim
                                            : first_tail_component<Vector>(place.lane, shape_.rotary_dim);
                 at < shape_.head_dim; at += tail_step<Vector>(map_.lanes.divisor)) {
                ASSERT_EQ(at % Vector, 0) << "an unaligned access";
                for (int j = 0; j < Vector; ++j) touch_component(at + j);
            }
        }
    }

    // Head h of n uses table h / (n / tables).
    void expect_table(int head, int table) const {
        const bool is_q = head < args_.q.heads;
        const int heads = is_q ? args_.q.heads : args_.k.heads;
        ASSERT_EQ(table, (is_q ? head : head - args_.q.heads) / (heads / shape_.table_heads)) << "head " << head;
    }

    void touch(const RotaryPlace& place, int head, int component) {
        ASSERT_LT(component, shape_.head_dim);
        const int64_t token = place.batch * shape_.tokens + place.token;
        ++touched_.at((token * shape_.heads + head) * shape_.head_dim + component);
    }

    RotaryShape shape_;
    RotaryPlan plan_;
    Pairing pairing_;
    float memory_[128] = {};
    RotaryArgs args_;
    RotaryMap<PlainDivmod> map_;
    HeadGroupsMap<PlainDivmod> head_groups_;
    std::vector<int> touched_;
};

// Heads are numbered through q and then k.
TEST(Kernel, AddressesHeadsOfQAndThenOfK) {
    std::vector<float> q_in(1000), q_out(1000), k_in(1000), k_out(1000);
    RotaryArgs args;
    args.q = {.in = q_in.data(),
              .out = q_out.data(),
              .heads = 3,
              .in_strides = {.batch = 100, .token = 20, .head = 5},
              .out_strides = {.batch = 200, .token = 7, .head = 2}};
    args.k = {.in = k_in.data(),
              .out = k_out.data(),
              .heads = 2,
              .in_strides = {.batch = 50, .token = 10, .head = 4},
              .out_strides = {.batch = 80, .token = 9, .head = 1}};
    for (int head = 0; head < 5; ++head) {
        const HeadPointers<float> pointers(args, {0, 3, 2}, 2, 3, head);
        if (head < 3) {
            EXPECT_EQ(pointers.in, q_in.data() + 2 * 100 + 3 * 20 + head * 5);
            EXPECT_EQ(pointers.out, q_out.data() + 2 * 200 + 3 * 7 + head * 2);
        } else {
            EXPECT_EQ(pointers.in, k_in.data() + 2 * 50 + 3 * 10 + (head - 3) * 4);
            EXPECT_EQ(pointers.out, k_out.data() + 2 * 80 + 3 * 9 + (head - 3));
        }
    }
}

TEST(Kernel, GivesEveryHeadItsTable) {
    for (const auto& [tables, q_per_table, k_per_table] :
         {std::tuple{1, 4, 1}, {2, 1, 0}, {2, 1, 1}, {3, 3, 1}, {8, 4, 1}, {3, 2, 3}, {4, 5, 2}, {2, 3, 0}}) {
        for (const int head_dim : {6, 16, 64, 128}) {
            for (const int element_size : {2, 4, 8}) {
                for (const bool with_rows : {false, true}) {
                    const RotaryShape shape{.batch = 2,
                                            .tokens = 3,
                                            .heads = tables * (q_per_table + k_per_table),
                                            .head_dim = head_dim,
                                            .rotary_dim = head_dim == 128 ? 64 : head_dim,
                                            .element_size = element_size,
                                            .aligned = true,
                                            .with_rows = with_rows,
                                            .table_heads = tables};
                    SCOPED_TRACE(describe(shape));
                    for (const RotaryPlan& plan : every_plan(shape, true)) {
                        Coverage kernel(shape, plan, Pairing::halves, tables * q_per_table);
                        kernel.run();
                        kernel.expect_each_component_once();
                        if (HasFailure()) return;
                    }
                }
            }
        }
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
                     .aligned = true,
                     .table_heads = table_heads},
                    device);
    };
    for (const auto& [heads, tables, heads_per_thread, groups] : {std::tuple{40, 8, 3, 16},
                                                                  {12, 3, 2, 6},
                                                                  {16, 8, 2, 8},
                                                                  {8, 8, 1, 8},
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

// Single components and float64 included.
TEST(Plan, WithHeadTablesHasAKernelForEveryShape) {
    for (const int heads : {2, 3, 4, 5, 6, 7, 9, 10}) {
        for (const int head_dim : {6, 64, 80, 128}) {
            for (const int element_size : {2, 4, 8}) {
                for (const bool aligned : {false, true}) {
                    for (const bool with_rows : {false, true}) {
                        for (int64_t tokens = 1; tokens < 1 << 20; tokens *= 2) {
                            const RotaryShape shape{.batch = 1,
                                                    .tokens = tokens,
                                                    .heads = 8 * heads,
                                                    .head_dim = head_dim,
                                                    .rotary_dim = head_dim,
                                                    .element_size = element_size,
                                                    .aligned = aligned,
                                                    .with_rows = with_rows,
                                                    .table_heads = 8};
                            const RotaryPlan planned = plan(shape, h200);
                            const auto is_that_plan = [&](const RotaryPlan& one) {
                                return one.vector == planned.vector && one.heads_per_thread == planned.heads_per_thread;
                            };
                            const std::vector<RotaryPlan> instantiated = every_plan(shape, false);
                            EXPECT_TRUE(std::any_of(instantiated.begin(), instantiated.end(), is_that_plan))
                                << describe(shape) << ": " << mrrope::testing::describe(planned);
                        }
                    }
                }
            }
        }
    }
}

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for (const int heads : {1, 2, 3, 4, 5, 6, 7, 9, 40, 72}) {
        for (const int head_dim : {2, 4, 6, 10, 16, 24, 32, 48, 64, 80, 96, 100, 128, 192, 256, 512}) {
            for (const int rotary_dim : {2, 16, 32, head_dim / 4 * 2, head_dim - 2, head_dim}) {
                if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                for (const int element_size : {2, 4, 8}) {
                    for (const bool aligned : {false, true}) {
                        const RotaryShape shape{.batch = 2,
                                                .tokens = heads > 9 ? 1 : 3,
                                                .heads = heads,
                                                .head_dim = head_dim,
                                                .rotary_dim = rotary_dim,
                                                .element_size = element_size,
                                                .aligned = aligned};
                        for (const RotaryPlan& plan : every_plan(shape, false)) {
                            for (const Pairing pairing : both_pairings) {
                                SCOPED_TRACE(describe(shape));
                                Coverage kernel(shape, plan, pairing, (heads + 1) / 2);
                                kernel.run();
                                kernel.expect_each_component_once();
                                if (HasFailure()) return;
                            }
                        }
                    }
                }
            }
        }
    }
}

// --- launches

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
                                 .token_stride = token_stride};
        const RotaryArgs part = slice(args_with_choice(tables.data(), choice), 2, 3, 4, 6);
        EXPECT_EQ(part.choice.index - index.data(), 2 * batch_stride + 4 * token_stride);
        EXPECT_EQ(part.choice.count, 5);
        EXPECT_EQ(part.choice.stride, 20);
        EXPECT_EQ(part.choice.batch_stride, batch_stride);
        EXPECT_EQ(part.choice.token_stride, token_stride);
        EXPECT_EQ(part.table, tables.data());
        EXPECT_EQ(part.positions.row_of_pair, tables.data() + 9);
    }
}

TEST(Slice, StepsThroughTheTablesOfSequences) {
    const std::vector<uint64_t> tables(160);
    for (const int64_t batch : {1, 3}) {
        RotaryArgs args = args_with_choice(tables.data(), {.count = 8, .stride = 20});
        RotaryArgs part = slice(args, 2, batch, 4, 6);
        EXPECT_EQ(part.choice.index, nullptr);
        EXPECT_EQ(part.choice.count, batch);
        EXPECT_EQ(part.choice.stride, 20);
        EXPECT_EQ(part.table, tables.data() + 2 * 20);
        EXPECT_EQ(part.positions.row_of_pair, tables.data() + 2 * 20 + 9);
        EXPECT_EQ(part.positions.rows, 3);
        EXPECT_EQ(part.positions.row_stride, 160);

        args.positions.row_of_pair = nullptr;
        part = slice(args, 2, batch, 4, 6);
        EXPECT_EQ(part.table, tables.data() + 2 * 20);
        EXPECT_EQ(part.positions.row_of_pair, nullptr);
    }
}

TEST(Slice, LeavesTheOnlyTableWhereItIs) {
    const std::vector<uint64_t> tables(20);
    const RotaryArgs part = slice(args_with_choice(tables.data(), {.count = 1, .stride = 20}), 2, 3, 4, 6);
    EXPECT_EQ(part.choice.count, 1);
    EXPECT_EQ(part.table, tables.data());
    EXPECT_EQ(part.positions.row_of_pair, tables.data() + 9);
}

// --- alignment

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
        EXPECT_TRUE(shape.aligned);
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
            EXPECT_FALSE(shape_of(args).aligned) << name_of(dtype);
            args = aligned_args(dtype);
            (args.*side).out = moved((args.*side).out);
            EXPECT_FALSE(shape_of(args).aligned) << name_of(dtype);
            for (HeadStrides HeadsView::* const strides : {&HeadsView::in_strides, &HeadsView::out_strides}) {
                for (int64_t HeadStrides::* const stride :
                     {&HeadStrides::batch, &HeadStrides::token, &HeadStrides::head}) {
                    args = aligned_args(dtype);
                    args.*side.*strides.*stride += 1;
                    EXPECT_FALSE(shape_of(args).aligned) << name_of(dtype);
                    args.*side.*strides.*stride += 16 / element - 1;
                    EXPECT_TRUE(shape_of(args).aligned) << name_of(dtype);
                }
            }
        }
    }
}

TEST(Alignment, OfAbsentKeysDoesNotMatter) {
    RotaryArgs args = aligned_args(DType::float32);
    args.k = {};
    args.k.in_strides = {.batch = 1, .token = 1, .head = 1};
    EXPECT_TRUE(shape_of(args).aligned);
    EXPECT_EQ(shape_of(args).heads, 2);
}

}  // namespace
}  // namespace mrrope
