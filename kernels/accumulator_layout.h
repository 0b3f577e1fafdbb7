#pragma once

#include "mrrope/rotation.h"

// Which rows and columns of a wgmma tile a thread's accumulators hold, and which of them form a pair. For host and
// device: the plan tests check every pair. No pair is split between threads, so epilogues rotate in registers.

namespace mrrope {

// The m64 accumulator fragment of wgmma. Lane t of a quad (t = lane % 4, `quad_lane`) holds columns 8 g + 2 t and
// 8 g + 2 t + 1 of every group g of 8 columns, in two rows, 8 apart.
struct AccumulatorLayout {
    static constexpr int per_group = 4;  // accumulators: 2 rows x 2 columns

    // Column and row of accumulator i of a thread, relative to its tile and to the thread's first row.
    MRROPE_HOST_DEVICE static constexpr int column(int quad_lane, int i) {
        return 8 * (i / per_group) + 2 * quad_lane + i % 2;
    }
    MRROPE_HOST_DEVICE static constexpr int row(int i) { return i / 2 % 2; }  // times 8
};

// `interleaved` pairing, tokens along the rows: accumulators `first` and `first` + 1 hold pair `pair`, counted from the
// visit's first column.
struct InterleavedAccumulators {
    MRROPE_HOST_DEVICE static constexpr int first(int group, int row) {
        return AccumulatorLayout::per_group * group + 2 * row;
    }
    MRROPE_HOST_DEVICE static constexpr int pair(int quad_lane, int group) { return 4 * group + quad_lane; }
};

// `halves` pairing, tokens along the rows. Partners lie `distance` groups apart. An epilogue visit holds one or more
// blocks of 2 * distance groups, each as long as the rotated part of a head. Accumulator j of a group is in row j / 2
// and belongs to pair first_pair + j % 2.
template <int distance>
struct HalvesAccumulators {
    static constexpr int columns = 16 * distance;  // of a block

    MRROPE_HOST_DEVICE static constexpr int first(int block, int group, int j) {
        return AccumulatorLayout::per_group * (2 * distance * block + group) + j;
    }
    MRROPE_HOST_DEVICE static constexpr int second(int block, int group, int j) {
        return first(block, group, j) + AccumulatorLayout::per_group * distance;
    }
    MRROPE_HOST_DEVICE static constexpr int first_pair(int quad_lane, int group) { return 8 * group + 2 * quad_lane; }
};

// `halves` pairing, transposed: 128 components along the rows, in two instructions of 64, and tokens along the columns.
// For each of its tokens, a thread holds components c and c + 8 (`lower` = 0, 1), and their partners 64 further on
// (`half` = 1).
struct TransposedAccumulators {
    MRROPE_HOST_DEVICE static constexpr int first_component(int thread) { return thread / 32 * 16 + thread % 32 / 4; }
    MRROPE_HOST_DEVICE static constexpr int component_offset(int lower, int half) { return 8 * lower + 64 * half; }

    // The lanes of a warp load the positions of 32 tokens at a time, a batch. Token `odd` of a lane's two in a group of
    // 8 is in batch batch_of(group), where lane holder(...) has its position.
    MRROPE_HOST_DEVICE static constexpr int batch_of(int group) { return group / 4; }
    MRROPE_HOST_DEVICE static constexpr int holder(int lane, int group, int odd) {
        return 8 * (group % 4) + 2 * (lane % 4) + odd;
    }
};

}  // namespace mrrope
