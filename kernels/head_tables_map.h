#pragma once

#include "mrrope/rotation.h"

// How heads are divided among head tables, for host and device: no thread has heads of two tables.

namespace mrrope {

// Integer division for host tests. Kernels use cutlass::FastDivmod, which multiplies and shifts.
struct PlainDivmod {
    int divisor = 1;

    MRROPE_HOST_DEVICE void operator()(int& quotient, int& remainder, int dividend) const {
        quotient = dividend / divisor;
        remainder = dividend % divisor;
    }
};

// The heads of a thread: `first` and every `step`-th after it, below `end`. All use the head table `table`.
struct StridedHeads {
    int first;
    int step;
    int end;
    int table;

    MRROPE_HOST_DEVICE int head(int j) const { return first + j * step; }
    MRROPE_HOST_DEVICE bool exists(int j) const { return head(j) < end; }
    MRROPE_HOST_DEVICE int count() const { return (end - first + step - 1) / step; }
};

// The groups of q or of k, one group per thread: first those of the first table's heads, then the second's.
template <class Divmod>
struct HeadTablesMap {
    Divmod groups;  // per table
    int heads;      // per table

    static HeadTablesMap of(int heads, int groups, int table_heads) {
        // No groups: there are no heads, or the kernel takes whole rows.
        return {Divmod{groups < table_heads ? 1 : groups / table_heads}, heads / table_heads};
    }

    MRROPE_HOST_DEVICE StridedHeads heads_of(int group) const {
        int table, first;
        groups(table, first, group);
        return {table * heads + first, groups.divisor, (table + 1) * heads, table};
    }
};

}  // namespace mrrope
