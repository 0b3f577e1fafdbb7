#pragma once

#include <cstdint>

#include "head_tables_map.h"
#include "lane_layout.h"
#include "mrrope/rotary.h"
#include "rotary_plan.h"

// Thread-to-element map of the rotary kernel, for host and device. Neighbouring threads take neighbouring vectors, then
// head groups, then tokens; or, where tokens are adjacent in memory, tokens before head groups.

namespace mrrope {

struct RotaryPlace {
    int lane;
    int group;  // of heads
    int batch;
    int token;
};

template <class Divmod>
struct RotaryMap {
    Divmod lanes;
    Divmod head_groups;
    Divmod tokens;

    static RotaryMap of(const RotaryPlan& plan, int64_t tokens) {
        return {Divmod{plan.lanes}, Divmod{plan.head_groups}, Divmod{static_cast<int>(tokens)}};
    }

    template <bool tokens_inside = false>
    MRROPE_HOST_DEVICE RotaryPlace place(int thread) const {
        RotaryPlace place;
        int item, rest;
        lanes(item, place.lane, thread);
        if constexpr (tokens_inside) {
            tokens(rest, place.token, item);
            head_groups(place.batch, place.group, rest);
        } else {
            head_groups(rest, place.group, item);
            tokens(place.batch, place.token, rest);
        }
        return place;
    }
};

// The heads of q and of k that use one head table, numbered through q and then k: all heads, if there is one table.
struct HeadsOfTable {
    int table;
    int q_heads;  // of this table
    int k_heads;

    MRROPE_HOST_DEVICE int count() const { return q_heads + k_heads; }
    MRROPE_HOST_DEVICE bool is_q(int head) const { return head < q_heads; }
    // The number of the head among all heads of q, or of k.
    MRROPE_HOST_DEVICE int index_of(int head) const {
        return is_q(head) ? table * q_heads + head : table * k_heads + head - q_heads;
    }
};

// Groups of neighbouring heads, one group per thread: first those of the first table's heads, then the second's.
template <class Divmod>
struct HeadGroupsMap {
    Divmod groups;  // per table
    int q_heads;    // per table
    int k_heads;

    static HeadGroupsMap of(const RotaryPlan& plan, const RotaryArgs& args) {
        const int tables = plan.table_heads;
        return {Divmod{plan.head_groups / tables}, args.q.heads / tables, args.k.heads / tables};
    }

    // Replaces `group` by its number among the table's groups.
    MRROPE_HOST_DEVICE HeadsOfTable table_of(int& group) const {
        int table, group_of_table;
        groups(table, group_of_table, group);
        group = group_of_table;
        return {table, q_heads, k_heads};
    }
};

// The heads of a group, among `heads` heads.
struct HeadRange {
    int first;
    int count;

    MRROPE_HOST_DEVICE HeadRange(int group, int heads_per_thread, int heads) {
        first = group * heads_per_thread;
        count = heads_per_thread < heads - first ? heads_per_thread : heads - first;
    }
};

// A token's head of q or k, numbered as in HeadsOfTable. Index: the type in which indices are multiplied by strides;
// uint32_t takes an instruction less.
template <class Element, class Index = int64_t>
struct HeadPointers {
    const Element* in;
    Element* out;

    MRROPE_HOST_DEVICE HeadPointers(const RotaryArgs& args, const HeadsOfTable& heads, int batch, int token, int head) {
        const HeadsView& view = heads.is_q(head) ? args.q : args.k;
        const auto steps = [](int index, int64_t stride) {
            return static_cast<int64_t>(static_cast<Index>(index) * static_cast<uint64_t>(stride));
        };
        const int index = heads.index_of(head);
        const auto offset = [&](const HeadStrides& strides) {
            return steps(batch, strides.batch) + steps(token, strides.token) + steps(index, strides.head);
        };
        in = static_cast<const Element*>(view.in) + offset(view.in_strides);
        out = static_cast<Element*>(view.out) + offset(view.out_strides);
    }
};

}  // namespace mrrope
