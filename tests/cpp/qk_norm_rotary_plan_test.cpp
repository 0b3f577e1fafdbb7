#include "qk_norm_rotary_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices.h"
#include "every_norm_plan.h"
#include "kernel_lanes.h"
#include "qk_norm_rotary_case.h"
#include "qk_norm_rotary_map.h"
#include "rotary_map.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int warp = 32;

std::string describe(const QkNormRotaryShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.q_heads) + "+" + std::to_string(s.k_heads) + " head_dim " + std::to_string(s.head_dim) +
           " rotary_dim " + std::to_string(s.rotary_dim) + " element " + std::to_string(s.element_size) +
           (s.pairing == Pairing::halves ? " halves" : " interleaved") +
           (s.over == NormOver::head ? " over a head" : " over all heads") + (s.aligned ? " aligned" : " unaligned") +
           (s.needs_lookup ? " with lookup" : "") + " head tables " + std::to_string(s.table_heads);
}

template <class F>
void for_each_shape(const std::vector<std::pair<int, int>>& heads, const std::vector<int>& head_dims,
                    const std::vector<std::pair<int64_t, int64_t>>& sizes, F&& f) {
    for (const auto& [q_heads, k_heads] : heads) {
        for (const int head_dim : head_dims) {
            for (const int rotary_dim : {2, 16, 64, head_dim / 4 * 2, head_dim / 2 * 2}) {
                if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                for (const int element_size : {2, 4, 8}) {
                    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
                        for (int flags = 0; flags < 8; ++flags) {
                            for (const auto& [batch, tokens] : sizes) {
                                const QkNormRotaryShape shape{.batch = batch,
                                                              .tokens = tokens,
                                                              .q_heads = q_heads,
                                                              .k_heads = k_heads,
                                                              .head_dim = head_dim,
                                                              .rotary_dim = rotary_dim,
                                                              .element_size = element_size,
                                                              .pairing = both_pairings[flags / 4],
                                                              .over = over,
                                                              .aligned = flags % 2 == 1,
                                                              .needs_lookup = flags / 2 % 2 == 1};
                                SCOPED_TRACE(describe(shape));
                                f(shape);
                                if (::testing::Test::HasFailure()) return;
                            }
                        }
                    }
                }
            }
        }
    }
}

const std::vector<int> all_head_dims{2, 6, 16, 17, 32, 64, 72, 80, 96, 128, 192, 256, 512, 576, 1024};

// --- invariants of every plan

// That there is a kernel with a lookup, which runs all calls, and that heads fit it.
bool fits_registers(const QkNormRotaryShape& shape) {
    const int vector = 16 / shape.element_size;
    const bool has_general_kernel = has_norm_kernel(shape.element_size, shape.pairing, shape.over,
                                                    norm_heads_per_thread_with_lookup, /*needs_lookup=*/true);
    return has_general_kernel && shape.aligned && shape.rotary_dim / 2 % vector == 0 &&
           shape.head_dim % (2 * vector) == 0 && shape.head_dim / (2 * vector) <= warp;
}

void expect_lanes(const QkNormRotaryShape& shape, int lanes, int team) {
    EXPECT_EQ(lanes * 2 * (16 / shape.element_size), shape.head_dim);
    EXPECT_GE(team, lanes);
    EXPECT_LT(team, 2 * lanes);
    EXPECT_EQ(warp % team, 0);
}

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    const std::vector<std::pair<int64_t, int64_t>> sizes{{1, 0},
                                                         {1, 1},
                                                         {3, 17},
                                                         {1, 8192},
                                                         {1, 131072},
                                                         {int64_t{1} << 20, 5},
                                                         {1, int64_t{1} << 31},
                                                         {3, int64_t{1} << 33}};
    for_each_shape(
        {{1, 0}, {1, 1}, {0, 2}, {5, 3}, {32, 8}, {64, 64}, {200, 1}}, all_head_dims, sizes,
        [](const QkNormRotaryShape& shape) {
            const QkNormRotaryPlan planned = plan(shape, h200);
            const int max_heads = std::max(shape.q_heads, shape.k_heads);
            if (shape.over == NormOver::head) {
                EXPECT_EQ(planned.in_registers, fits_registers(shape));
            } else if (planned.in_registers) {
                EXPECT_TRUE(fits_registers(shape));
                EXPECT_EQ(planned.block_threads % warp, 0);
                EXPECT_LE(planned.block_threads, norm_max_block_threads);
                EXPECT_GE(planned.block_threads, planned.lanes * std::max(planned.q_groups, planned.k_groups));
                EXPECT_LT(planned.block_threads, planned.lanes * std::max(planned.q_groups, planned.k_groups) + warp);
            } else if (fits_registers(shape)) {
                const bool has_four = !shape.needs_lookup && shape.element_size == 2;
                const int heads_per_thread = has_four ? 4 : norm_heads_per_thread_with_lookup;
                const int lanes = shape.head_dim / 2 / (16 / shape.element_size);
                EXPECT_GT(lanes * ((max_heads + heads_per_thread - 1) / heads_per_thread), norm_max_block_threads);
            }
            if (planned.in_registers) {
                expect_lanes(shape, planned.lanes, planned.team);
                const int n = planned.heads_per_thread;
                EXPECT_TRUE(has_norm_kernel(shape.element_size, shape.pairing, shape.over, n, planned.needs_lookup));
                EXPECT_TRUE(planned.needs_lookup || !shape.needs_lookup);
                if (shape.element_size == 2 && shape.pairing == Pairing::halves) {
                    EXPECT_EQ(planned.needs_lookup, shape.needs_lookup);
                }
                const int fewest = (max_heads + n - 1) / n;
                const bool over_all = shape.over == NormOver::all_heads;
                for (const auto& [heads, groups] :
                     {std::pair{shape.q_heads, planned.q_groups}, {shape.k_heads, planned.k_groups}}) {
                    EXPECT_EQ(groups, over_all ? std::min(heads, fewest) : (heads + n - 1) / n);
                }
            }
            // Kernels count threads and blocks in 32 bits.
            EXPECT_LE(blocks_of(planned, shape.over, planned.tokens_per_launch) * planned.block_threads,
                      int64_t{std::numeric_limits<int32_t>::max()});
            const int64_t all_tokens = shape.batch * shape.tokens;
            EXPECT_EQ(planned.tokens_per_launch == 0, all_tokens == 0);
            if (planned.tokens_per_launch < all_tokens) {
                EXPECT_LE(planned.tokens_per_launch, shape.tokens) << "a slice lies in one sequence";
            }
        });
}

TEST(GradientPlan, SatisfiesItsInvariantsForEveryShape) {
    for_each_shape({{1, 0}, {1, 1}, {0, 2}, {5, 3}, {32, 8}, {64, 64}, {200, 1}}, all_head_dims,
                   {{1, 1}, {3, 17}, {1, 8192}, {1, 131072}}, [](const QkNormRotaryShape& shape) {
                       const QkNormRotaryGradientPlan planned = plan_gradient(shape, h200);
                       if (shape.over == NormOver::head) {
                           EXPECT_EQ(planned.in_registers, fits_registers(shape));
                       }
                       if (planned.in_registers) {
                           EXPECT_TRUE(fits_registers(shape));
                           EXPECT_TRUE(has_norm_gradient_kernel(shape.element_size, shape.pairing, shape.over,
                                                                planned.shares_cos_sin, planned.needs_lookup));
                           EXPECT_TRUE(planned.needs_lookup || !shape.needs_lookup);
                           expect_lanes(shape, planned.lanes, planned.team);
                           EXPECT_LE(planned.block_threads, norm_gradient_max_block_threads);
                           EXPECT_EQ(planned.block_threads % warp, 0);
                       }
                       EXPECT_EQ(planned.q_blocks > 0, shape.q_heads > 0);
                       EXPECT_EQ(planned.k_blocks > 0, shape.k_heads > 0);
                       // Every block has a row: each writes partial sums, and all of them are added up.
                       const int64_t tokens = shape.batch * shape.tokens;
                       const int64_t rows_of_q = tokens * (shape.over == NormOver::head ? planned.q_groups : 1);
                       const int64_t rows_per_block = planned.in_registers && shape.over == NormOver::head
                                                          ? planned.block_threads / planned.team
                                                          : 1;
                       EXPECT_LT((planned.q_blocks - 1) * rows_per_block, rows_of_q);
                   });
}

QkNormRotaryShape heads_of_128(int q_heads, int k_heads) {
    return {.batch = 1,
            .tokens = 1,
            .q_heads = q_heads,
            .k_heads = k_heads,
            .head_dim = 128,
            .rotary_dim = 128,
            .element_size = 2,
            .aligned = true};
}

TEST(Plan, GivesAThreadFewHeadsInSmallLaunches) {
    QkNormRotaryShape shape = heads_of_128(32, 8);
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        shape.over = over;
        shape.tokens = 1;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, over == NormOver::head ? 1 : 2);
        shape.tokens = 131072;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, over == NormOver::head ? 8 : 4);
    }
}

TEST(Plan, OverAllHeadsTakesTwoHeadsPerThreadLongerWhereThreeBlocksFit) {
    QkNormRotaryShape shape = heads_of_128(32, 32);
    shape.over = NormOver::all_heads;
    for (const auto& [device, tokens, heads_per_thread] :
         {std::tuple{h200, 2048, 2}, {h200, 2049, 4}, {a100, 256, 2}, {a100, 257, 4}}) {
        shape.tokens = tokens;
        EXPECT_EQ(plan(shape, device).heads_per_thread, heads_per_thread) << tokens << " tokens, " << device.sms;
    }
}

TEST(Plan, RunsHeadsOfNoKnownModelByTheKernelWithALookup) {
    QkNormRotaryShape shape = heads_of_128(32, 8);
    for (const int64_t tokens : {1, 131072}) {
        for (const auto& [element_size, pairing] : {std::pair{2, Pairing::interleaved}, {4, Pairing::halves}}) {
            shape.tokens = tokens;
            shape.element_size = element_size;
            shape.pairing = pairing;
            EXPECT_TRUE(plan(shape, h200).in_registers && plan_gradient(shape, h200).in_registers);
            EXPECT_TRUE(plan(shape, h200).needs_lookup && plan_gradient(shape, h200).needs_lookup);
            const bool shares_lookup = element_size == 4 && tokens > 1;
            EXPECT_EQ(plan(shape, h200).heads_per_thread, shares_lookup ? 8 : norm_heads_per_thread_with_lookup);
        }
        shape.pairing = Pairing::interleaved;
        EXPECT_FALSE(plan(shape, h200).in_registers || plan_gradient(shape, h200).in_registers);
    }
}

TEST(Plan, WeightsAndGradientsMustBeAlignedToo) {
    NormCaseOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.head_dim = o.rotary.rotary_dim = 128;
    NormCase aligned(o);
    EXPECT_TRUE(plan(shape_of(aligned.args()), h200).in_registers);
    QkNormRotaryGradientArgs args = aligned.gradient_args();
    EXPECT_TRUE(plan_gradient(shape_of(args), h200).in_registers);
    args.k.data = static_cast<const char*>(args.k.data) + 2;
    EXPECT_FALSE(plan_gradient(shape_of(args), h200).in_registers);
    args.k.data = static_cast<const char*>(args.k.data) - 2;
    args.q.strides.head += 1;
    EXPECT_FALSE(plan_gradient(shape_of(args), h200).in_registers);
    o.weight_misalignment = 1;
    EXPECT_FALSE(plan(shape_of(NormCase(o).args()), h200).in_registers);
}

TEST(GradientPlan, FillsTheSmsOfTheDevice) {
    QkNormRotaryShape shape = heads_of_128(32, 32);
    shape.tokens = 8192;
    for (const Device& device : {h200, a100}) {
        const QkNormRotaryGradientPlan planned = plan_gradient(shape, device);
        EXPECT_EQ(planned.q_blocks + planned.k_blocks, 3 * device.sms);
    }
}

// --- thread-to-element maps of the kernels

// Which reduction each component takes part in, over all threads of a launch. Rows are numbered by token, q before k,
// head.
class Coverage {
public:
    explicit Coverage(const QkNormRotaryShape& shape)
        : shape_(shape), sums_(shape.batch * shape.tokens * (shape.q_heads + shape.k_heads) * shape.head_dim, none) {}

    void run(const QkNormRotaryPlan& plan) {
        const auto map = QkNormRotaryMap<PlainDivmod>::of(plan, shape_);
        const auto blocks = static_cast<int>(blocks_of(plan, shape_.over, shape_.batch * shape_.tokens));
        for (int block = 0; block < blocks; ++block) {
            for (int thread = 0; thread < plan.block_threads; ++thread) {
                if (!plan.in_registers) {
                    run_row(map.row(block), block, thread);
                } else if (shape_.over == NormOver::head) {
                    const NormPlace place = map.place<NormOver::head>(block, thread);
                    const int64_t team = (int64_t{block} * plan.block_threads + thread) / plan.team;
                    if (place.active) run_in_registers(place, heads_of(map, place), plan.heads_per_thread, team);
                } else {
                    const NormPlace place = map.place<NormOver::all_heads>(block, thread);
                    if (place.active) run_in_registers(place, heads_of(map, place), plan.heads_per_thread, block);
                }
                if (::testing::Test::HasFatalFailure()) return;
            }
        }
    }

    void run(const QkNormRotaryGradientPlan& plan) {
        if (shape_.over == NormOver::head) {
            run_gradient<NormOver::head>(plan);
        } else {
            run_gradient<NormOver::all_heads>(plan);
        }
    }

    // Every component once, and all components of a row in one reduction.
    void expect_each_component_once() const {
        std::unordered_map<int64_t, int64_t> sum_of_row, row_of_sum;
        for (int64_t component = 0; component < static_cast<int64_t>(sums_.size()); ++component) {
            const int64_t sum = sums_[component];
            ASSERT_NE(sum, none) << "component " << component % shape_.head_dim << " of head "
                                 << component / shape_.head_dim << " left out";
            if (component % shape_.head_dim != 0 && sum == sums_[component - 1]) continue;
            const int64_t row = row_of(component);
            ASSERT_EQ(sum_of_row.emplace(row, sum).first->second, sum);
            ASSERT_EQ(row_of_sum.emplace(sum, row).first->second, row);
        }
    }

private:
    static constexpr int64_t none = -1;

    int64_t row_of(int64_t component) const {
        const int64_t head = component / shape_.head_dim;
        if (shape_.over == NormOver::head) return head;
        const int heads = shape_.q_heads + shape_.k_heads;
        return head / heads * 2 + (head % heads >= shape_.q_heads);
    }

    template <NormOver over>
    void run_gradient(const QkNormRotaryGradientPlan& plan) {
        const auto map = QkNormRotaryGradientMap<PlainDivmod>::of(plan, shape_);
        for (int block = 0; block < plan.q_blocks + plan.k_blocks; ++block) {
            const NormGradientBlock mine = map.block(block);
            if (!plan.in_registers) {
                const int heads = mine.is_q ? shape_.q_heads : shape_.k_heads;
                const int64_t rows = int64_t{map.all_tokens} * (over == NormOver::head ? heads : 1);
                for (int64_t row = mine.block; row < rows; row += mine.blocks) {
                    for (int thread = 0; thread < plan.block_threads; ++thread) {
                        run_row(map.row(mine, row), row * 2 + mine.is_q, thread);
                    }
                }
                continue;
            }
            for (int i = 0; i < plan.block_threads; ++i) {
                const NormGradientThread thread = map.template thread<over>(mine, i);
                for (int64_t first_row = int64_t{mine.block} * thread.slots; first_row < thread.rows;
                     first_row += int64_t{mine.blocks} * thread.slots) {
                    const NormGradientRow row = map.template row<over>(mine, thread, first_row);
                    if (!row.active) continue;
                    const NormPlace place{thread.lane, row.group, map.groups(mine), row.batch, row.token,
                                          mine.is_q,   true};
                    const int64_t team = first_row + (over == NormOver::head ? thread.slot : 0);
                    run_in_registers(place, map.heads_of(mine, row.group), norm_heads_per_thread_with_lookup,
                                     team * 2 + mine.is_q);
                    if (::testing::Test::HasFatalFailure()) return;
                }
            }
        }
    }

    // As in the kernel.
    StridedHeads heads_of(const QkNormRotaryMap<PlainDivmod>& map, const NormPlace& place) const {
        const int heads = place.is_q ? shape_.q_heads : shape_.k_heads;
        const bool may_have_head_tables =
            map.plan.needs_lookup && map.plan.heads_per_thread == norm_heads_per_thread_with_lookup;
        return may_have_head_tables ? map.heads_of<true>(place, heads) : map.heads_of<false>(place, heads);
    }

    void run_in_registers(const NormPlace& place, const StridedHeads& mine, int heads_per_thread, int64_t team) {
        const int vector = 16 / shape_.element_size;
        with_pairing_and_vector(shape_.pairing, vector, [&]<Pairing pairing, int Vector>() {
            const int half = shape_.rotary_dim / 2;
            const int heads = place.is_q ? shape_.q_heads : shape_.k_heads;
            const WholeHeadLayout<pairing, Vector> lane(place.lane, half);
            ASSERT_FALSE(mine.exists(heads_per_thread)) << "heads left out";
            for (int j = 0; j < heads_per_thread; ++j) {
                const int head = mine.head(j);
                if (!mine.exists(j)) break;
                ASSERT_EQ(mine.table, head / (heads / shape_.table_heads));
                // Over a head, each of a thread's heads has a reduction of its own.
                const int64_t sum = shape_.over == NormOver::head ? team * heads_per_thread + j : team;
                const auto touch_component = [&](int at) { touch(place, head, at, sum); };
                if (lane.rotates()) {
                    rotate_components<pairing, Vector>(lane, half, touch_component);
                } else {
                    for (int i = 0; i < Vector; ++i) {
                        touch_component(lane.first() + i);
                        touch_component(lane.second() + i);
                        ASSERT_LT(lane.pair(i), half) << "a phase step past the table's end";
                    }
                }
            }
        });
    }

    void run_row(const NormRow& row, int64_t sum, int thread) {
        const bool over_head = shape_.over == NormOver::head;
        const int first_head = over_head ? row.row : 0;
        const int heads = over_head ? 1 : row.is_q ? shape_.q_heads : shape_.k_heads;
        const int half = shape_.rotary_dim / 2;
        const auto touch_component = [&](int head, int at) { touch(row, first_head + head, at, sum); };
        with_pairing_and_vector(shape_.pairing, 1, [&]<Pairing pairing, int Vector>() {
            for_each_row_pair(thread, heads, half, [&](int head, int pair) {
                rotate_components<pairing, 1>(RowPair{pairing, pair, half}, half,
                                              [&](int at) { touch_component(head, at); });
            });
        });
        for_each_row_tail(thread, heads, shape_.rotary_dim, shape_.head_dim - shape_.rotary_dim, touch_component);
    }

    // `place`: a NormPlace or NormRow.
    void touch(const auto& place, int head, int at, int64_t sum) {
        ASSERT_LT(at, shape_.head_dim);
        const int64_t token = place.batch * shape_.tokens + place.token;
        const int64_t row = token * (shape_.q_heads + shape_.k_heads) + (place.is_q ? head : shape_.q_heads + head);
        ASSERT_EQ(std::exchange(sums_.at(row * shape_.head_dim + at), sum), none)
            << "component " << at << " of head " << head << (place.is_q ? " of q" : " of k") << " twice";
    }

    QkNormRotaryShape shape_;
    std::vector<int64_t> sums_;  // the reduction of each component
};

const std::vector<std::pair<int, int>> covered_heads{{0, 2}, {5, 3}, {9, 0}};

// One table has query factors.
QkNormRotaryShape with_head_tables(QkNormRotaryShape shape, int table_heads) {
    shape.needs_lookup = true;
    shape.table_heads = table_heads;
    shape.has_query_factors = table_heads == 1;
    return shape;
}

TEST(Kernel, GivesEveryHeadItsTable) {
    for (const int table_heads : {1, 2, 3, 8}) {
        const std::vector<std::pair<int, int>> heads{
            {4 * table_heads, table_heads}, {table_heads, 3 * table_heads}, {3 * table_heads, 0}, {0, table_heads}};
        for_each_shape(heads, {6, 64, 80, 128}, {{2, 3}}, [&](const QkNormRotaryShape& plain) {
            const QkNormRotaryShape shape = with_head_tables(plain, table_heads);
            for (const QkNormRotaryPlan& planned : every_norm_plan(shape)) {
                if (planned.in_registers) {
                    EXPECT_EQ(planned.heads_per_thread, norm_heads_per_thread_with_lookup);
                }
                Coverage kernel(shape);
                kernel.run(planned);
                kernel.expect_each_component_once();
            }
            for (const QkNormRotaryGradientPlan& planned : every_gradient_plan(shape)) {
                Coverage gradient(shape);
                gradient.run(planned);
                gradient.expect_each_component_once();
            }
        });
    }
}

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_shape(covered_heads, {6, 17, 64, 72, 80, 128}, {{2, 3}}, [](const QkNormRotaryShape& shape) {
        for (const QkNormRotaryPlan& planned : every_norm_plan(shape)) {
            Coverage kernel(shape);
            kernel.run(planned);
            kernel.expect_each_component_once();
        }
    });
}

TEST(GradientKernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_shape(covered_heads, {6, 17, 64, 72, 80, 128}, {{1, 1}, {2, 5}}, [](const QkNormRotaryShape& shape) {
        for (QkNormRotaryGradientPlan planned : every_gradient_plan(shape)) {
            const QkNormRotaryGradientPlan full = planned;
            for (const int max_blocks : {1, 3, 1 << 20}) {
                planned.q_blocks = std::min(full.q_blocks, max_blocks);
                planned.k_blocks = std::min(full.k_blocks, max_blocks);
                Coverage kernel(shape);
                kernel.run(planned);
                kernel.expect_each_component_once();
            }
        }
    });
}

// A team reduces by warp shuffles.
TEST(Kernel, TeamsDoNotCrossWarps) {
    for_each_shape({{5, 3}}, all_head_dims, {{1, 3}}, [](const QkNormRotaryShape& shape) {
        const QkNormRotaryPlan planned = plan(shape, h200);
        if (!planned.in_registers || shape.over != NormOver::head) return;
        EXPECT_EQ(planned.block_threads % warp, 0);
        for (int first = 0; first < planned.block_threads; first += planned.team) {
            EXPECT_EQ(first / warp, (first + planned.team - 1) / warp);
        }
    });
}

}  // namespace
}  // namespace mrrope
