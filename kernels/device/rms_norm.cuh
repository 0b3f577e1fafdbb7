#pragma once

#include <type_traits>
#include <variant>

#include "device/head_fragment.cuh"
#include "device/table_choice.cuh"
#include "lane_layout.h"
#include "mrrope/qk_norm_rotary.h"
#include "qk_norm_rotary_map.h"

// Shared by the norm kernels, forward and backward: angles, weights and reductions.

namespace mrrope {

// The constants of a norm, in the precision of the computation.
template <class Real>
struct NormConstants {
    Real eps;
    Real weight_offset;
    Real q_inverse_size;  // of a row
    Real k_inverse_size;

    explicit NormConstants(const QkNormRotaryArgs& args)
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

// The angles of a lane at one token, by the table of a table head. The load functions issue loads: load_index() first,
// then load(), or its parts; compute() uses them.
template <class Element, class Lane, int Vector, bool needs_lookup>
struct LaneAngles {
    using Real = RealOf<Element>;
    // All positions of a token, while the row of a pair is not known. With one pair it is waited for.
    static constexpr bool loads_all_rows = needs_lookup && Vector > 1;

    std::conditional_t<loads_all_rows, PositionRowsAhead, int64_t> position;
    [[no_unique_address]] std::conditional_t<loads_all_rows, PairRows<Lane, Vector>, std::monostate> rows;
    uint64_t steps[Vector];
    uint64_t factor;
    uint32_t index = 0;  // of the table

    __device__ void load_index(const RotaryArgs& args, int batch, int token) {
        if constexpr (needs_lookup) {
            index = mrrope::load_index(args.choice, index_address(args.choice, batch, token), batch);
        }
    }

    // Positions first, since loads return in issue order and compute() needs them first. With a lookup they come last:
    // the compiler waits for them in the branch that loads them. Norm and cache write of 16 tokens with three positions
    // each take 2.2 us on an H200, not 2.5, though 64 tokens with a table index take 2.9, not 2.8.
    __device__ void load(const RotaryArgs& args, const Lane& lane, int batch, int token, int table_head) {
        if constexpr (!needs_lookup) load_positions(args, lane, batch, token, table_head);
        load_steps(args, lane, table_head);
        if constexpr (needs_lookup) load_positions(args, lane, batch, token, table_head);
    }

    __device__ void load_steps(const RotaryArgs& args, const Lane& lane, int table_head) {
        const uint64_t* table = args.table + offset_of_table(args, table_head);
        load_phase_steps(steps, table, lane);
        factor = table[args.rotary_dim / 2];
    }

    __device__ void load_positions(const RotaryArgs& args, const Lane& lane, int batch, int token, int table_head) {
        const PositionsView& positions = args.positions;
        if constexpr (loads_all_rows) {
            const void* first = position_address(positions, 0, batch, token);
            if (positions.row_of_pair != nullptr) {
                rows.load(positions.row_of_pair + offset_of_table(args, table_head), lane);
                position.load(positions, first);
            } else {
                rows = {};
                position.of[0] = load_position(positions, first);
            }
        } else {
            int row = 0;
            if (needs_lookup && positions.row_of_pair != nullptr) {
                const uint64_t word = positions.row_of_pair[offset_of_table(args, table_head) + lane.pair(0)];
                row = position_row_of(word, positions.rows);
            }
            position = load_position(positions, row, batch, token);
        }
    }

    __device__ void compute(CosSin<Real> (&by)[Vector], const Lane& lane, Real direction) const {
        const Real gain = lane.rotates() ? static_cast<Real>(factor_of(factor)) : Real(1);
        // Once: for every pair it would be a branch.
        const auto of_rotated = lane.rotates() ? position : decltype(position){};
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            int64_t of_pair;
            if constexpr (loads_all_rows) {
                of_pair = of_rotated[rows[j]];
            } else {
                of_pair = of_rotated;
            }
            by[j] = cos_sin_at<Element>(of_pair, steps[j], gain, direction);
        }
    }

private:
    __device__ int64_t offset_of_table(const RotaryArgs& args, int table_head) const {
        if constexpr (!needs_lookup) return 0;
        return table_offset(args.choice, index) + head_table_offset(args.choice, table_head);
    }
};

// Two-pass kernels: a pair of head `head` of the `heads` heads of q or of k, rotated by the head's table, times its
// factor.
template <class Element>
__device__ Pair<RealOf<Element>> rotated_pair(const RotaryArgs& args, const RowPair& lane, Pair<RealOf<Element>> pair,
                                              bool is_q, int heads, int batch, int token, int head,
                                              RealOf<Element> direction) {
    LaneAngles<Element, RowPair, 1, true> angles;
    angles.load_index(args, batch, token);
    angles.load(args, lane, batch, token, /*table_head=*/head / (heads / args.choice.heads));
    CosSin<RealOf<Element>> by[1];
    angles.compute(by, lane, direction);
    const int64_t offset_of_table = table_offset(args.choice, angles.index);
    return scaled(rotate(pair, by[0]), query_factor<RealOf<Element>>(args.choice, offset_of_table, is_q, head));
}

// The cos/sin of a token by one table in shared memory: each thread of a block computes some, all read them after
// __syncthreads. Two elements of padding per lane avoid bank conflicts.
template <class Element, int Vector>
struct SharedCosSin {
    using Real = RealOf<Element>;
    static constexpr int max_pairs = 32 * Vector;  // of a head that a warp can hold

    alignas(16) CosSin<Real> of[max_pairs / Vector * (Vector + 2)];

    __device__ CosSin<Real>& operator[](int pair) { return of[pair + pair / Vector * 2]; }

    // A thread's share of the work: load() issues the loads of its first pair.
    template <bool needs_lookup>
    struct Share {
        using Lane = LaneLayout<Pairing::halves, 1>;  // one pair per lane: the same in both pairings

        LaneAngles<Element, Lane, 1, needs_lookup> angles;
        int pair = threadIdx.x;

        __device__ bool exists(const RotaryArgs& args) const { return pair < args.rotary_dim / 2; }

        __device__ Lane lane(const RotaryArgs& args) const { return {pair, args.rotary_dim / 2}; }

        __device__ void load(const RotaryArgs& args, int batch, int token) {
            if (!exists(args)) return;
            angles.load_index(args, batch, token);
            angles.load(args, lane(args), batch, token, /*table_head=*/0);
        }
    };

    template <class Share>
    __device__ void compute(Share& share, const RotaryArgs& args, int batch, int token, Real direction) {
        while (share.exists(args)) {
            CosSin<Real> cos_sin[1];
            share.angles.compute(cos_sin, share.lane(args), direction);
            (*this)[share.pair] = cos_sin[0];
            share.pair += blockDim.x;
            share.load(args, batch, token);
        }
    }

    template <bool needs_lookup = false>
    __device__ void compute(const RotaryArgs& args, int batch, int token, Real direction) {
        Share<needs_lookup> share;
        share.load(args, batch, token);
        compute(share, args, batch, token, direction);
    }
};

// q or k.
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

// Weights plus offset. skips_zero branches around an offset of 0, which pays off where each weight is used once.
template <bool skips_zero = false, class Real, class Element, int Vector>
__device__ WideFragment<Real, Vector> with_offset(const HeadFragment<Element, Vector>& weights, Real offset) {
    WideFragment<Real, Vector> wide = weights.widened();
    if (skips_zero && offset == Real(0)) return wide;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) {
        wide.first[j] += offset;
        wide.second[j] += offset;
    }
    return wide;
}

// Rotates the vectors of a lane, or scales those of the unrotated tail, which have no partner: the other product would
// turn a neighbour's infinity into NaN. By a branch: selecting every result takes norms over all heads 4 % longer at
// 1024 tokens on an H200. With four heads per thread, a branch spills.
template <bool selects = false, class Lane, class Real, int Vector>
__device__ void rotate_within(const Lane& lane, WideFragment<Real, Vector>& wide, const CosSin<Real> (&by)[Vector]) {
    if (!selects && lane.rotates()) return wide.template rotate<Lane::crosses_vectors>(by);
    wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
        const Pair<Real> scaled{a * by[i].cos, b * by[i].cos};
        const Pair<Real> result = selects && lane.rotates() ? rotate<Real>({a, b}, by[i]) : scaled;
        a = result.first;
        b = result.second;
    });
}

// Rotation of a pair with its weights folded into cos/sin: for heads that share both.
template <class Real>
struct WeightedRotation {
    CosSin<Real> first;
    CosSin<Real> second;

    WeightedRotation() = default;
    __device__ WeightedRotation(Real first_weight, Real second_weight, CosSin<Real> by)
        : first{first_weight * by.cos, first_weight * by.sin}, second{second_weight * by.cos, second_weight * by.sin} {}

    __device__ Pair<Real> operator()(Real a, Real b) const { return (*this)(a, b, {b, a}); }

    // `partner`: {b, a}, or zeros in the unrotated tail, as in rotate_within.
    __device__ Pair<Real> operator()(Real a, Real b, Pair<Real> partner) const {
        return {multiply_add(a, first.cos, -(partner.first * second.sin)),
                multiply_add(b, second.cos, partner.second * first.sin)};
    }
};

// Two accumulators halve the dependency chain.
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

// All-reduce over every team of `team` neighbouring threads, a power of two. All threads of the warp must call it. A
// loop, with which the scheduler mixes no other arithmetic: by reduce_over_team, eight heads per thread and the
// backward pass would spill.
template <int Count, class Real>
__device__ void sum_over_team(Real (&sums)[Count], int team) {
    for (int step = team / 2; step > 0; step /= 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Count; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    }
}

// All-reduce of one value by `combine`. Up to 8 threads, as for heads of 128, it is straight-line code, which the
// scheduler can mix with other arithmetic. All threads of the warp that have not exited must call it.
template <class Real, class F>
__device__ Real reduce_over_team(Real value, int team, F&& combine) {
    const auto combine_with = [&](int step) {
        const Real other = __shfl_xor_sync(0xffffffffu, value, step);
        if (step < team) value = combine(value, other);
    };
    combine_with(1);
    combine_with(2);
    combine_with(4);
    if (team > 8) {
        combine_with(8);
        combine_with(16);
    }
    return value;
}

__device__ inline float max_over_team(float x, int team) {
    return reduce_over_team(x, team, [](float a, float b) { return fmaxf(a, b); });
}

__device__ inline float max_over_block(float x) {
    constexpr int warp = 32;
    __shared__ float of_warps[warp];
    x = max_over_team(x, warp);
    __syncthreads();  // the maxima of a previous call may still be read
    if (threadIdx.x % warp == 0) of_warps[threadIdx.x / warp] = x;
    __syncthreads();
    const int warps = (blockDim.x + warp - 1) / warp;
    return max_over_team(threadIdx.x % warp < warps ? of_warps[threadIdx.x % warp] : 0.0f, warp);
}

// All-reduce over the block. is_repeated: the kernel may call it again.
template <bool is_repeated = true, int Count, class Real>
__device__ void sum_over_block(Real (&sums)[Count]) {
    constexpr int warp = 32;
    __shared__ Real of_warps[Count][warp];
    sum_over_team(sums, warp);
    if (is_repeated) __syncthreads();  // the sums of a previous call may still be read
    if (threadIdx.x % warp == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Count; ++j) of_warps[j][threadIdx.x / warp] = sums[j];
    }
    __syncthreads();
    const int warps = (blockDim.x + warp - 1) / warp;
    const int team = 1 << (32 - __clz(warps - 1));  // the power of two from the number of warps on
    const int of = threadIdx.x & (team - 1);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Count; ++j) sums[j] = of < warps ? of_warps[j][of] : Real(0);
    sum_over_team(sums, team);
}

}  // namespace mrrope
