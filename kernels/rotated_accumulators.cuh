#pragma once

#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "dependent_launch.cuh"
#include "hardware_turn.cuh"
#include "rotating_epilogue.cuh"

namespace mrrope {

// CUTLASS's epilogue of a product weight x^T, whose rows are components of heads and whose columns are tokens: adds the
// bias and rotates all of a tile's accumulators, then stores them.
//
// A warp group has the 128 components of a head, in two instructions of 64: component i and its partner i + 64 are the
// same thread's, at the same place in either. Thread t of each four holds the tokens 8 g + 2 t and 8 g + 2 t + 1 of
// every group g of 8, and of all of them the same two components and partners: only the positions change.
template <class Store, class Element>
struct RotatedAccumulators : Store {
    struct Rotation {
        const Element* bias;
        RowPositions positions;
        const uint64_t* table;
        cutlass::FastDivmod head_dim;
        int rotary_dim;
        int rotated_columns;
    };
    struct Arguments : Store::Arguments {
        Rotation rotation;
    };
    struct Params : Store::Params {
        Rotation rotation;
    };

    template <class ProblemShape>
    static Params to_underlying_arguments(const ProblemShape& shape, const Arguments& arguments, void* workspace) {
        return {Store::to_underlying_arguments(shape, arguments, workspace), arguments.rotation};
    }

    CUTLASS_HOST_DEVICE RotatedAccumulators(const Params& params, typename Store::TensorStorage& storage)
        : Store(params, storage), rotation_(params.rotation) {}

    template <class LoadState, class StoreState, class ProblemShape, class TileShape, class TileCoord, class Engine,
              class Layout, class TiledMma>
    CUTLASS_DEVICE auto store(typename Store::LoadPipeline load_pipeline, LoadState load_state,
                              typename Store::StorePipeline store_pipeline, StoreState store_state, ProblemShape shape,
                              TileShape tile_shape, TileCoord tile, cute::Tensor<Engine, Layout> accumulators,
                              TiledMma tiled_mma, int thread, typename Store::TensorStorage& storage) {
        wait_for_previous_kernel();
        const int head_column = cute::get<0>(tile) * cute::size<0>(tile_shape);
        const int first_token = cute::get<1>(tile) * cute::size<1>(tile_shape);
        const int component = thread / 32 * 16 + thread % 32 / 4;
        if (rotation_.bias != nullptr && head_column < cute::get<0>(shape)) {
            add_bias(accumulators, head_column + component);
        }
        if (head_column < rotation_.rotated_columns && component_of(head_column) < rotation_.rotary_dim) {
            rotate_all<cute::size<1>(TileShape{})>(accumulators, component, first_token, thread % 32);
        }
        return Store::store(load_pipeline, load_state, store_pipeline, store_state, shape, tile_shape, tile,
                            accumulators, tiled_mma, thread, storage);
    }

private:
    CUTLASS_DEVICE int component_of(int column) const {
        int head, component;
        rotation_.head_dim(head, component, column);
        return component;
    }

    // The accumulator of a token's component: 8 `lower` and 64 `half` below the thread's first.
    template <class Accumulators>
    CUTLASS_DEVICE static float& at(Accumulators& accumulators, int group, int odd, int lower, int half) {
        return accumulators(cute::make_coord(odd, lower, group), half, 0);
    }

    template <class Accumulators>
    CUTLASS_DEVICE void add_bias(Accumulators& accumulators, int column) const {
        constexpr int groups = cute::size<0, 2>(Accumulators{});
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
            CUTLASS_PRAGMA_UNROLL
            for (int lower = 0; lower < 2; ++lower) {
                const auto bias = static_cast<float>(rotation_.bias[column + 64 * half + 8 * lower]);
                CUTLASS_PRAGMA_UNROLL
                for (int group = 0; group < groups; ++group) {
                    CUTLASS_PRAGMA_UNROLL
                    for (int odd = 0; odd < 2; ++odd) at(accumulators, group, odd, lower, half) += bias;
                }
            }
        }
    }

    // The lanes of a warp read a position each, and hand it to those that need it.
    template <int tokens, class Accumulators>
    CUTLASS_DEVICE void rotate_all(Accumulators& accumulators, int component, int first_token, int lane) const {
        static_assert(tokens % 32 == 0);
        const auto gain = static_cast<float>(attention_factor_of(rotation_.table[rotation_.rotary_dim / 2]));
        const uint64_t frequency[2] = {rotation_.table[component], rotation_.table[component + 8]};
        CUTLASS_PRAGMA_UNROLL
        for (int batch = 0; batch < tokens / 32; ++batch) {
            const int64_t of_lane = rotation_.positions(first_token + 32 * batch + lane);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 8; ++i) {
                const int group = 4 * batch + i / 2;
                const int odd = i % 2;
                const int64_t position = __shfl_sync(~0u, of_lane, 8 * (i / 2) + 2 * (lane % 4) + odd);
                CUTLASS_PRAGMA_UNROLL
                for (int lower = 0; lower < 2; ++lower) {
                    float& first = at(accumulators, group, odd, lower, 0);
                    float& second = at(accumulators, group, odd, lower, 1);
                    const Pair<float> turned =
                        rotate(Pair<float>{first, second}, hardware_turn(phase_of(position, frequency[lower]), gain));
                    first = turned.first;
                    second = turned.second;
                }
            }
        }
    }

    const Rotation& rotation_;
};

}  // namespace mrrope
