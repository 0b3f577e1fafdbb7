#pragma once

#include <cstdint>

#include "lane_layout.h"
#include "learnable_rotary_plan.h"

// Thread-to-element map of the backward pass of learnable_rotary, for host and device. An item is a group of heads of
// one token that use one table. Blocks of different tables alternate, so that blocks that run together read the same
// tokens.

namespace mrrope {

struct LearnableBlock {
    int table;
    int number;  // among the blocks of its table: its row of partial sums
};

struct LearnableItem {
    int batch;
    int token;
    int first_head;  // of the table's: those of q, then those of k
    int heads;
};

// One head of q or of k.
struct LearnableHead {
    bool is_q;
    int head;

    MRROPE_HOST_DEVICE LearnableHead(int table, int head_of_table, int q_heads, int k_heads)
        : is_q(head_of_table < q_heads),
          head(is_q ? table * q_heads + head_of_table : table * k_heads + head_of_table - q_heads) {}
};

template <class Divmod>
struct LearnableRotaryMap {
    LearnableRotaryPlan plan;
    Divmod tables;
    Divmod lanes_per_pass;
    Divmod head_groups;
    Divmod tokens;
    int q_heads;  // per table
    int k_heads;
    uint32_t items;  // per table; below 2^31, so that item_step more do not overflow

    static LearnableRotaryMap of(const LearnableRotaryPlan& plan, const LearnableRotaryShape& shape) {
        return {.plan = plan,
                .tables = Divmod{plan.tables},
                .lanes_per_pass = Divmod{plan.lanes_per_pass},
                .head_groups = Divmod{plan.head_groups},
                .tokens = Divmod{static_cast<int>(shape.tokens)},
                .q_heads = shape.q_heads / plan.tables,
                .k_heads = shape.k_heads / plan.tables,
                .items = static_cast<uint32_t>(shape.batch * shape.tokens * plan.head_groups)};
    }

    MRROPE_HOST_DEVICE LearnableBlock block(int block) const {
        LearnableBlock found;
        tables(found.number, found.table, block);
        return found;
    }

    // The slot of a thread and its lane in the pass. Slots from plan.slots on are idle.
    MRROPE_HOST_DEVICE void thread(int& slot, int& lane, int thread) const { lanes_per_pass(slot, lane, thread); }

    MRROPE_HOST_DEVICE uint32_t first_item(const LearnableBlock& block, int slot) const {
        return block.number * plan.slots + slot;
    }
    MRROPE_HOST_DEVICE uint32_t item_step() const { return plan.blocks_per_table * plan.slots; }

    MRROPE_HOST_DEVICE LearnableItem item(uint32_t number) const {
        LearnableItem found;
        int sequence_token, group;
        head_groups(sequence_token, group, static_cast<int>(number));
        tokens(found.batch, found.token, sequence_token);
        found.first_head = group * learnable_heads_per_thread;
        const int left = q_heads + k_heads - found.first_head;
        found.heads = left < learnable_heads_per_thread ? left : learnable_heads_per_thread;
        return found;
    }

    // Without heads from `items` on.
    MRROPE_HOST_DEVICE LearnableItem item_or_none(uint32_t number) const {
        return number < items ? item(number) : LearnableItem{};
    }

    MRROPE_HOST_DEVICE LearnableHead head(int table, int head_of_table) const {
        return {table, head_of_table, q_heads, k_heads};
    }
};

}  // namespace mrrope
