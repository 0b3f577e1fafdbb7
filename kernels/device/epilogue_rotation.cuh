#pragma once

#include <cutlass/fast_math.h>

#include "device/head_fragment.cuh"
#include "mrrope/qkv_rotary.h"

// Parameters of the rotation in the projection's epilogues.

namespace mrrope {

// The position of every row of the product.
struct RowPositions {
    PositionsView view;
    cutlass::FastDivmod tokens;
    int rows;

    // Rows of tile padding get the last position: a valid load, whose result is not stored.
    __device__ int64_t operator()(int row) const {
        int sequence, token;
        tokens(sequence, token, min(row, rows - 1));
        return load_position(view, 0, sequence, token);
    }
};

template <class Element>
struct EpilogueRotation {
    const Element* bias;
    RowPositions positions;
    const uint64_t* table;
    cutlass::FastDivmod head_dim;
    int rotary_dim;
    int rotated_columns;
    int columns;

    static EpilogueRotation of(const QkvRotaryArgs& args) {
        return {
            .bias = static_cast<const Element*>(args.bias),
            .positions = {args.positions, cutlass::FastDivmod(static_cast<int>(args.tokens)),
                          static_cast<int>(args.rows())},
            .table = args.table,
            .head_dim = cutlass::FastDivmod(args.head_dim),
            .rotary_dim = args.rotary_dim,
            .rotated_columns = (args.q_heads + args.kv_heads) * args.head_dim,
            .columns = args.outputs(),
        };
    }
};

}  // namespace mrrope
