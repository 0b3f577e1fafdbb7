#include "qk_norm_rotary_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lane_mirror.h"
#include "qk_norm_rotary_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int warp = 32;

std::string describe(const QkNormRotaryShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.q_heads) + "+" + std::to_string(s.k_heads) + " head_dim " + std::to_string(s.head_dim) +
           " rotary_dim " + std::to_string(s.rotary_dim) + " element " + std::to_string(s.element_size) +
           (s.over == NormOver::head ? " over a head" : " over all heads") + (s.aligned ? " aligned" : " unaligned") +
           (s.looks_up ? " looks up" : "");
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
                        for (const int flags : {0, 1, 2, 3}) {
                            for (const auto& [batch, tokens] : sizes) {
                                const QkNormRotaryShape shape{.batch = batch,
                                                              .tokens = tokens,
                                                              .q_heads = q_heads,
                                                              .k_heads = k_heads,
                                                              .head_dim = head_dim,
                                                              .rotary_dim = rotary_dim,
                                                              .element_size = element_size,
                                                              .over = over,
                                                              .aligned = flags % 2 == 1,
                                                              .looks_up = flags >= 2};
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

// --- what every plan must be
// -------------------------------------------------------------------------------------------

bool may_hold(const QkNormRotaryShape& shape) {
    const int vector = 16 / shape.element_size;
    return shape.aligned && shape.element_size <= 4 && shape.rotary_dim / 2 % vector == 0 &&
           shape.head_dim % (2 * vector) == 0 && shape.head_dim / (2 * vector) <= warp;
}

void expect_lanes(const QkNormRotaryShape& shape, int lanes, int team) {
    EXPECT_EQ(lanes * 2 * (16 / shape.element_size), shape.head_dim);
    EXPECT_GE(team, lanes);
    EXPECT_LT(team, 2 * lanes);
    EXPECT_EQ(warp % team, 0);
}

TEST(Plan, HoldsItsPromisesForEveryShape) {
    const std::vector<std::pair<int64_t, int64_t>> sizes{{1, 0},
                                                         {1, 1},
                                                         {3, 17},
                                                         {1, 8192},
                                                         {1, 131072},
                                                         {int64_t{1} << 20, 5},
                                                         {1, int64_t{1} << 31},
                                                         {3, int64_t{1} << 33}};
    for_each_shape({{1, 0}, {1, 1}, {0, 2}, {5, 3}, {32, 8}, {64, 64}, {200, 1}}, all_head_dims, sizes,
                   [](const QkNormRotaryShape& shape) {
                       const QkNormRotaryPlan plan = plan_qk_norm_rotary(shape);
                       const int most_heads = std::max(shape.q_heads, shape.k_heads);
                       if (shape.over == NormOver::head) {
                           EXPECT_EQ(plan.holds, may_hold(shape));
                       } else if (plan.holds) {
                           EXPECT_TRUE(may_hold(shape));
                           EXPECT_EQ(plan.block_threads % warp, 0);
                           EXPECT_LE(plan.block_threads, norm_most_block_threads);
                           EXPECT_GE(plan.block_threads, plan.lanes * std::max(plan.q_groups, plan.k_groups));
                           EXPECT_LT(plan.block_threads, plan.lanes * std::max(plan.q_groups, plan.k_groups) + warp);
                       } else if (may_hold(shape)) {
                           const int heads_per_thread = shape.looks_up ? norm_heads_per_thread_with_lookup : 4;
                           const int lanes = shape.head_dim / 2 / (16 / shape.element_size);
                           EXPECT_GT(lanes * ((most_heads + heads_per_thread - 1) / heads_per_thread),
                                     norm_most_block_threads);
                       }
                       if (plan.holds) {
                           expect_lanes(shape, plan.lanes, plan.team);
                           const int n = plan.heads_per_thread;
                           EXPECT_TRUE(n == 1 || n == 2 || n == 4 || (n == 8 && shape.over == NormOver::head));
                           if (shape.looks_up) {
                               EXPECT_EQ(n, norm_heads_per_thread_with_lookup);
                           }
                           const int fewest = (most_heads + n - 1) / n;
                           const bool over_all = shape.over == NormOver::all_heads;
                           for (const auto& [heads, groups] :
                                {std::pair{shape.q_heads, plan.q_groups}, {shape.k_heads, plan.k_groups}}) {
                               EXPECT_EQ(groups, over_all ? std::min(heads, fewest) : (heads + n - 1) / n);
                           }
                       }
                       // Kernels count threads and blocks in 32 bits.
                       EXPECT_LE(blocks_of(plan, shape.over, plan.tokens_per_launch) * plan.block_threads,
                                 int64_t{std::numeric_limits<int32_t>::max()});
                       const int64_t all_tokens = shape.batch * shape.tokens;
                       EXPECT_EQ(plan.tokens_per_launch == 0, all_tokens == 0);
                       if (plan.tokens_per_launch < all_tokens) {
                           EXPECT_LE(plan.tokens_per_launch, shape.tokens) << "a slice lies in one sequence";
                       }
                   });
}

TEST(GradientPlan, HoldsItsPromisesForEveryShape) {
    for_each_shape({{1, 0}, {1, 1}, {0, 2}, {5, 3}, {32, 8}, {64, 64}, {200, 1}}, all_head_dims,
                   {{1, 1}, {3, 17}, {1, 8192}, {1, 131072}}, [](const QkNormRotaryShape& shape) {
                       const QkNormRotaryGradientPlan plan = plan_qk_norm_rotary_gradient(shape);
                       if (shape.over == NormOver::head) {
                           EXPECT_EQ(plan.holds, may_hold(shape));
                       }
                       if (plan.holds) {
                           EXPECT_TRUE(may_hold(shape));
                           expect_lanes(shape, plan.lanes, plan.team);
                           EXPECT_LE(plan.block_threads, norm_gradient_most_block_threads);
                           EXPECT_EQ(plan.block_threads % warp, 0);
                       }
                       EXPECT_EQ(plan.q_blocks > 0, shape.q_heads > 0);
                       EXPECT_EQ(plan.k_blocks > 0, shape.k_heads > 0);
                       // No block without a row: each writes sums, and they are all added up.
                       const int64_t tokens = shape.batch * shape.tokens;
                       const int64_t rows_of_q = tokens * (shape.over == NormOver::head ? plan.q_groups : 1);
                       const int64_t rows_per_block =
                           plan.holds && shape.over == NormOver::head ? plan.block_threads / plan.team : 1;
                       EXPECT_LT((plan.q_blocks - 1) * rows_per_block, rows_of_q);
                   });
}

TEST(Plan, GivesAThreadFewHeadsWhereThereAreFew) {
    QkNormRotaryShape shape{.batch = 1,
                            .tokens = 1,
                            .q_heads = 32,
                            .k_heads = 8,
                            .head_dim = 128,
                            .rotary_dim = 128,
                            .element_size = 2,
                            .aligned = true};
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        shape.over = over;
        shape.tokens = 1;
        EXPECT_EQ(plan_qk_norm_rotary(shape).heads_per_thread, over == NormOver::head ? 1 : 2);
        shape.tokens = 131072;
        EXPECT_EQ(plan_qk_norm_rotary(shape).heads_per_thread, over == NormOver::head ? 8 : 4);
    }
}

TEST(Plan, WeightsAndGradientsMustBeAlignedToo) {
    NormCaseOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.head_dim = o.rotary.rotary_dim = 128;
    NormCase aligned(o);
    EXPECT_TRUE(plan_qk_norm_rotary(shape_of(aligned.args())).holds);
    QkNormRotaryGradientArgs args = aligned.gradient_args();
    EXPECT_TRUE(plan_qk_norm_rotary_gradient(shape_of(args)).holds);
    args.k.data = static_cast<const char*>(args.k.data) + 2;
    EXPECT_FALSE(plan_qk_norm_rotary_gradient(shape_of(args)).holds);
    args.k.data = static_cast<const char*>(args.k.data) - 2;
    args.q.strides.head += 1;
    EXPECT_FALSE(plan_qk_norm_rotary_gradient(shape_of(args)).holds);
    o.weight_misalignment = 1;
    EXPECT_FALSE(plan_qk_norm_rotary(shape_of(NormCase(o).args())).holds);
}

// --- the kernels' index arithmetic, mirrored
// ---------------------------------------------------------------------------

// Who reads and writes which component, and who takes part in which sum. Rows are numbered by token, q before k, head.
class KernelMirror {
public:
    KernelMirror(const QkNormRotaryShape& shape, Pairing pairing)
        : shape_(shape),
          pairing_(pairing),
          sums_(shape.batch * shape.tokens * (shape.q_heads + shape.k_heads) * shape.head_dim, none) {}

    void run(const QkNormRotaryPlan& plan) {
        const int64_t tokens = shape_.batch * shape_.tokens;
        const int64_t blocks = blocks_of(plan, shape_.over, tokens);
        for (int64_t block = 0; block < blocks; ++block) {
            for (int thread = 0; thread < plan.block_threads; ++thread) {
                if (!plan.holds) {
                    row_thread(block / plan.groups(), static_cast<int>(block % plan.groups()), plan.q_groups, block,
                               thread, plan.block_threads);
                } else if (shape_.over == NormOver::head) {
                    const int64_t at = block * plan.block_threads + thread;
                    const int64_t item = at / plan.team;
                    const auto member = static_cast<int>(at % plan.team);
                    const auto group = static_cast<int>(item % plan.groups());
                    if (item / plan.groups() >= tokens || member >= plan.lanes) continue;
                    const bool is_q = group < plan.q_groups;
                    held(item / plan.groups(), is_q, is_q ? group : group - plan.q_groups,
                         is_q ? plan.q_groups : plan.k_groups, plan.heads_per_thread, member, item);
                } else {
                    const int views = (plan.q_groups > 0) + (plan.k_groups > 0);
                    const bool is_q = block % views < (plan.q_groups > 0 ? 1 : 0);
                    const int groups = is_q ? plan.q_groups : plan.k_groups;
                    const int group = thread / plan.lanes;
                    if (group >= groups) continue;
                    held(block / views, is_q, group, groups, plan.heads_per_thread, thread % plan.lanes, block);
                }
                if (::testing::Test::HasFatalFailure()) return;
            }
        }
    }

    void run(const QkNormRotaryGradientPlan& plan) {
        const int64_t tokens = shape_.batch * shape_.tokens;
        for (int block = 0; block < plan.q_blocks + plan.k_blocks; ++block) {
            const bool is_q = block < plan.q_blocks;
            const int blocks = is_q ? plan.q_blocks : plan.k_blocks;
            const int mine = is_q ? block : block - plan.q_blocks;
            const int groups = is_q ? plan.q_groups : plan.k_groups;
            const bool over_head = shape_.over == NormOver::head;
            const int slots = plan.holds && over_head ? plan.block_threads / plan.team : 1;
            const int64_t rows = tokens * (over_head ? groups : 1);
            for (int64_t first_row = int64_t{mine} * slots; first_row < rows; first_row += int64_t{blocks} * slots) {
                for (int thread = 0; thread < plan.block_threads; ++thread) {
                    if (!plan.holds) {
                        const int64_t token = over_head ? first_row / groups : first_row;
                        const int row = over_head ? static_cast<int>(first_row % groups) : 0;
                        row_thread(token, is_q ? row : plan.q_groups + row, plan.q_groups, first_row * 2 + is_q, thread,
                                   plan.block_threads);
                        continue;
                    }
                    const int divisor = over_head ? plan.team : plan.lanes;
                    const int slot = thread / divisor;
                    const int member = thread % divisor;
                    const int64_t row = first_row + (over_head ? slot : 0);
                    if (member >= plan.lanes || row >= rows || (!over_head && slot >= groups)) continue;
                    held(over_head ? row / groups : row, is_q, over_head ? static_cast<int>(row % groups) : slot,
                         groups, norm_heads_per_thread_with_lookup, member, row * 2 + is_q);
                    if (::testing::Test::HasFatalFailure()) return;
                }
            }
        }
    }

    // Every component once, and by those who share its sum.
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

    void held(int64_t token, bool is_q, int group, int groups, int heads_per_thread, int lane, int64_t team) {
        const int vector = 16 / shape_.element_size;
        const int half = shape_.rotary_dim / 2;
        const int heads = is_q ? shape_.q_heads : shape_.k_heads;
        for (int j = 0; j < heads_per_thread; ++j) {
            const int head = group + j * groups;
            if (head >= heads) break;
            // Over a head, each of a thread's heads has a sum of its own.
            const int64_t sum = shape_.over == NormOver::head ? team * heads_per_thread + j : team;
            if (lane * vector < half) {
                LaneMirror{pairing_, vector, lane, half}.rotate([&](int at) { touch(token, is_q, head, at, sum); });
            } else {
                for (int i = 0; i < 2 * vector; ++i) touch(token, is_q, head, 2 * lane * vector + i, sum);
            }
        }
    }

    void row_thread(int64_t token, int row, int q_rows, int64_t sum, int thread, int threads) {
        const bool is_q = row < q_rows;
        const bool over_head = shape_.over == NormOver::head;
        const int first = over_head ? (is_q ? row : row - q_rows) : 0;
        const int heads = over_head ? 1 : is_q ? shape_.q_heads : shape_.k_heads;
        const int half = shape_.rotary_dim / 2;
        const int rest = shape_.head_dim - shape_.rotary_dim;
        for (int item = thread; item < heads * half; item += threads) {
            LaneMirror{pairing_, 1, item % half, half}.rotate(
                [&](int at) { touch(token, is_q, first + item / half, at, sum); });
        }
        for (int item = thread; item < heads * rest; item += threads) {
            touch(token, is_q, first + item / rest, shape_.rotary_dim + item % rest, sum);
        }
    }

    void touch(int64_t token, bool is_q, int head, int at, int64_t sum) {
        ASSERT_LT(at, shape_.head_dim);
        const int64_t row = token * (shape_.q_heads + shape_.k_heads) + (is_q ? head : shape_.q_heads + head);
        ASSERT_EQ(std::exchange(sums_.at(row * shape_.head_dim + at), sum), none)
            << "component " << at << " of head " << head << (is_q ? " of q" : " of k") << " twice";
    }

    QkNormRotaryShape shape_;
    Pairing pairing_;
    std::vector<int64_t> sums_;  // that each component goes into
};

const std::vector<std::pair<int, int>> mirrored_heads{{0, 2}, {5, 3}, {9, 0}};

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_shape(mirrored_heads, {6, 17, 64, 72, 80, 128}, {{2, 3}}, [](const QkNormRotaryShape& shape) {
        // Small shapes as the kernel takes them when they are large, too.
        for (const int heads_per_thread : {1, 2, 4, 8}) {
            const bool is_extreme = heads_per_thread == 1 || heads_per_thread == 8;
            if (is_extreme && shape.over == NormOver::all_heads && plan_qk_norm_rotary(shape).holds) continue;
            const QkNormRotaryPlan plan = plan_with(shape, heads_per_thread);
            if (!plan.holds && heads_per_thread > 1) continue;
            for (const Pairing pairing : both_pairings) {
                KernelMirror kernel(shape, pairing);
                kernel.run(plan);
                kernel.expect_each_component_once();
            }
        }
    });
}

TEST(GradientKernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_shape(mirrored_heads, {6, 17, 64, 72, 80, 128}, {{1, 1}, {2, 5}}, [](const QkNormRotaryShape& shape) {
        for (const int most_blocks : {1, 3, 1 << 20}) {
            QkNormRotaryGradientPlan plan = plan_qk_norm_rotary_gradient(shape);
            plan.q_blocks = std::min(plan.q_blocks, most_blocks);
            plan.k_blocks = std::min(plan.k_blocks, most_blocks);
            for (const Pairing pairing : both_pairings) {
                KernelMirror kernel(shape, pairing);
                kernel.run(plan);
                kernel.expect_each_component_once();
            }
        }
    });
}

// A team's sum is taken within a warp.
TEST(Kernel, TeamsDoNotCrossWarps) {
    for_each_shape({{5, 3}}, all_head_dims, {{1, 3}}, [](const QkNormRotaryShape& shape) {
        const QkNormRotaryPlan plan = plan_qk_norm_rotary(shape);
        if (!plan.holds || shape.over != NormOver::head) return;
        EXPECT_EQ(plan.block_threads % warp, 0);
        for (int first = 0; first < plan.block_threads; first += plan.team) {
            EXPECT_EQ(first / warp, (first + plan.team - 1) / warp);
        }
    });
}

}  // namespace
}  // namespace mrrope
