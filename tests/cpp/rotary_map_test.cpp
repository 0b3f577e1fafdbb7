#include "rotary_map.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "every_plan.h"
#include "kernel_lanes.h"
#include "rotary_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

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
TEST(RotaryMap, AddressesHeadsOfQAndThenOfK) {
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

TEST(RotaryMap, GivesEveryHeadItsTable) {
    for (const auto& [tables, q_per_table, k_per_table] :
         {std::tuple{1, 4, 1}, {2, 1, 0}, {2, 1, 1}, {3, 3, 1}, {8, 4, 1}, {3, 2, 3}, {4, 5, 2}, {2, 3, 0}}) {
        for (const int head_dim : {6, 16, 64, 128}) {
            for (const int element_size : {2, 4, 8}) {
                for (const TableLookup lookup :
                     {TableLookup::single, TableLookup::indexed, TableLookup::position_rows}) {
                    const RotaryShape shape{.batch = 2,
                                            .tokens = 3,
                                            .heads = tables * (q_per_table + k_per_table),
                                            .head_dim = head_dim,
                                            .rotary_dim = head_dim == 128 ? 64 : head_dim,
                                            .element_size = element_size,
                                            .alignment = 16,
                                            .lookup = lookup,
                                            .table_heads = tables};
                    SCOPED_TRACE(describe(shape));
                    for (const RotaryPlan& plan : every_plan(shape)) {
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

TEST(RotaryMap, TakesEveryComponentOfEveryHeadOnce) {
    for (const int heads : {1, 2, 3, 4, 5, 6, 7, 9, 40, 72}) {
        for (const int head_dim : {2, 4, 6, 10, 16, 24, 32, 48, 64, 80, 96, 100, 128, 192, 256, 512}) {
            for (const int rotary_dim : {2, 16, 32, head_dim / 4 * 2, head_dim - 2, head_dim}) {
                if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                for (const int element_size : {2, 4, 8}) {
                    for (const int alignment : {element_size, 8, 16}) {
                        for (const Pairing pairing : both_pairings) {
                            const RotaryShape shape{.batch = 2,
                                                    .tokens = heads > 9 ? 1 : 3,
                                                    .heads = heads,
                                                    .head_dim = head_dim,
                                                    .rotary_dim = rotary_dim,
                                                    .element_size = element_size,
                                                    .pairing = pairing,
                                                    .alignment = alignment};
                            for (const RotaryPlan& plan : every_plan(shape)) {
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

}  // namespace
}  // namespace mrrope
