#pragma once

#include <cutlass/fast_math.h>

#include <cute/tensor.hpp>

#include "device/dependent_launch.cuh"
#include "device/hardware_cos_sin.cuh"
#include "device/rotating_epilogue.cuh"

namespace mrrope {

// CUTLASS's epilogue of a product weight x^T, whose rows are components of heads and whose columns are tokens: adds the
// bias to a tile's accumulators, rotates them and stores them, one half of the tokens after the other.
//
// A warp group has the 128 components of a head, in two instructions of 64: component i and its partner i + 64 are the
// same thread's, at the same place in either. Thread t of each four holds the tokens 8 g + 2 t and 8 g + 2 t + 1 of
// every group g of 8, and of all of them the same two components and partners: only the positions change.
template <class Store, class Element>
struct RotatedAccumulators : Store {
    using Rotation = ProductRotation<Element>;
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
        constexpr int tokens = cute::size<1>(TileShape{});
        constexpr int parts = tokens / cute::size<1>(typename Store::EpilogueTile{});
        constexpr int groups = tokens / 8 / parts;
        // One instruction as wide as the tile, and two below each other; without the wider ones of CUTLASS it would be
        // several.
        static_assert(cute::size<1>(Layout{}) == 2 && cute::size<2>(Layout{}) == 1);
        const int column = cute::get<0>(tile) * cute::size<0>(tile_shape);
        const int component = thread / 32 * 16 + thread % 32 / 4;
        const bool rotates = column < rotation_.rotated_columns && component_of(column) < rotation_.rotary_dim;
        const bool has_bias = rotation_.bias != nullptr && column < cute::get<0>(shape);

        // All is asked for before any of it is needed.
        wait_for_previous_kernel();
        const int first_token = cute::get<1>(tile) * tokens;
        Turning<tokens / 32> turning{};  // of no angle where nothing turns
        Bias bias;
        if (rotates) turning.load(rotation_, component, first_token, thread % 32);
        if (has_bias) bias.load(rotation_, column + component);
        const bool in_a_row = rotates && turning.in_a_row(cute::get<1>(shape) - first_token, thread % 32);
        const TurningInARow turning_in_a_row(turning, thread % 32);
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < parts; ++part) {
            const auto for_each_group = [&](auto change) {
                CUTLASS_PRAGMA_UNROLL
                for (int group = part * groups; group < (part + 1) * groups; ++group) change(group);
            };
            if (has_bias) for_each_group([&](int group) { bias.add(accumulators, group); });
            if (in_a_row) {
                for_each_group([&](int group) { turning_in_a_row.rotate(accumulators, group); });
            } else if (rotates) {
                for_each_group([&](int group) { turning.rotate(accumulators, group, thread % 32); });
            }
            CUTLASS_PRAGMA_UNROLL
            for (int half = 0; half < 2; ++half) {
                const auto [next_load, next_store] =
                    Store::store(load_pipeline, load_state, store_pipeline, store_state, shape, tile_shape, tile,
                                 accumulators, tiled_mma, thread, storage, 2 * part + half);
                load_state = next_load;
                store_state = next_store;
            }
        }
        return cute::make_tuple(load_state, store_state);
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

    struct Bias {
        float summand[2][2];

        CUTLASS_DEVICE void load(const Rotation& rotation, int column) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 4; ++i) {
                summand[i / 2][i % 2] = static_cast<float>(rotation.bias[column + 8 * (i / 2) + 64 * (i % 2)]);
            }
        }

        template <class Accumulators>
        CUTLASS_DEVICE void add(Accumulators& accumulators, int group) const {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 8; ++i) {
                at(accumulators, group, i / 4, i / 2 % 2, i % 2) += summand[i / 2 % 2][i % 2];
            }
        }
    };

    template <class Accumulators>
    CUTLASS_DEVICE static void rotate_pair(Accumulators& accumulators, int group, int odd, int lower,
                                           CosSin<float> by) {
        float& first = at(accumulators, group, odd, lower, 0);
        float& second = at(accumulators, group, odd, lower, 1);
        const Pair<float> turned = mrrope::rotate(Pair<float>{first, second}, by);
        first = turned.first;
        second = turned.second;
    }

    // The lanes of a warp read positions of 32 tokens at a time, one each, and hand them to those that need them.
    template <int batches>
    struct Turning {
        float gain;
        uint64_t frequency[2];
        int64_t position[batches];

        CUTLASS_DEVICE void load(const Rotation& rotation, int component, int first_token, int lane) {
            CUTLASS_PRAGMA_UNROLL
            for (int batch = 0; batch < batches; ++batch) {
                position[batch] = rotation.positions(first_token + 32 * batch + lane);
            }
            frequency[0] = rotation.table[component];
            frequency[1] = rotation.table[component + 8];
            gain = static_cast<float>(attention_factor_of(rotation.table[rotation.rotary_dim / 2]));
        }

        CUTLASS_DEVICE int64_t first_position() const { return __shfl_sync(~0u, position[0], 0); }

        // Whether each of the tile's first `tokens` tokens has the position after the one before.
        CUTLASS_DEVICE bool in_a_row(int tokens, int lane) const {
            const int64_t first = first_position();
            bool follow = true;
            CUTLASS_PRAGMA_UNROLL
            for (int batch = 0; batch < batches; ++batch) {
                const int token = 32 * batch + lane;
                follow &= token >= tokens || position[batch] == first + token;
            }
            return __all_sync(~0u, follow);
        }

        template <class Accumulators>
        CUTLASS_DEVICE void rotate(Accumulators& accumulators, int group, int lane) const {
            CUTLASS_PRAGMA_UNROLL
            for (int odd = 0; odd < 2; ++odd) {
                const int holder = 8 * (group % 4) + 2 * (lane % 4) + odd;
                const int64_t at_token = __shfl_sync(~0u, position[group / 4], holder);
                CUTLASS_PRAGMA_UNROLL
                for (int lower = 0; lower < 2; ++lower) {
                    rotate_pair(accumulators, group, odd, lower,
                                hardware_turn(phase_top_of(at_token, frequency[lower]), gain));
                }
            }
        }
    };

    // Where tokens come in a row, as nearly all do, a thread's phases are equally far apart, and the angle of every
    // second token is its neighbour's and one position more: half the cosines and sines, which the special function
    // units are busy with otherwise. On an H200 that is 3 % of 2048 or 8192 rows of 2048 inputs.
    struct TurningInARow {
        uint32_t first[2];
        uint32_t step[2];  // from group to group, rounded: after a whole tile off by 2^-28 of a circle at most
        CosSin<float> one[2];
        float gain;

        template <int batches>
        CUTLASS_DEVICE TurningInARow(const Turning<batches>& turning, int lane) : gain(turning.gain) {
            const int64_t position = turning.first_position() + 2 * (lane % 4);
            CUTLASS_PRAGMA_UNROLL
            for (int lower = 0; lower < 2; ++lower) {
                const uint64_t frequency = turning.frequency[lower];
                first[lower] = phase_top_of(position, frequency);
                step[lower] = static_cast<uint32_t>((8 * frequency + (uint64_t{1} << 31)) >> 32);
                one[lower] = hardware_turn(phase_top_of(1, frequency), 1.0f);
            }
        }

        template <class Accumulators>
        CUTLASS_DEVICE void rotate(Accumulators& accumulators, int group) const {
            CUTLASS_PRAGMA_UNROLL
            for (int lower = 0; lower < 2; ++lower) {
                const CosSin<float> even = hardware_turn(first[lower] + group * step[lower], gain);
                const Pair<float> odd = mrrope::rotate(Pair<float>{even.cos, even.sin}, one[lower]);
                rotate_pair(accumulators, group, 0, lower, even);
                rotate_pair(accumulators, group, 1, lower, {odd.first, odd.second});
            }
        }
    };

    const Rotation& rotation_;
};

}  // namespace mrrope
