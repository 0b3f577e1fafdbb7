#include "qk_norm_rotary_and_cache_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices.h"
#include "every_norm_plan.h"
#include "kernel_lanes.h"
#include "launch_slices.h"
#include "qk_norm_rotary_and_cache_case.h"
#include "qk_norm_rotary_and_cache_map.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int warp = 32;
constexpr NormOver both_overs[] = {NormOver::head, NormOver::all_heads};

std::string describe(const QkNormRotaryAndCacheShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.q_heads) + "+" + std::to_string(s.kv_heads) + "+" + std::to_string(s.gate_heads) +
           " head_dim " + std::to_string(s.head_dim) + " rotary_dim " + std::to_string(s.rotary_dim) + " element " +
           std::to_string(s.element_size) + (s.pairing == Pairing::halves ? " halves" : " interleaved") +
           (s.over == NormOver::head ? " over a head" : " over all heads") + (s.aligned ? " aligned" : " unaligned") +
           (s.needs_lookup ? " with lookup" : "") + (s.has_float8() ? " float8" : "") +
           (s.computes_q_scale ? " with computed scales" : "") + " head tables " + std::to_string(s.table_heads);
}

struct HeadCounts {
    int q_heads;
    int kv_heads;
    int gate_heads;
    int table_heads = 1;
    bool has_query_factors = false;
};

template <class F>
void for_each_shape(const std::vector<HeadCounts>& heads, const std::vector<int>& head_dims,
                    const std::vector<std::pair<int64_t, int64_t>>& sizes, F&& f) {
    for (const HeadCounts& count : heads) {
        for (const int head_dim : head_dims) {
            for (const int rotary_dim : {2, 64, head_dim / 4 * 2, head_dim / 2 * 2}) {
                if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                for (const int element_size : {2, 4, 8}) {
                    for (const NormOver over : both_overs) {
                        for (int flags = 0; flags < 16; ++flags) {
                            const bool rounds_q = (flags & 4) != 0;
                            for (const auto& [batch, tokens] : sizes) {
                                const QkNormRotaryAndCacheShape shape{.batch = batch,
                                                                      .tokens = tokens,
                                                                      .q_heads = count.q_heads,
                                                                      .kv_heads = count.kv_heads,
                                                                      .gate_heads = count.gate_heads,
                                                                      .head_dim = head_dim,
                                                                      .rotary_dim = rotary_dim,
                                                                      .element_size = element_size,
                                                                      .pairing = both_pairings[flags / 8],
                                                                      .over = over,
                                                                      .aligned = (flags & 1) != 0,
                                                                      .needs_lookup = (flags & 2) != 0 ||
                                                                                      count.table_heads > 1 ||
                                                                                      count.has_query_factors,
                                                                      .computes_q_scale = rounds_q,
                                                                      .rounds_q = rounds_q,
                                                                      .table_heads = count.table_heads,
                                                                      .has_query_factors = count.has_query_factors};
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

// By vectors of so many bytes.
bool fits_registers(const QkNormRotaryAndCacheShape& shape, int vector_bytes) {
    const int vector = vector_bytes / shape.element_size;
    return shape.aligned && shape.rotary_dim / 2 % vector == 0 && shape.head_dim % (2 * vector) == 0 &&
           shape.head_dim / (2 * vector) <= warp;
}

// With so many heads per thread: one for such calls only, or for others, too.
bool has_kernel(const QkNormRotaryAndCacheShape& shape, int heads_per_thread) {
    const auto exists = [&](bool needs_lookup, bool has_float8) {
        return has_norm_and_cache_kernel(shape.element_size, shape.pairing, shape.over, heads_per_thread, needs_lookup,
                                         has_float8);
    };
    return exists(shape.needs_lookup, shape.has_float8()) || exists(true, shape.has_float8()) || exists(true, true);
}

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for_each_shape(
        {{1, 0, 0},
         {0, 2, 0},
         {5, 3, 5},
         {32, 8, 0},
         {16, 2, 16},
         {64, 64, 0},
         {200, 1, 200},
         {32, 8, 32, 8},
         {32, 8, 0, 1, true}},
        {2, 17, 64, 72, 80, 96, 120, 128, 256, 512, 576},
        {{1, 0}, {1, 1}, {3, 17}, {1, 8192}, {1, 131072}, {int64_t{1} << 20, 5}, {3, int64_t{1} << 33}},
        [](const QkNormRotaryAndCacheShape& shape) {
            const QkNormRotaryAndCachePlan planned = plan(shape, h200);
            const bool over_head = shape.over == NormOver::head;
            if (over_head) {
                // Threads of one head take half vectors, and have one table for all heads.
                EXPECT_EQ(planned.in_registers,
                          (has_kernel(shape, 2) && fits_registers(shape, 16)) ||
                              (has_kernel(shape, 1) && fits_registers(shape, 8) && !shape.is_per_head()));
            }
            if (planned.in_registers) {
                EXPECT_TRUE(fits_registers(shape, planned.vector * shape.element_size));
                EXPECT_TRUE(has_norm_and_cache_kernel(shape.element_size, shape.pairing, shape.over,
                                                      planned.heads_per_thread, planned.needs_lookup,
                                                      planned.has_float8, planned.fixed_lanes));
                EXPECT_TRUE(planned.needs_lookup || !shape.needs_lookup);
                EXPECT_TRUE(planned.has_float8 || !shape.has_float8());
                if (shape.element_size == 2 && shape.pairing == Pairing::halves) {
                    EXPECT_EQ(planned.needs_lookup, shape.needs_lookup);
                    EXPECT_EQ(planned.has_float8, shape.has_float8());
                }
                EXPECT_LE(planned.block_threads,
                          norm_and_cache_max_block_threads(shape.over, planned.heads_per_thread));
                EXPECT_TRUE(planned.heads_per_thread == norm_heads_per_thread_with_lookup || !shape.is_per_head());
                EXPECT_EQ(planned.vector * shape.element_size, planned.heads_per_thread == 1 ? 8 : 16);
                EXPECT_EQ(planned.lanes * 2 * planned.vector, shape.head_dim);
                EXPECT_EQ(planned.team, static_cast<int>(std::bit_ceil(static_cast<unsigned>(planned.lanes))));
                EXPECT_EQ(planned.groups.queries % (1 << planned.q_sharers_log2), 0);
                EXPECT_EQ(planned.groups.keys % (1 << planned.k_sharers_log2), 0);
                EXPECT_LE(planned.team << std::max(planned.q_sharers_log2, planned.k_sharers_log2), warp);
                if (!over_head && shape.computes_q_scale) {
                    EXPECT_EQ(planned.team, planned.lanes);
                }
            }
            EXPECT_TRUE(planned.block_threads % warp == 0 && planned.block_threads > 0);
            if (!planned.in_registers) {
                EXPECT_LE(planned.block_threads, norm_row_block_threads);
            }
            // Kernels count threads and blocks in 32 bits.
            EXPECT_LE(blocks_of(planned, planned.tokens_per_launch) * planned.block_threads,
                      int64_t{std::numeric_limits<int32_t>::max()});
            const int64_t all_tokens = shape.batch * shape.tokens;
            EXPECT_EQ(planned.tokens_per_launch == 0, all_tokens == 0);
            if (planned.tokens_per_launch < all_tokens) {
                EXPECT_LE(planned.tokens_per_launch, shape.tokens) << "a slice lies in one sequence";
            }
        });
}

// Of Qwen3-8B.
QkNormRotaryAndCacheShape qwen3_shape(int64_t tokens) {
    return {.batch = 1,
            .tokens = tokens,
            .q_heads = 32,
            .kv_heads = 8,
            .head_dim = 128,
            .rotary_dim = 128,
            .element_size = 2,
            .aligned = true};
}

TEST(Plan, SharesRotationsAmongTheGroupsOfAToken) {
    QkNormRotaryAndCacheShape shape = qwen3_shape(8192);
    const auto sharers = [&](int q_heads, int head_dim) {
        shape.q_heads = q_heads;
        shape.head_dim = shape.rotary_dim = head_dim;
        return 1 << plan(shape, h200).q_sharers_log2;
    };
    EXPECT_EQ(sharers(32, 128), 4);  // four groups, and four teams of a warp
    EXPECT_EQ(sharers(64, 128), 4);
    EXPECT_EQ(sharers(48, 128), 2);  // six groups
    EXPECT_EQ(sharers(40, 128), 1);  // five
    EXPECT_EQ(sharers(32, 256), 2);  // two teams of a warp
    EXPECT_EQ(sharers(64, 32), 4);   // four of eight groups, so that each computes two rotations
    EXPECT_EQ(plan(shape, h200).k_sharers_log2, 0);
}

TEST(Plan, FixesTheLanesOfHeadsThatAreRotatedWhole) {
    QkNormRotaryAndCacheShape shape = qwen3_shape(8192);
    EXPECT_EQ(plan(shape, h200).fixed_lanes, 8);
    shape.rotary_dim = 64;
    EXPECT_EQ(plan(shape, h200).fixed_lanes, 0);
    shape.head_dim = 64;
    EXPECT_EQ(plan(shape, h200).fixed_lanes, 0);
    shape.element_size = 4;  // eight lanes, but instantiated for 16 bits only
    EXPECT_EQ(plan(shape, h200).fixed_lanes, 0);
}

TEST(Plan, RunsHeadsOfNoKnownModelByOneKernel) {
    QkNormRotaryAndCacheShape shape = qwen3_shape(1);
    for (const auto& [element_size, pairing] : {std::pair{2, Pairing::interleaved}, {4, Pairing::halves}}) {
        shape.element_size = element_size;
        shape.pairing = pairing;
        for (const bool rounds_q : {false, true}) {
            for (const int64_t tokens : {1024, 131072}) {
                shape.tokens = tokens;
                shape.rounds_q = rounds_q;
                const QkNormRotaryAndCachePlan planned = plan(shape, h200);
                EXPECT_EQ(planned.in_registers, element_size == 2 || !rounds_q);
                EXPECT_TRUE(!planned.in_registers || planned.needs_lookup);
                EXPECT_EQ(planned.has_float8, element_size == 2);
            }
        }
    }
}

TEST(Plan, GivesThreadsOfSmallLaunchesOneInterleavedHead) {
    QkNormRotaryAndCacheShape shape = qwen3_shape(64);
    shape.pairing = Pairing::interleaved;
    for (const bool rounds_cache : {false, true}) {
        shape.rounds_cache = rounds_cache;
        const QkNormRotaryAndCachePlan planned = plan(shape, h200);
        EXPECT_TRUE(planned.in_registers && !planned.needs_lookup);
        EXPECT_EQ(planned.heads_per_thread, 1);
        EXPECT_EQ(planned.has_float8, rounds_cache);
    }
}

TEST(Plan, GivesThreadsMoreHeadsInLargeLaunches) {
    QkNormRotaryAndCacheShape shape = qwen3_shape(1);
    for (const auto& [tokens, heads_per_thread] : {std::pair{1, 1}, {64, 1}, {256, 2}, {1024, 8}, {131072, 8}}) {
        shape.tokens = tokens;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, heads_per_thread) << tokens;
    }
    shape.rounds_cache = true;
    for (const auto& [tokens, heads_per_thread] : {std::pair{256, 2}, {1024, 2}, {2048, 8}}) {
        shape.tokens = tokens;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, heads_per_thread) << tokens;
    }
}

TEST(Plan, TakesHalfVectorsWhereFullOnesDoNotFit) {
    for (const int64_t tokens : {1, 8192}) {
        for (const NormOver over : both_overs) {
            QkNormRotaryAndCacheShape shape = qwen3_shape(tokens);
            shape.over = over;
            shape.head_dim = shape.rotary_dim = 120;
            const QkNormRotaryAndCachePlan planned = plan(shape, h200);
            EXPECT_TRUE(planned.in_registers);
            EXPECT_EQ(planned.heads_per_thread, 1);
            EXPECT_EQ(planned.lanes, 15);
        }
    }
}

TEST(Plan, GivesARowOneWarpInLargeLaunches) {
    for (const auto& [tokens, over, threads] : {std::tuple{1, NormOver::head, 64},
                                                {8192, NormOver::head, 32},
                                                {1, NormOver::all_heads, norm_row_block_threads},
                                                {8192, NormOver::all_heads, norm_row_block_threads}}) {
        QkNormRotaryAndCacheShape shape = qwen3_shape(tokens);
        shape.over = over;
        shape.head_dim = shape.rotary_dim = 100;
        const QkNormRotaryAndCachePlan planned = plan(shape, h200);
        EXPECT_FALSE(planned.in_registers);
        EXPECT_EQ(planned.block_threads, threads);
    }
}

TEST(Plan, GivesThreadsMoreHeadsInLargeLaunchesOverAllHeads) {
    QkNormRotaryAndCacheShape shape = qwen3_shape(1);
    shape.over = NormOver::all_heads;
    shape.kv_heads = 32;
    for (const auto& [tokens, heads_per_thread] : {std::pair{1, 1}, {64, 1}, {256, 2}, {1024, 2}, {8192, 4}}) {
        shape.tokens = tokens;
        EXPECT_EQ(plan(shape, h200).heads_per_thread, heads_per_thread) << tokens;
    }
    // No block holds a row with fewer heads per thread.
    shape.tokens = 1;
    shape.q_heads = 64;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 1);
    shape.q_heads = 65;
    EXPECT_EQ(plan(shape, h200).heads_per_thread, 4);
    shape.q_heads = 129;
    EXPECT_FALSE(plan(shape, h200).in_registers);
}

// --- thread-to-element map of the kernels

// Runs the map over all threads of a launch; records which reduction every component of q and k takes part in.
class Coverage {
public:
    explicit Coverage(const QkNormRotaryAndCacheShape& shape)
        : shape_(shape), sums_(shape.batch * shape.tokens * heads_in_all() * shape.head_dim, none) {}

    void run(const QkNormRotaryAndCachePlan& plan) {
        const auto map = QkNormRotaryAndCacheMap<PlainDivmod>::of(plan, shape_);
        const int64_t blocks = blocks_of(plan, shape_.batch * shape_.tokens);
        for (int block = 0; block < blocks; ++block) {
            if (!plan.in_registers) {
                run_row(map.row(block), block);
                continue;
            }
            for (int thread = 0; thread < plan.block_threads; ++thread) {
                if (shape_.over == NormOver::head) {
                    const int64_t team = (int64_t{block} * plan.block_threads + thread) / plan.team;
                    const StorePlace place = place_over_head(map, block, thread);
                    run_in_registers(map, place, team);
                } else {
                    run_in_registers(map, place_over_all_heads(map, block, thread), block);
                }
                if (::testing::Test::HasFatalFailure()) return;
            }
            if (plan.heads_per_thread == 8) expect_rotations_of_every_lane(map, block);
        }
    }

    static StorePlace place_over_head(const QkNormRotaryAndCacheMap<PlainDivmod>& map, int block, int thread) {
        return map.plan.heads_per_thread == 8 ? map.place<NormOver::head, true>(block, thread)
                                              : map.place<NormOver::head, false>(block, thread);
    }

    static StorePlace place_over_all_heads(const QkNormRotaryAndCacheMap<PlainDivmod>& map, int block, int thread) {
        return map.plan.heads_per_thread == 4 ? map.place<NormOver::all_heads, true>(block, thread)
                                              : map.place<NormOver::all_heads, false>(block, thread);
    }

    // Every thread finds the rotations of its lane at its token in its warp's memory, each written by one thread.
    static void expect_rotations_of_every_lane(const QkNormRotaryAndCacheMap<PlainDivmod>& map, int block) {
        const QkNormRotaryAndCachePlan& plan = map.plan;
        using Rotation = std::tuple<HeadKind, int, int, int>;
        const auto rotation_of = [](const StorePlace& place) {
            return Rotation{place.kind, place.batch, place.token, place.lane};
        };
        for (int first = 0; first < plan.block_threads; first += warp) {
            std::map<std::pair<int, int>, Rotation> written;
            const auto for_each_thread = [&](auto&& f) {
                for (int thread = first; thread < first + warp; ++thread) {
                    const StorePlace place = place_over_head(map, block, thread);
                    f(place, rotation_column(thread, plan.team, place.sharers));
                }
            };
            for_each_thread([&](const StorePlace& place, int column) {
                ASSERT_LT(column, warp);
                for (int pair = place.sharer; pair < plan.vector; pair += place.sharers) {
                    ASSERT_TRUE(written.emplace(std::pair{pair, column}, rotation_of(place)).second) << "written twice";
                }
            });
            for_each_thread([&](const StorePlace& place, int column) {
                for (int pair = 0; pair < plan.vector; ++pair) {
                    ASSERT_EQ(written.at({pair, column}), rotation_of(place));
                }
            });
        }
    }

    // Every component once, and all components of a row in one reduction.
    void expect_each_component_once() const {
        std::unordered_map<int64_t, int64_t> sum_of_row, row_of_sum;
        for (int64_t component = 0; component < static_cast<int64_t>(sums_.size()); ++component) {
            ASSERT_NE(sums_[component], none) << "component " << component % shape_.head_dim << " left out";
            const int64_t row = row_of(component / shape_.head_dim);
            ASSERT_EQ(sum_of_row.emplace(row, sums_[component]).first->second, sums_[component]);
            ASSERT_EQ(row_of_sum.emplace(sums_[component], row).first->second, row);
        }
    }

private:
    static constexpr int64_t none = -1;

    int heads_in_all() const { return shape_.q_heads + 2 * shape_.kv_heads + shape_.gate_heads; }

    int heads_of(HeadKind kind) const {
        const int heads[] = {shape_.q_heads, shape_.kv_heads, shape_.kv_heads, shape_.gate_heads};
        return heads[static_cast<int>(kind)];
    }

    int heads_before(HeadKind kind) const {
        int heads = 0;
        for (int before = 0; before < static_cast<int>(kind); ++before)
            heads += heads_of(static_cast<HeadKind>(before));
        return heads;
    }

    int64_t row_of(int64_t head) const {
        if (shape_.over == NormOver::head) return head;
        const auto of_token = static_cast<int>(head % heads_in_all());
        int kind = 0;
        while (kind + 1 < head_kinds && of_token >= heads_before(static_cast<HeadKind>(kind + 1))) ++kind;
        return head / heads_in_all() * head_kinds + kind;
    }

    void touch(int batch, int token, HeadKind kind, int head, int at, int64_t sum) {
        ASSERT_LT(at, shape_.head_dim);
        const int64_t row = (batch * shape_.tokens + token) * heads_in_all() + heads_before(kind) + head;
        int64_t& found = sums_.at(row * shape_.head_dim + at);
        ASSERT_EQ(found, none) << "component " << at << " of head " << head << " twice";
        found = sum;
    }

    void run_row(const StoreRow& row, int64_t sum) {
        const bool over_head = shape_.over == NormOver::head;
        const int end = over_head ? row.row + 1 : heads_of(row.kind);
        for (int head = over_head ? row.row : 0; head < end; ++head) {
            for (int at = 0; at < shape_.head_dim; ++at) touch(row.batch, row.token, row.kind, head, at, sum);
        }
    }

    void run_in_registers(const QkNormRotaryAndCacheMap<PlainDivmod>& map, const StorePlace& place, int64_t team) {
        if (!place.active) return;
        const int count = heads_of(place.kind);
        const int heads_per_thread = map.plan.heads_per_thread;
        // As in the kernel.
        const bool has_tables = map.plan.needs_lookup && heads_per_thread == norm_heads_per_thread_with_lookup;
        const StridedHeads heads = has_tables ? map.heads_of<true>(place, count) : map.heads_of<false>(place, count);
        ASSERT_TRUE(heads.exists(0)) << "an idle thread";
        ASSERT_FALSE(heads.exists(heads_per_thread)) << "heads left out";
        with_pairing_and_vector(shape_.pairing, map.plan.vector, [&]<Pairing pairing, int Vector>() {
            const int half = shape_.rotary_dim / 2;
            const WholeHeadLayout<pairing, Vector> lane(place.lane, half);
            for (int j = 0; heads.exists(j); ++j) {
                const int head = heads.head(j);
                if (place.rotates()) {
                    ASSERT_EQ(heads.table, head / (count / shape_.table_heads));
                }
                // Over a head, each of a thread's heads has a reduction of its own.
                const int64_t sum = shape_.over == NormOver::head ? team * heads_per_thread + j : team;
                const auto touch_component = [&](int at) {
                    touch(place.batch, place.token, place.kind, head, at, sum);
                };
                if (lane.rotates()) {
                    rotate_components<pairing, Vector>(lane, half, touch_component);
                } else {
                    for (int i = 0; i < Vector; ++i) {
                        touch_component(lane.first() + i);
                        touch_component(lane.second() + i);
                    }
                }
            }
        });
    }

    QkNormRotaryAndCacheShape shape_;
    std::vector<int64_t> sums_;
};

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_shape(
        {{1, 1, 1}, {5, 3, 0}, {0, 2, 0}, {3, 0, 3}, {16, 2, 16}, {32, 8, 32, 8}, {6, 3, 0, 3}, {8, 2, 0, 1, true}},
        {16, 17, 80, 96, 120, 128, 256}, {{2, 3}}, [](const QkNormRotaryAndCacheShape& shape) {
            for (const QkNormRotaryAndCachePlan& planned : every_norm_plan(shape)) {
                Coverage kernel(shape);
                kernel.run(planned);
                if (!::testing::Test::HasFatalFailure()) kernel.expect_each_component_once();
                if (::testing::Test::HasFailure()) return;
            }
        });
}

// Several tiles, four sharers, and sharers with different numbers of heads.
TEST(Kernel, SharesRotationsOfManyTokens) {
    for (const HeadCounts heads : {HeadCounts{32, 16, 32}, {30, 12, 0}, {64, 8, 0}, {40, 48, 40}}) {
        for (const int head_dim : {32, 64, 128, 256}) {
            for (const int64_t tokens : {1, 40, 131}) {
                QkNormRotaryAndCacheShape shape = qwen3_shape(tokens);
                shape.batch = 2;
                shape.q_heads = heads.q_heads;
                shape.kv_heads = heads.kv_heads;
                shape.gate_heads = heads.gate_heads;
                shape.head_dim = shape.rotary_dim = head_dim;
                SCOPED_TRACE(describe(shape));
                Coverage kernel(shape);
                kernel.run(plan_with(shape, h200, 8));
                if (!HasFatalFailure()) kernel.expect_each_component_once();
                if (HasFailure()) return;
            }
        }
    }
}

// --- launches

TEST(Launches, TakeEveryTokenOnce) {
    for (const int64_t per_launch : {1, 2, 5, 7, 21}) {
        for (const StoredAs stored_as : every_stored_as) {
            NormCacheOptions options;
            options.cache.rotary.batch = 3;
            options.cache.rotary.tokens = 7;
            options.cache.rotary.in_place = true;
            options.cache.blocks = 9;
            options.q_stored_as = stored_as;
            options.q_scale = is_float8(stored_as) ? QScale::computed : QScale::none;
            options.has_gate = true;
            NormCacheCase norm(options);
            for_each_launch(norm.args(), per_launch,
                            [](const QkNormRotaryAndCacheArgs& part) { qk_norm_rotary_and_cache_cpu(part); });
            norm.expect_stored();
        }
    }
}

// --- alignment

TEST(Alignment, IsLostByOneElementOfAnyTensor) {
    for (const StoredAs stored_as : every_stored_as) {
        NormCacheOptions o;
        o.cache.rotary.dtype = DType::bfloat16;
        o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = 64;
        o.cache.cached_as = o.q_stored_as = stored_as;
        o.has_gate = true;
        NormCacheCase norm(o);
        const QkNormRotaryAndCacheArgs aligned = norm.args();
        const auto moved = [](const void* pointer, int bytes) {
            return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) / 16 * 16 + bytes);
        };
        const auto is_aligned = [&](int which) {
            QkNormRotaryAndCacheArgs args = aligned;
            const auto offset = [&](int number) { return number == which ? 1 : 0; };
            args.rotary.q.in = moved(args.rotary.q.in, 2 * offset(0));
            args.rotary.q.out = moved(args.rotary.q.out, size_of(stored_as, DType::bfloat16) * offset(1));
            args.k.view.in = moved(args.k.view.in, 2 * offset(2));
            args.k.view.out = moved(args.k.view.out, size_of(stored_as, DType::bfloat16) * offset(3));
            args.v.view.in = moved(args.v.view.in, 2 * offset(4));
            args.v.view.out = moved(args.v.view.out, size_of(stored_as, DType::bfloat16) * offset(5));
            args.gate.in = args.gate.out = moved(args.gate.in, 2 * offset(6));
            args.q_weight = moved(args.q_weight, 2 * offset(7));
            args.k_weight = moved(args.k_weight, 2 * offset(8));
            return shape_of(args).aligned;
        };
        EXPECT_TRUE(is_aligned(-1));
        for (int which = 0; which < 9; ++which) EXPECT_FALSE(is_aligned(which)) << which;
    }
}

}  // namespace
}  // namespace mrrope
