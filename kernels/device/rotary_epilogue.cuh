#pragma once

#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>

#include <cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp>

#include "accumulator_layout.h"
#include "device/cos_sin.cuh"
#include "device/dependent_launch.cuh"
#include "device/epilogue_rotation.cuh"
#include "mrrope/rotation.h"
#include "qkv_rotary_plan.h"

namespace mrrope {

// Epilogue visitor (EVT) of the product x weight^T: adds the bias to the accumulators, rotates those of q and k, and
// rounds once. A visit has epilogue_columns columns of a thread's two rows; accumulator_layout.h says which.
template <class Element, Pairing pairing>
struct RotaryEpilogue {
    static constexpr int groups = epilogue_columns(pairing) / 8;

    struct SharedStorage {};

    using Arguments = EpilogueRotation<Element>;
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

    CUTLASS_HOST_DEVICE RotaryEpilogue() {}
    CUTLASS_HOST_DEVICE RotaryEpilogue(const Params& params, const SharedStorage&) : params_(&params) {}

    CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
    CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

    template <class... Args>
    CUTLASS_DEVICE auto get_producer_load_callbacks(
        const cutlass::epilogue::fusion::detail::ProducerLoadArgs<Args...>&) {
        return cutlass::epilogue::fusion::detail::EmptyProducerLoadCallbacks{};
    }

    template <int row_steps, int rows_per_step>
    struct Callbacks : cutlass::epilogue::fusion::detail::EmptyConsumerStoreCallbacks {
        const Params& params;
        int first_row;     // of this thread
        int first_column;  // of the tile
        int quad_lane;
        int64_t position[row_steps][2];

        // cos/sin of `count` neighbouring pairs, in both rows.
        template <int count>
        struct PairsCosSin {
            CosSin<float> by[2][count];
        };

        CUTLASS_DEVICE Callbacks(const Params& params, int first_row, int first_column, int quad_lane)
            : params(params), first_row(first_row), first_column(first_column), quad_lane(quad_lane) {}

        CUTLASS_DEVICE void begin() {
            pdl_wait();
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
                    rotate_interleaved(x, column, step);
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

        CUTLASS_DEVICE int row_of(int step, int r) const { return first_row + step * rows_per_step + 8 * r; }

        template <int size>
        CUTLASS_DEVICE void add_bias(cutlass::Array<float, size>& x, int column) const {
            using Two = cutlass::AlignedArray<Element, 2>;
            CUTLASS_PRAGMA_UNROLL
            for (int g = 0; g < groups; ++g) {
                const int at = column + AccumulatorLayout::column(quad_lane, 4 * g);
                if (at >= params.columns) break;
                const Two bias = *reinterpret_cast<const Two*>(params.bias + at);
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < 4; ++j) x[4 * g + j] += static_cast<float>(bias[j % 2]);
            }
        }

        template <int count>
        CUTLASS_DEVICE PairsCosSin<count> cos_sin_of(int pair, int step) const {
            PairsCosSin<count> pairs;
            const auto gain = static_cast<float>(factor_of(params.table[params.rotary_dim / 2]));
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < count; ++j) {
                const uint64_t phase_step = params.table[pair + j];
                CUTLASS_PRAGMA_UNROLL
                for (int r = 0; r < 2; ++r) {
                    pairs.by[r][j] = hardware_cos_sin(phase_top_of(position[step][r], phase_step), gain);
                }
            }
            return pairs;
        }

        template <int size>
        CUTLASS_DEVICE static void rotate_at(cutlass::Array<float, size>& x, int first, int second, CosSin<float> by) {
            const Pair<float> rotated = rotate(Pair<float>{x[first], x[second]}, by);
            x[first] = rotated.first;
            x[second] = rotated.second;
        }

        template <int size>
        CUTLASS_DEVICE void rotate_interleaved(cutlass::Array<float, size>& x, int column, int step) const {
            const int component = component_of(column);
            if (component >= params.rotary_dim) return;
            CUTLASS_PRAGMA_UNROLL
            for (int g = 0; g < groups; ++g) {
                using Layout = InterleavedAccumulators;
                const PairsCosSin<1> pairs = cos_sin_of<1>(component / 2 + Layout::pair(quad_lane, g), step);
                CUTLASS_PRAGMA_UNROLL
                for (int r = 0; r < 2; ++r) rotate_at(x, Layout::first(g, r), Layout::first(g, r) + 1, pairs.by[r][0]);
            }
        }

        // All blocks of the visit that are rotated share their cos/sin.
        template <int distance, int size>
        CUTLASS_DEVICE void rotate_halves(cutlass::Array<float, size>& x, int column, int step) const {
            using Layout = HalvesAccumulators<distance>;
            constexpr int blocks = groups / (2 * distance);
            bool rotates[blocks];
            CUTLASS_PRAGMA_UNROLL
            for (int block = 0; block < blocks; ++block) {
                const int start = column + block * Layout::columns;
                rotates[block] = start < params.rotated_columns && component_of(start) < params.rotary_dim;
            }
            CUTLASS_PRAGMA_UNROLL
            for (int g = 0; g < distance; ++g) {
                const PairsCosSin<2> pairs = cos_sin_of<2>(Layout::first_pair(quad_lane, g), step);
                CUTLASS_PRAGMA_UNROLL
                for (int block = 0; block < blocks; ++block) {
                    if (!rotates[block]) continue;
                    CUTLASS_PRAGMA_UNROLL
                    for (int j = 0; j < 4; ++j) {
                        rotate_at(x, Layout::first(block, g, j), Layout::second(block, g, j), pairs.by[j / 2][j % 2]);
                    }
                }
            }
        }
    };

    template <bool reference_source, class... Args>
    CUTLASS_DEVICE auto get_consumer_store_callbacks(
        const cutlass::epilogue::fusion::detail::ConsumerStoreArgs<Args...>& args) {
        using namespace cute;
        constexpr int rows_per_step = size<0>(decltype(args.epi_tile){});
        constexpr int row_steps = size<0>(decltype(args.tile_shape_mnk){}) / rows_per_step;
        // CUTLASS passes the distance of the thread's first element from the end of the product.
        const int first_row = get<0>(args.problem_shape_mnkl) - get<0>(args.residue_tCcD);
        const int thread_column = get<1>(args.problem_shape_mnkl) - get<1>(args.residue_tCcD);
        const int tile_column = get<1>(args.tile_coord_mnkl) * size<1>(args.tile_shape_mnk);
        return Callbacks<row_steps, rows_per_step>(*params_, first_row, tile_column, (thread_column - tile_column) / 2);
    }

private:
    const Params* params_ = nullptr;
};

}  // namespace mrrope
