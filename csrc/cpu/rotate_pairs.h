#pragma once

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"
#include "storage.h"

// Positions, cosines, sines and the rotation of one head on the CPU. Internal linkage: see instruction_sets.h.

namespace mrrope {
namespace {

inline int64_t position_at(const PositionsView& positions, int64_t row, int64_t batch, int64_t token) {
    const int64_t index = row * positions.row_stride + batch * positions.batch_stride + token * positions.token_stride;
    return positions.is_int64 ? static_cast<const int64_t*>(positions.data)[index]
                              : static_cast<const int32_t*>(positions.data)[index];
}

// Offset of the table of a token, in words.
inline int64_t table_offset(const TableChoice& choice, int64_t batch, int64_t token) {
    if (choice.count == 1) return 0;
    if (choice.index == nullptr) return batch * choice.stride;
    return choice.index[batch * choice.batch_stride + token * choice.token_stride] * int64_t{choice.stride};
}

// The factor of a head of q beside the attention factor.
inline double query_factor(const TableChoice& choice, int64_t batch, int64_t token, int64_t head) {
    return factor_of(choice.query_factors[table_offset(choice, batch, token) + head]);
}

// Separate from the loop over cos/sin: most processors have no SIMD multiply of 64-bit integers, and in one loop that
// would keep cos/sin scalar, too.
inline void fill_phases(uint64_t* phases, const RotaryArgs& args, int64_t table, int64_t batch, int64_t token,
                        int first_pair, int pairs) {
    const PositionsView& positions = args.positions;
    const int64_t first = table + first_pair;
    const uint64_t* phase_steps = args.table + first;
    if (positions.row_of_pair == nullptr) {
        const int64_t position = position_at(positions, 0, batch, token);
        for (int i = 0; i < pairs; ++i) phases[i] = phase_of(position, phase_steps[i]);
    } else {
        for (int i = 0; i < pairs; ++i) {
            const int64_t row = position_row_of(positions.row_of_pair[first + i], positions.rows);
            phases[i] = phase_of(position_at(positions, row, batch, token), phase_steps[i]);
        }
    }
}

// Cosines and sines, times the attention factor, of pairs [first_pair, first_pair + pairs) of one token, by the table
// of the table head `table_head`. `phases` is scratch memory for as many words.
template <class Real>
void fill_cos_sin(Real* cos, Real* sin, uint64_t* phases, const RotaryArgs& args, int64_t batch, int64_t token,
                  int64_t table_head, int first_pair, int pairs, Real direction) {
    const int64_t table = table_offset(args.choice, batch, token) + table_head * args.choice.head_stride;
    const uint64_t factor = args.table[table + args.rotary_dim / 2];
    const auto gain = static_cast<Real>(factor_of(factor));
    fill_phases(phases, args, table, batch, token, first_pair, pairs);
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const CosSin<Real> by = scaled_cos_sin(phases[i], gain, direction);
        cos[i] = by.cos;
        sin[i] = by.sin;
    }
}

// The simd pragmas are valid in place, too: each iteration reads its two components before it writes them, and no other
// iteration accesses them.
template <class Storage, class Real, class Finish>
void rotate_halves(const Storage* in, Storage* out, int half, int pairs, const Real* cos, const Real* sin,
                   Finish&& finish) {
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const Pair<Real> rotated = finish(rotate<Real>({load(in[i]), load(in[i + half])}, {cos[i], sin[i]}));
        store(out[i], rotated.first);
        store(out[i + half], rotated.second);
    }
}

template <class Storage, class Real, class Finish>
void rotate_interleaved(const Storage* in, Storage* out, int pairs, const Real* cos, const Real* sin, Finish&& finish) {
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const Pair<Real> rotated = finish(rotate<Real>({load(in[2 * i]), load(in[2 * i + 1])}, {cos[i], sin[i]}));
        store(out[2 * i], rotated.first);
        store(out[2 * i + 1], rotated.second);
    }
}

// Rotates pairs [first_pair, first_pair + pairs) of one head, and stores finish(rotated pair); cos and sin start with
// the pair first_pair.
template <class Storage, class Real, class Finish>
void rotate_pairs(const Storage* in, Storage* out, const RotaryArgs& args, int first_pair, int pairs, const Real* cos,
                  const Real* sin, Finish&& finish) {
    if (args.pairing == Pairing::halves) {
        rotate_halves(in + first_pair, out + first_pair, args.rotary_dim / 2, pairs, cos, sin, finish);
    } else {
        rotate_interleaved(in + 2 * first_pair, out + 2 * first_pair, pairs, cos, sin, finish);
    }
}

template <class Storage, class Real>
void rotate_pairs(const Storage* in, Storage* out, const RotaryArgs& args, int first_pair, int pairs, const Real* cos,
                  const Real* sin) {
    rotate_pairs(in, out, args, first_pair, pairs, cos, sin, [](Pair<Real> rotated) { return rotated; });
}

// The same, times a query head's factor.
template <class Storage, class Real>
void rotate_pairs_times(Real factor, const Storage* in, Storage* out, const RotaryArgs& args, int first_pair, int pairs,
                        const Real* cos, const Real* sin) {
    rotate_pairs(in, out, args, first_pair, pairs, cos, sin,
                 [factor](Pair<Real> rotated) { return scaled(rotated, factor); });
}

}  // namespace
}  // namespace mrrope
