#pragma once

#include <cutlass/fast_math.h>

#include "device/head_fragment.cuh"
#include "mrrope/qk_norm_rotary.h"
#include "rotary_kernel.cuh"

// What the kernels that norm and rotate are made of, forwards and backwards.

namespace mrrope {

// The numbers of a norm, in the precision of the computation.
template <class Real>
struct NormNumbers {
    Real eps;
    Real weight_offset;
    Real q_inverse_size;  // of a row
    Real k_inverse_size;

    explicit NormNumbers(const QkNormRotaryArgs& args)
        : eps(static_cast<Real>(args.eps)),
          weight_offset(static_cast<Real>(args.weight_offset)),
          q_inverse_size(inverse_size(args, args.rotary.q)),
          k_inverse_size(inverse_size(args, args.rotary.k)) {}

    __device__ Real inverse_rms(Real sum_of_squares, bool is_q) const {
        return rsqrt(sum_of_squares * (is_q ? q_inverse_size : k_inverse_size) + eps);
    }

private:
    static Real inverse_size(const QkNormRotaryArgs& args, const HeadsView& view) {
        const double heads = args.over == NormOver::head ? 1 : view.heads;
        return static_cast<Real>(1.0 / (heads * args.rotary.head_dim));
    }
};

// Where a lane of a head finds its two vectors: lanes past the rotated part take neighbours of the rest, which turn by
// nothing.
template <Pairing pairing, int Vector>
struct NormLane {
    static constexpr bool crosses_vectors = LaneLayout<pairing, Vector>::crosses_vectors;

    LaneLayout<pairing, Vector> rotated;
    int rest;  // where those of the rest start; negative in the rotated part

    __device__ NormLane(int lane, int half)
        : rotated{lane, half}, rest(lane * Vector < half ? -1 : 2 * lane * Vector) {}

    __device__ bool turns() const { return rest < 0; }
    __device__ int first() const { return turns() ? rotated.first() : rest; }
    __device__ int second() const { return turns() ? rotated.second() : rest + Vector; }
    // Those of the rest name pairs that are there, and leave them unused.
    __device__ int pair(int j) const { return turns() ? rotated.pair(j) : j; }
};

// What leads to the angles of a lane at one token: asked for first, computed when it is there.
template <int Vector, bool looks_up>
struct LaneTurns {
    int64_t position;
    int64_t table_start = 0;
    uint64_t turns[Vector];
    uint64_t factor;

    template <class Lane>
    __device__ void ask(const RotaryArgs& args, const Lane& lane, int batch, int token) {
        position = position_at(args.positions, 0, batch, token);
        if constexpr (looks_up) table_start = first_word_of_choice(args.choice, batch, token);
        const uint64_t* table = args.table + table_start;
        load_turns(turns, table, lane);
        factor = table[args.rotary_dim / 2];
    }

    template <class Real, class Lane>
    __device__ void compute(CosSin<Real> (&by)[Vector], const RotaryArgs& args, const Lane& lane, int batch, int token,
                            Real direction) const {
        const Real gain = lane.turns() ? static_cast<Real>(attention_factor_of(factor)) : Real(1);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            int64_t at = position;
            if constexpr (looks_up) at = position_of_pair(args.positions, lane.pair(j), batch, token);
            by[j] = scaled_cos_sin(phase_of(lane.turns() ? at : 0, turns[j]), gain, direction);
        }
    }

    __device__ int64_t position_of_pair(const PositionsView& positions, int pair, int batch, int token) const {
        if (positions.row_of_pair == nullptr) return position;
        const int64_t row = position_row_of(positions.row_of_pair[table_start + pair], positions.rows);
        return position_at(positions, row, batch, token);
    }
};

// Threads of a block that turn by the same angles compute them for each other, in shared memory: there when the block
// has met. Two more for every lane, so that lanes do not wait for each other's banks.
template <class Real, int Vector>
struct SharedTurns {
    static constexpr int most_pairs = 32 * Vector;  // of a head that a warp can hold

    alignas(16) CosSin<Real> of[most_pairs / Vector * (Vector + 2)];

    __device__ CosSin<Real>& operator[](int pair) { return of[pair + pair / Vector * 2]; }

    template <Pairing pairing, bool looks_up>
    __device__ void compute(const RotaryArgs& args, int batch, int token, Real direction) {
        const int pairs = args.rotary_dim / 2;
        for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
            const NormLane<pairing, 1> lane(pair, pairs);
            LaneTurns<1, looks_up> turns;
            turns.ask(args, lane, batch, token);
            CosSin<Real> found[1];
            turns.compute(found, args, lane, batch, token, direction);
            (*this)[pair] = found[0];
        }
    }
};

// q or k, as all threads of a row see it.
template <class Element>
struct NormView {
    const Element* in;
    Element* out;
    const Element* weight;
    HeadStrides in_strides;
    HeadStrides out_strides;
    int heads;
    bool is_q;

    __device__ NormView(const QkNormRotaryArgs& args, bool is_q) : is_q(is_q) {
        const HeadsView& view = is_q ? args.rotary.q : args.rotary.k;
        in = static_cast<const Element*>(view.in);
        out = static_cast<Element*>(view.out);
        weight = static_cast<const Element*>(is_q ? args.q_weight : args.k_weight);
        in_strides = view.in_strides;
        out_strides = view.out_strides;
        heads = view.heads;
    }
};

__device__ inline int64_t offset_of(const HeadStrides& strides, int64_t batch, int64_t token, int64_t head) {
    return batch * strides.batch + token * strides.token + head * strides.head;
}

// Weights as they are multiplied by. Where each is used once, it pays to ask first whether there is an offset.
template <bool asks_first = false, class Real, class Element, int Vector>
__device__ WideFragment<Real, Vector> with_offset(const HeadFragment<Element, Vector>& weights, Real offset) {
    WideFragment<Real, Vector> wide = weights.widened();
    if (asks_first && offset == Real(0)) return wide;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) {
        wide.first[j] += offset;
        wide.second[j] += offset;
    }
    return wide;
}

// The rotation of a pair whose components are multiplied by weights first: for heads that have both in common.
template <class Real>
struct WeightedTurn {
    CosSin<Real> first;
    CosSin<Real> second;

    WeightedTurn() = default;
    __device__ WeightedTurn(Real first_weight, Real second_weight, CosSin<Real> by)
        : first{first_weight * by.cos, first_weight * by.sin}, second{second_weight * by.cos, second_weight * by.sin} {}

    __device__ Pair<Real> operator()(Real a, Real b) const {
        return {multiply_add(a, first.cos, -(b * second.sin)), multiply_add(b, second.cos, a * first.sin)};
    }
};

// Two sums, so that a thread need not wait for each product before the next.
template <class Real, int Vector>
__device__ Real sum_of_products(const WideFragment<Real, Vector>& a, const WideFragment<Real, Vector>& b) {
    Real first = 0;
    Real second = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector; ++i) {
        first += a.first[i] * b.first[i];
        second += a.second[i] * b.second[i];
    }
    return first + second;
}

// The same in all threads of every team of `team` neighbours, a power of two. All threads of the warp must call it.
template <int Count, class Real>
__device__ void sum_over_team(Real (&sums)[Count], int team) {
    for (int step = team / 2; step > 0; step /= 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Count; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    }
}

// The same in all threads of the block.
template <int Count, class Real>
__device__ void sum_over_block(Real (&sums)[Count]) {
    constexpr int warp = 32;
    __shared__ Real of_warps[Count][warp];
    sum_over_team(sums, warp);
    __syncthreads();  // a sum before this one may still be read
    if (threadIdx.x % warp == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Count; ++j) of_warps[j][threadIdx.x / warp] = sums[j];
    }
    __syncthreads();
    const int warps = (blockDim.x + warp - 1) / warp;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Count; ++j) {
        sums[j] = threadIdx.x % warp < warps ? of_warps[j][threadIdx.x % warp] : Real(0);
    }
    sum_over_team(sums, warp);
}

}  // namespace mrrope
