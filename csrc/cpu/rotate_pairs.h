#pragma once

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"
#include "storage.h"

// What every file that rotates on a CPU needs, with internal linkage: such files are compiled for several instruction
// sets, and the linker must not let one of them answer for another.

namespace mrrope {
namespace {

inline int64_t position_at(const PositionsView& positions, int64_t row, int64_t batch, int64_t token) {
    const int64_t index = row * positions.row_stride + batch * positions.batch_stride + token * positions.token_stride;
    return positions.is_int64 ? static_cast<const int64_t*>(positions.data)[index]
                              : static_cast<const int32_t*>(positions.data)[index];
}

inline int64_t chosen_table(const TableChoice& choice, int64_t batch, int64_t token) {
    if (choice.count == 1) return 0;
    if (choice.index == nullptr) return batch;
    return choice.index[batch * choice.batch_stride + token * choice.token_stride];
}

// Split from the polynomials: processors have no vector product of 64-bit integers, and this way only that part stays
// scalar.
inline void fill_phases(uint64_t* phases, const RotaryArgs& args, int64_t table, int64_t batch, int64_t token,
                        int first_pair, int pairs) {
    const PositionsView& positions = args.positions;
    const int64_t first = table * args.choice.stride + first_pair;
    const uint64_t* turns = args.table + first;
    if (positions.row_of_pair == nullptr) {
        const int64_t position = position_at(positions, 0, batch, token);
        for (int i = 0; i < pairs; ++i) phases[i] = phase_of(position, turns[i]);
    } else {
        for (int i = 0; i < pairs; ++i) {
            const int64_t row = position_row_of(positions.row_of_pair[first + i], positions.rows);
            phases[i] = phase_of(position_at(positions, row, batch, token), turns[i]);
        }
    }
}

inline void fill_row(float* cos, float* sin, const uint64_t* phases, int pairs, float gain, float direction) {
    const float signed_gain = gain * direction;
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const CosSin<float> unit = cos_sin(static_cast<uint32_t>(phases[i] >> 32));
        cos[i] = gain * unit.cos;
        sin[i] = signed_gain * unit.sin;
    }
}

inline void fill_row(double* cos, double* sin, const uint64_t* phases, int pairs, double gain, double direction) {
    for (int i = 0; i < pairs; ++i) {
        const CosSin<double> by = scaled_cos_sin(phases[i], gain, direction);
        cos[i] = by.cos;
        sin[i] = by.sin;
    }
}

// Cosines and sines of `pairs` pairs of one token.
template <class Real>
void fill_cos_sin(Real* cos, Real* sin, uint64_t* phases, const RotaryArgs& args, int64_t batch, int64_t token,
                  int first_pair, int pairs, Real direction) {
    const int64_t table = chosen_table(args.choice, batch, token);
    const uint64_t factor = args.table[table * args.choice.stride + args.rotary_dim / 2];
    fill_phases(phases, args, table, batch, token, first_pair, pairs);
    fill_row(cos, sin, phases, pairs, static_cast<Real>(attention_factor_of(factor)), direction);
}

// In place, out is in: every iteration reads its two components before it writes them and touches no others, which is
// what the pragmas vouch for.
template <class Storage, class Real>
void rotate_halves(const Storage* in, Storage* out, int half, int pairs, const Real* cos, const Real* sin) {
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const Pair<Real> turned = rotate<Real>({load(in[i]), load(in[i + half])}, {cos[i], sin[i]});
        store(out[i], turned.first);
        store(out[i + half], turned.second);
    }
}

template <class Storage, class Real>
void rotate_interleaved(const Storage* in, Storage* out, int pairs, const Real* cos, const Real* sin) {
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const Pair<Real> turned = rotate<Real>({load(in[2 * i]), load(in[2 * i + 1])}, {cos[i], sin[i]});
        store(out[2 * i], turned.first);
        store(out[2 * i + 1], turned.second);
    }
}

}  // namespace
}  // namespace mrrope
