#pragma once

#include <cute/tensor.hpp>

#include "accumulator_layout.h"
#include "device/cos_sin.cuh"
#include "device/dependent_launch.cuh"
#include "device/epilogue_rotation.cuh"
#include "mrrope/rotation.h"

namespace mrrope {

// Epilogue of the transposed product weight x^T, whose rows are components of heads and whose columns are tokens: adds
// the bias to a tile's accumulators, rotates them and stores them by CUTLASS's `Store`, one half of the tokens after
// the other. A warp group has the tile's 128 components; accumulator_layout.h says which are a thread's. A thread has
// the same components of all its tokens: only the positions differ.
template <class Store, class Element>
struct TransposedRotaryEpilogue : Store {
    using Rotation = EpilogueRotation<Element>;
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

    CUTLASS_HOST_DEVICE TransposedRotaryEpilogue(const Params& params, typename Store::TensorStorage& storage)
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
        // One wgmma instruction along the tile's tokens and two along its components. Without CUTLASS's extended shapes
        // there would be several along the tokens.
        static_assert(cute::size<1>(Layout{}) == 2 && cute::size<2>(Layout{}) == 1);
        const int column = cute::get<0>(tile) * cute::size<0>(tile_shape);
        const int component = TransposedAccumulators::first_component(thread);
        const bool rotates = column < rotation_.rotated_columns && component_of(column) < rotation_.rotary_dim;
        const bool has_bias = rotation_.bias != nullptr && column < cute::get<0>(shape);

        // All loads are issued before the first use.
        pdl_wait();
        const int first_token = cute::get<1>(tile) * tokens;
        Angles<tokens / 32> angles{};  // zero where nothing is rotated
        Bias bias;
        if (rotates) angles.load(rotation_, component, first_token, thread % 32);
        if (has_bias) bias.load(rotation_, column + component);
        const bool consecutive = rotates && angles.are_consecutive(cute::get<1>(shape) - first_token, thread % 32);
        const ConsecutiveAngles consecutive_angles(angles, thread % 32);
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < parts; ++part) {
            const auto for_each_group = [&](auto change) {
                CUTLASS_PRAGMA_UNROLL
                for (int group = part * groups; group < (part + 1) * groups; ++group) change(group);
            };
            if (has_bias) for_each_group([&](int group) { bias.add(accumulators, group); });
            if (consecutive) {
                for_each_group([&](int group) { consecutive_angles.rotate(accumulators, group); });
            } else if (rotates) {
                for_each_group([&](int group) { angles.rotate(accumulators, group, thread % 32); });
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

    // The accumulator of a token's component: 8 * lower + 64 * half after the thread's first.
    template <class Accumulators>
    CUTLASS_DEVICE static float& at(Accumulators& accumulators, int group, int odd, int lower, int half) {
        return accumulators(cute::make_coord(odd, lower, group), half, 0);
    }

    struct Bias {
        float summand[2][2];

        CUTLASS_DEVICE void load(const Rotation& rotation, int column) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < 4; ++i) {
                const int offset = TransposedAccumulators::component_offset(i / 2, i % 2);
                summand[i / 2][i % 2] = static_cast<float>(rotation.bias[column + offset]);
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
        const Pair<float> rotated = mrrope::rotate(Pair<float>{first, second}, by);
        first = rotated.first;
        second = rotated.second;
    }

    // The lanes of a warp load the positions of 32 tokens at a time, one each, and exchange them by shuffles.
    template <int batches>
    struct Angles {
        float gain;
        uint64_t phase_step[2];
        int64_t position[batches];

        CUTLASS_DEVICE void load(const Rotation& rotation, int component, int first_token, int lane) {
            CUTLASS_PRAGMA_UNROLL
            for (int batch = 0; batch < batches; ++batch) {
                position[batch] = rotation.positions(first_token + 32 * batch + lane);
            }
            phase_step[0] = rotation.table[component];
            phase_step[1] = rotation.table[component + TransposedAccumulators::component_offset(1, 0)];
            gain = static_cast<float>(factor_of(rotation.table[rotation.rotary_dim / 2]));
        }

        CUTLASS_DEVICE int64_t first_position() const { return __shfl_sync(~0u, position[0], 0); }

        // Whether the positions of the tile's first `tokens` tokens are consecutive.
        CUTLASS_DEVICE bool are_consecutive(int tokens, int lane) const {
            const int64_t first = first_position();
            bool consecutive = true;
            CUTLASS_PRAGMA_UNROLL
            for (int batch = 0; batch < batches; ++batch) {
                const int token = 32 * batch + lane;
                consecutive &= token >= tokens || position[batch] == first + token;
            }
            return __all_sync(~0u, consecutive);
        }

        template <class Accumulators>
        CUTLASS_DEVICE void rotate(Accumulators& accumulators, int group, int lane) const {
            CUTLASS_PRAGMA_UNROLL
            for (int odd = 0; odd < 2; ++odd) {
                using Layout = TransposedAccumulators;
                const int64_t token_position =
                    __shfl_sync(~0u, position[Layout::batch_of(group)], Layout::holder(lane, group, odd));
                CUTLASS_PRAGMA_UNROLL
                for (int lower = 0; lower < 2; ++lower) {
                    rotate_pair(accumulators, group, odd, lower,
                                hardware_cos_sin(phase_top_of(token_position, phase_step[lower]), gain));
                }
            }
        }
    };

    // Consecutive positions, the common case: a thread's phases are equidistant, and the cos/sin of an odd token are
    // those of its even neighbour, rotated by one position. This halves the evaluations of cos/sin, which saturate the
    // special function units otherwise: 3 % at 2048 and 8192 rows of 2048 inputs on an H200.
    struct ConsecutiveAngles {
        uint32_t first[2];
        uint32_t group_step[2];  // rounded: off by at most 2^-28 revolutions after a whole tile
        CosSin<float> one_position[2];
        float gain;

        template <int batches>
        CUTLASS_DEVICE ConsecutiveAngles(const Angles<batches>& angles, int lane) : gain(angles.gain) {
            const int64_t position = angles.first_position() + 2 * (lane % 4);
            CUTLASS_PRAGMA_UNROLL
            for (int lower = 0; lower < 2; ++lower) {
                const uint64_t step = angles.phase_step[lower];
                first[lower] = phase_top_of(position, step);
                group_step[lower] = static_cast<uint32_t>((8 * step + (uint64_t{1} << 31)) >> 32);
                one_position[lower] = hardware_cos_sin(phase_top_of(1, step), 1.0f);
            }
        }

        template <class Accumulators>
        CUTLASS_DEVICE void rotate(Accumulators& accumulators, int group) const {
            CUTLASS_PRAGMA_UNROLL
            for (int lower = 0; lower < 2; ++lower) {
                const CosSin<float> even = hardware_cos_sin(first[lower] + group * group_step[lower], gain);
                const Pair<float> odd = mrrope::rotate(Pair<float>{even.cos, even.sin}, one_position[lower]);
                rotate_pair(accumulators, group, 0, lower, even);
                rotate_pair(accumulators, group, 1, lower, {odd.first, odd.second});
            }
        }
    };

    const Rotation& rotation_;
};

}  // namespace mrrope
