#include "learnable_rotary_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "devices.h"
#include "kernel_lanes.h"
#include "learnable_rotary_map.h"
#include "rotary_map.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

std::string describe(const LearnableRotaryShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.q_heads) + "+" + std::to_string(s.k_heads) + " tables " + std::to_string(s.tables) +
           " head_dim " + std::to_string(s.head_dim) + " rotary_dim " + std::to_string(s.rotary_dim) + " element " +
           std::to_string(s.element_size) + (s.aligned ? " aligned" : " unaligned");
}

template <class F>
void for_each_shape(const std::vector<std::pair<int64_t, int64_t>>& sizes, F&& f) {
    const struct {
        int q, k, tables;
    } heads[] = {{1, 0, 1}, {0, 2, 2}, {5, 3, 1}, {9, 3, 3}, {32, 8, 8}, {4, 4, 4}, {700, 0, 700}};
    for (const auto& [q, k, tables] : heads) {
        for (const auto& [head_dim, rotary_dim] :
             {std::pair{2, 2}, {17, 6}, {64, 64}, {80, 64}, {128, 128}, {576, 64}, {600, 600}, {2048, 2048}}) {
            for (const int element_size : {2, 4, 8}) {
                for (const bool aligned : {false, true}) {
                    for (const auto& [batch, tokens] : sizes) {
                        const LearnableRotaryShape shape{batch,      tokens,       q,      k, tables, head_dim,
                                                         rotary_dim, element_size, aligned};
                        SCOPED_TRACE(describe(shape));
                        f(shape);
                        if (::testing::Test::HasFailure()) return;
                    }
                }
            }
        }
    }
}

TEST(LearnablePlan, SatisfiesItsInvariantsForEveryShape) {
    for_each_shape({{1, 1}, {3, 17}, {1, 8192}, {2, 1 << 18}}, [](const LearnableRotaryShape& shape) {
        const LearnableRotaryPlan planned = plan(shape, h200);
        EXPECT_EQ(planned.vector * planned.lanes * 2, shape.rotary_dim);
        EXPECT_TRUE(planned.vector == 1 || planned.vector * shape.element_size == 16);
        EXPECT_LE(planned.slots * planned.lanes_per_pass, learnable_block_threads);
        EXPECT_GE(planned.slots, 1);
        EXPECT_GE(planned.blocks_per_table, 1);
        // One wave, or a block for each table.
        const int wave = h200.sms * learnable_blocks_per_sm;
        EXPECT_LE(planned.blocks(), std::max(wave, shape.tables));
        // Every block has an item: each writes partial sums.
        EXPECT_LT(int64_t{planned.blocks_per_table - 1} * planned.slots,
                  shape.batch * shape.tokens * planned.head_groups);
    });
}

// As few rounds as a full wave takes, each of them but for the rest of a division full.
TEST(LearnablePlan, FillsTheRoundsOfTheDevice) {
    for (const int64_t tokens : {1000, 8192, 20000, 131072}) {
        for (const Device& device : {h200, a100}) {
            const LearnableRotaryShape shape{1, tokens, 32, 8, 8, 128, 128, 2, true};
            const LearnableRotaryPlan planned = plan(shape, device);
            const int64_t items = tokens * planned.head_groups;
            const int64_t wave = device.sms * learnable_blocks_per_sm / shape.tables * planned.slots;
            const int64_t round = int64_t{planned.blocks_per_table} * planned.slots;
            const int64_t rounds = (items + round - 1) / round;
            EXPECT_EQ(rounds, (items + wave - 1) / wave) << tokens;
            EXPECT_LT(rounds * round - items, planned.slots * (rounds + 1)) << tokens;
        }
    }
}

// Runs the kernel's index arithmetic on counters instead of heads.
template <Pairing pairing, int Vector>
void expect_each_component_once(const LearnableRotaryShape& shape) {
    const LearnableRotaryPlan planned = plan(shape, Device{.sms = 3});
    const auto map = LearnableRotaryMap<PlainDivmod>::of(planned, shape);
    const int heads = shape.q_heads + shape.k_heads;
    const int half = shape.rotary_dim / 2;
    std::vector<int> touched(shape.batch * shape.tokens * heads * shape.head_dim);
    for (int number = 0; number < planned.blocks(); ++number) {
        const LearnableBlock block = map.block(number);
        ASSERT_LT(block.table, shape.tables);
        ASSERT_LT(block.number, planned.blocks_per_table);
        for (int i = 0; i < learnable_block_threads; ++i) {
            int slot, lane;
            map.thread(slot, lane, i);
            for (int first = 0; first < planned.lanes; first += planned.lanes_per_pass) {
                const LaneLayout<pairing, Vector> layout{first + lane, half};
                if (slot >= planned.slots || layout.lane >= planned.lanes) continue;
                uint32_t at = map.first_item(block, slot);
                for (LearnableItem item = map.item_or_none(at); item.heads > 0; item = map.item_or_none(at)) {
                    at += map.item_step();
                    for (int j = 0; j < item.heads; ++j) {
                        const LearnableHead head = map.head(block.table, item.first_head + j);
                        const int count = head.is_q ? shape.q_heads : shape.k_heads;
                        ASSERT_EQ(head.head / (count / shape.tables), block.table);
                        const int64_t token = item.batch * shape.tokens + item.token;
                        int* components =
                            touched.data() +
                            (token * heads + head.head + (head.is_q ? 0 : shape.q_heads)) * shape.head_dim;
                        rotate_components<pairing, Vector>(layout, half, [&](int c) { ++components[c]; });
                        for (int c = first_tail_component<Vector>(layout.lane, shape.rotary_dim); c < shape.head_dim;
                             c += tail_step<Vector>(planned.lanes)) {
                            for (int v = 0; v < Vector; ++v) ++components[c + v];
                        }
                    }
                }
            }
        }
    }
    for (const int count : touched) ASSERT_EQ(count, 1);
}

TEST(LearnableMap, CoversEveryComponentOnce) {
    for_each_shape({{1, 1}, {2, 5}, {1, 40}}, [](const LearnableRotaryShape& shape) {
        if (int64_t{shape.tables} * shape.head_dim > 100000) return;
        for (const Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
            with_pairing_and_vector(pairing, plan(shape, h200).vector,
                                    [&]<Pairing p, int Vector>() { expect_each_component_once<p, Vector>(shape); });
        }
    });
}

TEST(LearnablePlan, GradientsMustBeAlignedToo) {
    LearnableRotaryGradientArgs args;
    args.call.rotary.q.heads = 2;
    args.call.rotary.dtype = DType::bfloat16;
    args.call.rotary.q.in_strides = args.call.rotary.q.out_strides = args.q.strides = {512, 256, 128};
    EXPECT_TRUE(shape_of(args).aligned);
    args.q.strides.head = 129;
    EXPECT_FALSE(shape_of(args).aligned);
    args.q.strides.head = 128;
    args.q.data = reinterpret_cast<const void*>(2);
    EXPECT_FALSE(shape_of(args).aligned);
}

}  // namespace
}  // namespace mrrope
