#include "rotate_tokens.h"

#include <algorithm>
#include <cstring>

#include "mrrope/rotation.h"
#include "storage.h"

// Everything here but rotate_tokens itself has internal linkage: this file is compiled for several instruction sets,
// and the linker must not let one of them answer for another.

namespace mrrope {
namespace {

// Tokens whose cosines and sines are computed together: enough for long runs of memory within a head, few enough for
// them to stay in the first-level cache.
constexpr int tokens_per_tile = 64;
// Pairs rotated before going on to the next ones; wider heads take several rounds.
constexpr int pairs_per_tile = 128;

template <class Real>
struct Tile {
    alignas(64) Real cos[tokens_per_tile][pairs_per_tile];
    alignas(64) Real sin[tokens_per_tile][pairs_per_tile];
};

int64_t position_at(const PositionsView& positions, int64_t row, int64_t batch, int64_t token) {
    const int64_t index = row * positions.row_stride + batch * positions.batch_stride + token * positions.token_stride;
    return positions.is_int64 ? static_cast<const int64_t*>(positions.data)[index]
                              : static_cast<const int32_t*>(positions.data)[index];
}

int64_t chosen_table(const TableChoice& choice, int64_t batch, int64_t token) {
    if (choice.count == 1) return 0;
    if (choice.index == nullptr) return batch;
    return choice.index[batch * choice.batch_stride + token * choice.token_stride];
}

// Split from the polynomials: processors have no vector product of 64-bit integers, and this way only that part stays
// scalar.
void fill_phases(uint64_t* phases, const RotaryArgs& args, int64_t table, int64_t batch, int64_t token, int first_pair,
                 int pairs) {
    const PositionsView& positions = args.positions;
    const int64_t first = table * args.choice.stride + first_pair;
    const uint64_t* turns = args.table + first;
    if (positions.row_of_pair == nullptr) {
        const int64_t position = position_at(positions, 0, batch, token);
        for (int i = 0; i < pairs; ++i) phases[i] = phase_of(position, turns[i]);
    } else {
        for (int i = 0; i < pairs; ++i) {
            const auto row = static_cast<int64_t>(positions.row_of_pair[first + i]);
            phases[i] = phase_of(position_at(positions, row, batch, token), turns[i]);
        }
    }
}

void fill_row(float* cos, float* sin, const uint64_t* phases, int pairs, float gain, float direction) {
    const float signed_gain = gain * direction;
#pragma omp simd
    for (int i = 0; i < pairs; ++i) {
        const CosSin<float> unit = cos_sin(static_cast<uint32_t>(phases[i] >> 32));
        cos[i] = gain * unit.cos;
        sin[i] = signed_gain * unit.sin;
    }
}

void fill_row(double* cos, double* sin, const uint64_t* phases, int pairs, double gain, double direction) {
    for (int i = 0; i < pairs; ++i) {
        const CosSin<double> by = turn(phases[i], gain, direction);
        cos[i] = by.cos;
        sin[i] = by.sin;
    }
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

// The tokens [token, token + count) of one sequence.
struct TokenSpan {
    int64_t batch;
    int64_t token;
    int count;
};

// Calls f(in, out, t) for every head of every token of the span, in the order in which they lie in memory.
template <class Storage, class F>
void for_each_head(const HeadsView& view, const TokenSpan& span, F&& f) {
    const auto origin = [&](const HeadStrides& strides) {
        return span.batch * strides.batch + span.token * strides.token;
    };
    const auto* in = static_cast<const Storage*>(view.in) + origin(view.in_strides);
    auto* out = static_cast<Storage*>(view.out) + origin(view.out_strides);
    const auto visit = [&](int t, int head) {
        f(in + t * view.in_strides.token + head * view.in_strides.head,
          out + t * view.out_strides.token + head * view.out_strides.head, t);
    };
    if (view.in_strides.head > view.in_strides.token) {
        for (int head = 0; head < view.heads; ++head) {
            for (int t = 0; t < span.count; ++t) visit(t, head);
        }
    } else {
        for (int t = 0; t < span.count; ++t) {
            for (int head = 0; head < view.heads; ++head) visit(t, head);
        }
    }
}

template <class Storage>
void copy_tail(const RotaryArgs& args, const HeadsView& view, const TokenSpan& span) {
    const size_t bytes = (args.head_dim - args.rotary_dim) * sizeof(Storage);
    if (bytes == 0 || view.in == view.out) return;
    for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int) {
        std::memcpy(out + args.rotary_dim, in + args.rotary_dim, bytes);
    });
}

template <class Storage, class Real>
void rotate_heads(const RotaryArgs& args, const HeadsView& view, const Tile<Real>& tile, const TokenSpan& span,
                  int first_pair, int pairs) {
    for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int t) {
        if (args.pairing == Pairing::halves) {
            rotate_halves(in + first_pair, out + first_pair, args.rotary_dim / 2, pairs, tile.cos[t], tile.sin[t]);
        } else {
            rotate_interleaved(in + 2 * first_pair, out + 2 * first_pair, pairs, tile.cos[t], tile.sin[t]);
        }
    });
}

template <class Storage>
void rotate_span(const RotaryArgs& args, const TokenSpan& span) {
    using Real = decltype(load(Storage{}));
    const int half = args.rotary_dim / 2;
    const auto direction = static_cast<Real>(args.conjugate ? -1 : 1);
    Tile<Real> tile;
    for (int first_pair = 0; first_pair < half; first_pair += pairs_per_tile) {
        const int pairs = std::min(pairs_per_tile, half - first_pair);
        for (int t = 0; t < span.count; ++t) {
            alignas(64) uint64_t phases[pairs_per_tile];
            const int64_t table = chosen_table(args.choice, span.batch, span.token + t);
            const auto gain = static_cast<Real>(attention_factor_of(args.table[table * args.choice.stride + half]));
            fill_phases(phases, args, table, span.batch, span.token + t, first_pair, pairs);
            fill_row(tile.cos[t], tile.sin[t], phases, pairs, gain, direction);
        }
        rotate_heads<Storage>(args, args.q, tile, span, first_pair, pairs);
        rotate_heads<Storage>(args, args.k, tile, span, first_pair, pairs);
    }
    copy_tail<Storage>(args, args.q, span);
    copy_tail<Storage>(args, args.k, span);
}

}  // namespace

void MRROPE_INSTRUCTION_SET::rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end) {
    with_storage(args.dtype, [&](auto storage) {
        for (int64_t at = begin; at < end;) {
            const int64_t token = at % args.tokens;
            const int64_t left = std::min(end - at, args.tokens - token);
            const auto count = static_cast<int>(std::min<int64_t>(left, tokens_per_tile));
            rotate_span<decltype(storage)>(args, {at / args.tokens, token, count});
            at += count;
        }
    });
}

}  // namespace mrrope
