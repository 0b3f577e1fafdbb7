#pragma once

#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_conversion.h>

#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>

#include "device/dependent_launch.cuh"
#include "device/hardware_cos_sin.cuh"
#include "device/head_fragment.cuh"
#include "mrrope/rotation.h"
#include "qkv_rotary_plan.h"

namespace mrrope {

// The position of every row of a product.
struct RowPositions {
    PositionsView view;
    cutlass::FastDivmod tokens;
    int rows;

    // Rows past the last one, of a tile that hangs over the edge, turn by anything that can be read.
    __device__ int64_t operator()(int row) const {
        int sequence, token;
        tokens(sequence, token, min(row, rows - 1));
        return position_at(view, 0, sequence, token);
    }
};

// What it takes to rotate a product: where bias, positions and frequencies are, and which columns turn.
template <class Element>
struct ProductRotation {
    const Element* bias;
    RowPositions positions;
    const uint64_t* table;
    cutlass::FastDivmod head_dim;
    int rotary_dim;
    int rotated_columns;
    int columns;

    static ProductRotation of(const QkvRotaryArgs& args) {
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

// What CUTLASS's epilogue does to the accumulators before it stores them: adds the bias, rotates what belongs to q and
// k, rounds once.
//
// Of a tile's accumulators, thread t of each four holds the columns 8 g + 2 t and 8 g + 2 t + 1 of every group g of 8
// columns, in two rows, 8 apart: both of an interleaved pair, and both of (i, i + distance) where the distance is a
// multiple of 8. No pair is ever shared between threads. Visited are columns_at_a_time columns of these two rows at
// once.
template <class Element, Pairing pairing>
struct RotatingEpilogue {
    static constexpr int groups = columns_at_a_time(pairing) / 8;

    struct SharedStorage {};

    using Arguments = ProductRotation<Element>;
    using Params = Arguments;

    template <class ProblemShape>
    static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
        return arguments;
    }
    template <class ProblemShape>
    static bool can_implement(const ProblemShape&, const Arguments&) {
        return true;
    }
    template <class ProblemShape>
    static size_t get_workspace_size(const ProblemShape&, const Arguments&) {
        return 0;
    }
    template <class ProblemShape>
    static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*, cudaStream_t,
                                                cutlass::CudaHostAdapter* = nullptr) {
        return cutlass::Status::kSuccess;
    }

    CUTLASS_HOST_DEVICE RotatingEpilogue() {}
    CUTLASS_HOST_DEVICE RotatingEpilogue(const Params& params, const SharedStorage&) : params_(&params) {}

    CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
    CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

    template <class... Args>
    CUTLASS_DEVICE auto get_producer_load_callbacks(
        const cutlass::epilogue::fusion::detail::ProducerLoadArgs<Args...>&) {
        return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
    }

    template <int row_steps, int rows_a_step>
    struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
        const Params& params;
        int first_row;     // of this thread
        int first_column;  // of the tile
        int t;
        int64_t position[row_steps][2];

        // Cosine and sine of `count` neighbouring pairs, in both rows.
        template <int count>
        struct Turns {
            CosSin<float> by[2][count];
        };

        CUTLASS_DEVICE Callbacks(const Params& params, int first_row, int first_column, int t)
            : params(params), first_row(first_row), first_column(first_column), t(t) {}

        CUTLASS_DEVICE void begin() {
            wait_for_previous_kernel();
            CUTLASS_PRAGMA_UNROLL
            for (int step = 0; step < row_steps; ++step) {
                CUTLASS_PRAGMA_UNROLL
                for (int r = 0; r < 2; ++r) position[step][r] = params.positions(row_of(step, r));
            }
        }

        template <class Accumulator, int size>
        CUTLASS_DEVICE cutlass::Array<Element, size> visit(const cutlass::Array<Accumulator, size>& accumulators, int,
                                                           int step, int column_step) {
            static_assert(size == 4 * groups);
            cutlass::Array<float, size> x = accumulators;
            const int column = first_column + column_step * 8 * groups;
            if (params.bias != nullptr) add_bias(x, column);
            if (column < params.rotated_columns) {
                if constexpr (pairing == Pairing::interleaved) {
                    rotate_neighbours(x, column, step);
                } else if (params.rotary_dim == 128) {
                    rotate_halves<8>(x, column, step);
                } else {
                    rotate_halves<4>(x, column, step);
                }
            }
            return cutlass::NumericArrayConverter<Element, float, size>{}(x);
        }

    private:
        CUTLASS_DEVICE int component_of(int column) const {
            int head, component;
            params.head_dim(head, component, column);
            return component;
        }

        CUTLASS_DEVICE int row_of(int step, int r) const { return first_row + step * rows_a_step + 8 * r; }

        template <int size>
        CUTLASS_DEVICE void add_bias(cutlass::Array<float, size>& x, int column) const {
            using Two = cutlass::AlignedArray<Element, 2>;
            CUTLASS_PRAGMA_UNROLL
            for (int g = 0; g < groups; ++g) {
                const int at = column + 8 * g + 2 * t;
                if (at >= params.columns) break;
                const Two bias = *reinterpret_cast<const Two*>(params.bias + at);
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < 4; ++j) x[4 * g + j] += static_cast<float>(bias[j % 2]);
            }
        }

        template <int count>
        CUTLASS_DEVICE Turns<count> turns_of(int pair, int step) const {
            Turns<count> turns;
            const auto gain = static_cast<float>(attention_factor_of(params.table[params.rotary_dim / 2]));
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < count; ++j) {
                const uint64_t frequency = params.table[pair + j];
                CUTLASS_PRAGMA_UNROLL
                for (int r = 0; r < 2; ++r) {
                    turns.by[r][j] = hardware_turn(phase_top_of(position[step][r], frequency), gain);
                }
            }
            return turns;
        }

        template <int size>
        CUTLASS_DEVICE static void rotate_at(cutlass::Array<float, size>& x, int first, int second, CosSin<float> by) {
            const Pair<float> turned = rotate(Pair<float>{x[first], x[second]}, by);
            x[first] = turned.first;
            x[second] = turned.second;
        }

        template <int size>
        CUTLASS_DEVICE void rotate_neighbours(cutlass::Array<float, size>& x, int column, int step) const {
            const int component = component_of(column);
            if (component >= params.rotary_dim) return;
            CUTLASS_PRAGMA_UNROLL
            for (int g = 0; g < groups; ++g) {
                const Turns<1> turns = turns_of<1>(component / 2 + 4 * g + t, step);
                CUTLASS_PRAGMA_UNROLL
                for (int r = 0; r < 2; ++r) rotate_at(x, 4 * g + 2 * r, 4 * g + 2 * r + 1, turns.by[r][0]);
            }
        }

        // Pairs `distance` groups apart, in every block of twice as many groups that is rotated: with short heads there
        // are several, and they turn alike.
        template <int distance, int size>
        CUTLASS_DEVICE void rotate_halves(cutlass::Array<float, size>& x, int column, int step) const {
            constexpr int blocks = groups / (2 * distance);
            bool rotates[blocks];
            CUTLASS_PRAGMA_UNROLL
            for (int block = 0; block < blocks; ++block) {
                const int start = column + block * 16 * distance;
                rotates[block] = start < params.rotated_columns && component_of(start) < params.rotary_dim;
            }
            CUTLASS_PRAGMA_UNROLL
            for (int g = 0; g < distance; ++g) {
                const Turns<2> turns = turns_of<2>(8 * g + 2 * t, step);
                CUTLASS_PRAGMA_UNROLL
                for (int block = 0; block < blocks; ++block) {
                    if (!rotates[block]) continue;
                    CUTLASS_PRAGMA_UNROLL
                    for (int j = 0; j < 4; ++j) {
                        const int first = 4 * (2 * distance * block + g) + j;
                        rotate_at(x, first, first + 4 * distance, turns.by[j / 2][j % 2]);
                    }
                }
            }
        }
    };

    template <bool reference_source, class... Args>
    CUTLASS_DEVICE auto get_consumer_store_callbacks(
        const cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...>& args) {
        using namespace cute;
        constexpr int rows_a_step = size<0>(decltype(args.epi_tile){});
        constexpr int row_steps = size<0>(decltype(args.tile_shape_mnk){}) / rows_a_step;
        // CUTLASS tells how far the thread's first element is from the end of the product.
        const int first_row = get<0>(args.problem_shape_mnkl) - get<0>(args.residue_tCcD);
        const int thread_column = get<1>(args.problem_shape_mnkl) - get<1>(args.residue_tCcD);
        const int tile_column = get<1>(args.tile_coord_mnkl) * size<1>(args.tile_shape_mnk);
        return Callbacks<row_steps, rows_a_step>(*params_, first_row, tile_column, (thread_column - tile_column) / 2);
    }

private:
    const Params* params_ = nullptr;
};

}  // namespace mrrope
