#pragma once

#include "device/rms_norm.cuh"
#include "qk_norm_rotary_and_cache_map.h"

namespace mrrope {

// The rotations of a warp's tokens, with the heads' weights, in shared memory: in registers they would take a third of
// those of a thread, and teams with the same token would each compute all of them.
template <class Element, int Vector>
struct WarpRotations {
    using Real = RealOf<Element>;

    // By pair of a lane, then by lane: neighbouring lanes read neighbouring words.
    alignas(16) WeightedRotation<Real> of[Vector][32];

    // Sharers of a token divide the pairs of their lanes. Calls load_heads() after the first loads of its own, since
    // loads return in issue order. `column` is the lane's in `of`. All threads of the warp must call it.
    template <bool needs_lookup, class Lane, class F>
    __device__ void compute(const RotaryArgs& args, const Lane& lane, const StorePlace& place, int column,
                            const Element* weight, Real offset, F&& load_heads) {
        constexpr int at_once = 2;
        struct Loaded {
            uint64_t step;
            int row;  // of positions
            Real first_weight;
            Real second_weight;
        };
        int64_t offset_of_table = 0;
        if constexpr (needs_lookup) {
            offset_of_table = table_offset(args.choice, place.batch, place.token, /*table_head=*/0);
        }
        const uint64_t* table = args.table + offset_of_table;
        const auto load = [&](int i) {
            const Pair<int> at = components_of_pair(lane, i);
            Loaded loaded{table[lane.pair(i)], 0, 0, 0};
            if (needs_lookup && args.positions.row_of_pair != nullptr) {
                const uint64_t word = args.positions.row_of_pair[offset_of_table + lane.pair(i)];
                loaded.row = position_row_of(word, args.positions.rows);
            }
            if (weight != nullptr) {
                loaded.first_weight = static_cast<Real>(weight[at.first]);
                loaded.second_weight = static_cast<Real>(weight[at.second]);
            }
            return loaded;
        };
        int64_t position = load_position(args.positions, 0, place.batch, place.token);
        const uint64_t factor = table[args.rotary_dim / 2];
        Loaded loaded[at_once];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < at_once; ++j) loaded[j] = load(place.sharer + j * place.sharers);
        load_heads();
        const Real gain = lane.rotates() ? static_cast<Real>(factor_of(factor)) : Real(1);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = place.sharer; i < Vector; i += at_once * place.sharers) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < at_once; ++j) {
                if constexpr (needs_lookup) {
                    position = load_position(args.positions, loaded[j].row, place.batch, place.token);
                }
                of[i + j * place.sharers][column] = WeightedRotation<Real>(
                    loaded[j].first_weight + offset, loaded[j].second_weight + offset,
                    cos_sin_at<Element>(lane.rotates() ? position : 0, loaded[j].step, gain, Real(1)));
            }
            const int next = i + at_once * place.sharers;
            if (next >= Vector) break;
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < at_once; ++j) loaded[j] = load(next + j * place.sharers);
        }
        __syncwarp();
    }

private:
    // Where the components of a lane's pair are in a head.
    template <class Lane>
    __device__ static Pair<int> components_of_pair(const Lane& lane, int i) {
        if constexpr (Lane::crosses_vectors) {
            return {lane.first() + i, lane.second() + i};
        } else {
            const int first = (i < Vector / 2 ? lane.first() : lane.second()) + 2 * (i % (Vector / 2));
            return {first, first + 1};
        }
    }
};

}  // namespace mrrope
