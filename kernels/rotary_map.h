#pragma once

#include <cstdint>

#include "lane_layout.h"
#include "mrrope/rotary.h"
#include "rotary_plan.h"

// Thread-to-element map of the rotary kernel, for host and device. Neighbouring threads take neighbouring vectors, then
// head groups, then tokens.

namespace mrrope {

// Integer division for host tests. Kernels use cutlass::FastDivmod, which multiplies and shifts.
struct PlainDivmod {
    int divisor = 1;

    MRROPE_HOST_DEVICE void operator()(int& quotient, int& remainder, int dividend) const {
        quotient = dividend / divisor;
        remainder = dividend % divisor;
    }
};

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

    MRROPE_HOST_DEVICE RotaryPlace place(int thread) const {
        RotaryPlace place;
        int item, sequence_token;
        lanes(item, place.lane, thread);
        head_groups(sequence_token, place.group, item);
        tokens(place.batch, place.token, sequence_token);
        return place;
    }
};

// The heads of a group, numbered through q and then k.
struct HeadRange {
    int first;
    int count;

    MRROPE_HOST_DEVICE HeadRange(int group, int heads_per_thread, int heads) {
        first = group * heads_per_thread;
        count = heads_per_thread < heads - first ? heads_per_thread : heads - first;
    }
};

// A token's head of q or k. `head` is numbered through q and then k.
template <class Element>
struct HeadPointers {
    const Element* in;
    Element* out;

    MRROPE_HOST_DEVICE HeadPointers(const RotaryArgs& args, int batch, int token, int head) {
        const bool is_q = head < args.q.heads;
        const HeadsView& view = is_q ? args.q : args.k;
        const int64_t index = is_q ? head : head - args.q.heads;
        const auto offset = [&](const HeadStrides& strides) {
            return batch * strides.batch + token * strides.token + index * strides.head;
        };
        in = static_cast<const Element*>(view.in) + offset(view.in_strides);
        out = static_cast<Element*>(view.out) + offset(view.out_strides);
    }
};

}  // namespace mrrope
