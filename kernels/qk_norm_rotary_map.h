#pragma once

#include <cstdint>

#include "head_tables_map.h"
#include "lane_layout.h"
#include "qk_norm_rotary_plan.h"

// Thread-to-element maps of the norm kernels, forward and backward, for host and device.

namespace mrrope {

// A thread of the forward kernel that holds heads in registers.
struct NormPlace {
    int lane;
    int group;   // of heads of q or of k
    int groups;  // of q or of k
    int batch;
    int token;
    bool is_q;
    bool active;  // others only take part in reductions
};

// A block of a two-pass kernel: one row.
struct NormRow {
    int batch;
    int token;
    bool is_q;
    int row;  // of q or of k: the head, or 0 over all heads
};

template <class Divmod>
struct QkNormRotaryMap {
    QkNormRotaryPlan plan;
    Divmod lanes;   // by plan.lanes; over a head, in registers: by plan.team
    Divmod groups;  // over a head, in registers: head groups per token; else rows per token
    Divmod tokens;
    int q_rows;   // how many of the rows per token are q's
    int threads;  // over a head, in registers: of the launch
    HeadTablesMap<Divmod> q_tables;
    HeadTablesMap<Divmod> k_tables;

    static QkNormRotaryMap of(const QkNormRotaryPlan& plan, const QkNormRotaryShape& shape) {
        const bool by_team = plan.in_registers && shape.over == NormOver::head;
        return {
            .plan = plan,
            .lanes = Divmod{by_team ? plan.team : plan.lanes},
            .groups = Divmod{by_team ? plan.groups() : static_cast<int>(blocks_of(plan, shape.over, 1))},
            .tokens = Divmod{static_cast<int>(shape.tokens)},
            .q_rows = plan.in_registers ? (plan.q_groups > 0 ? 1 : 0) : plan.q_groups,
            .threads = by_team ? static_cast<int>(shape.batch * shape.tokens * plan.team * plan.groups()) : 0,
            .q_tables = HeadTablesMap<Divmod>::of(shape.q_heads, plan.q_groups, shape.table_heads),
            .k_tables = HeadTablesMap<Divmod>::of(shape.k_heads, plan.k_groups, shape.table_heads),
        };
    }

    // The heads of a thread, in registers; `has_tables`: there may be several head tables.
    template <bool has_tables>
    MRROPE_HOST_DEVICE StridedHeads heads_of(const NormPlace& place, int heads) const {
        if constexpr (has_tables) return (place.is_q ? q_tables : k_tables).heads_of(place.group);
        return {place.group, place.groups, heads, 0};
    }

    template <NormOver over>
    MRROPE_HOST_DEVICE NormPlace place(int block, int thread_in_block) const {
        NormPlace place;
        int item, member, sequence_token;
        if constexpr (over == NormOver::head) {
            const int thread = block * norm_block_threads + thread_in_block;
            lanes(item, member, thread < threads - 1 ? thread : threads - 1);
            groups(sequence_token, place.group, item);
            place.is_q = place.group < plan.q_groups;
            if (!place.is_q) place.group -= plan.q_groups;
            place.active = thread < threads && member < plan.lanes;
        } else {
            int row;
            lanes(place.group, member, thread_in_block);
            groups(sequence_token, row, block);
            place.is_q = row < q_rows;
            place.active = place.group < (place.is_q ? plan.q_groups : plan.k_groups);
            if (!place.active) place.group = 0;
        }
        place.groups = place.is_q ? plan.q_groups : plan.k_groups;
        place.lane = member < plan.lanes - 1 ? member : plan.lanes - 1;
        tokens(place.batch, place.token, sequence_token);
        return place;
    }

    MRROPE_HOST_DEVICE NormRow row(int block) const {
        NormRow found;
        int sequence_token, row;
        groups(sequence_token, row, block);
        tokens(found.batch, found.token, sequence_token);
        found.is_q = row < q_rows;
        found.row = found.is_q ? row : row - q_rows;
        return found;
    }
};

// The lane layout of two-pass kernels: a pair of components, by a pairing that is known at run time, for fewer kernels.
struct RowPair {
    Pairing pairing;
    int number;
    int half;  // of the rotated part, in components

    static constexpr bool crosses_vectors = true;

    static constexpr bool rotates() { return true; }
    MRROPE_HOST_DEVICE int first() const { return pairing == Pairing::halves ? number : 2 * number; }
    MRROPE_HOST_DEVICE int second() const { return pairing == Pairing::halves ? number + half : 2 * number + 1; }
    MRROPE_HOST_DEVICE int pair(int) const { return number; }
};

// Two-pass kernels: calls f(head, pair) for a thread's share of the rotated part of `heads` heads.
MRROPE_NO_EXEC_CHECK
template <class F>
MRROPE_HOST_DEVICE void for_each_row_pair(int thread, int heads, int half, F&& f) {
    for (int item = thread; item < heads * half; item += norm_row_block_threads) f(item / half, item % half);
}

// Two-pass kernels: calls f(head, component) for a thread's share of the unrotated tail, the last `tail` components.
MRROPE_NO_EXEC_CHECK
template <class F>
MRROPE_HOST_DEVICE void for_each_row_tail(int thread, int heads, int rotary_dim, int tail, F&& f) {
    for (int item = thread; item < heads * tail; item += norm_row_block_threads) {
        const int head = item / tail;
        f(head, rotary_dim + item % tail);
    }
}

// A block of the backward pass: number `block` of the `blocks` blocks of q or of k.
struct NormGradientBlock {
    bool is_q;
    int block;
    int blocks;
};

// A thread of the backward kernel that holds heads in registers. Over a head, its rows are groups of heads.
struct NormGradientThread {
    int slot;  // over a head: the block's team; over all heads: the group of heads
    int lane;
    bool has_lane;  // others only take part in reductions
    int slots;      // rows that a block processes at a time
    int rows;       // of q or of k, in the launch
};

// The row that a thread works on.
struct NormGradientRow {
    int group;  // of heads
    int batch;
    int token;
    bool active;
};

template <class Divmod>
struct QkNormRotaryGradientMap {
    QkNormRotaryGradientPlan plan;
    Divmod lanes;     // by plan.lanes; over a head: by plan.team
    Divmod q_groups;  // rows per token; over all heads: 1
    Divmod k_groups;
    Divmod tokens;
    int all_tokens;
    HeadTablesMap<Divmod> q_tables;
    HeadTablesMap<Divmod> k_tables;

    static QkNormRotaryGradientMap of(const QkNormRotaryGradientPlan& plan, const QkNormRotaryShape& shape) {
        const bool over_head = shape.over == NormOver::head;
        const auto rows = [&](int groups) { return over_head && groups > 0 ? groups : 1; };
        return {
            .plan = plan,
            .lanes = Divmod{over_head ? plan.team : plan.lanes},
            .q_groups = Divmod{rows(plan.q_groups)},
            .k_groups = Divmod{rows(plan.k_groups)},
            .tokens = Divmod{static_cast<int>(shape.tokens)},
            .all_tokens = static_cast<int>(shape.batch * shape.tokens),
            .q_tables = HeadTablesMap<Divmod>::of(shape.q_heads, plan.q_groups, shape.table_heads),
            .k_tables = HeadTablesMap<Divmod>::of(shape.k_heads, plan.k_groups, shape.table_heads),
        };
    }

    // The heads of a group, in registers.
    MRROPE_HOST_DEVICE StridedHeads heads_of(const NormGradientBlock& block, int group) const {
        return (block.is_q ? q_tables : k_tables).heads_of(group);
    }

    MRROPE_HOST_DEVICE NormGradientBlock block(uint32_t block) const {
        const bool is_q = static_cast<int>(block) < plan.q_blocks;
        return {is_q, static_cast<int>(is_q ? block : block - plan.q_blocks), is_q ? plan.q_blocks : plan.k_blocks};
    }

    // Groups of heads of q or of k.
    MRROPE_HOST_DEVICE int groups(const NormGradientBlock& block) const {
        return block.is_q ? plan.q_groups : plan.k_groups;
    }

    template <NormOver over>
    MRROPE_HOST_DEVICE NormGradientThread thread(const NormGradientBlock& block, int thread_in_block) const {
        constexpr bool over_head = over == NormOver::head;
        NormGradientThread thread;
        int member;
        lanes(thread.slot, member, thread_in_block);
        thread.lane = member < plan.lanes - 1 ? member : plan.lanes - 1;
        const int groups = this->groups(block);
        thread.has_lane = member < plan.lanes && (over_head || thread.slot < groups);
        thread.slots = over_head ? norm_gradient_block_threads / plan.team : 1;
        thread.rows = over_head ? all_tokens * groups : all_tokens;
        return thread;
    }

    // The thread's row among the `slots` rows from first_row on.
    template <NormOver over>
    MRROPE_HOST_DEVICE NormGradientRow row(const NormGradientBlock& block, const NormGradientThread& thread,
                                           int64_t first_row) const {
        constexpr bool over_head = over == NormOver::head;
        NormGradientRow found;
        const int64_t row = first_row + (over_head ? thread.slot : 0);
        found.active = thread.has_lane && row < thread.rows;
        int sequence_token;
        (block.is_q ? q_groups : k_groups)(sequence_token, found.group,
                                           static_cast<int>(found.active ? row : first_row));
        if constexpr (!over_head) found.group = thread.has_lane ? thread.slot : 0;
        tokens(found.batch, found.token, sequence_token);
        return found;
    }

    // Two-pass kernel: row number `row` of q or of k.
    MRROPE_HOST_DEVICE NormRow row(const NormGradientBlock& block, int64_t row) const {
        NormRow found;
        int sequence_token;
        (block.is_q ? q_groups : k_groups)(sequence_token, found.row, static_cast<int>(row));
        tokens(found.batch, found.token, sequence_token);
        found.is_q = block.is_q;
        return found;
    }
};

}  // namespace mrrope
