#include "learnable_rotary_tokens.h"

#include <algorithm>
#include <cstring>

#include "rotate_pairs.h"

// Compiled once per instruction set: see instruction_sets.h.

namespace mrrope {
namespace {

// Pairs per tile of cos/sin and sums; wider heads take several tiles.
constexpr int pairs_per_tile = 128;

template <class Real>
struct PairTile {
    int first;  // pair
    int pairs;
    alignas(64) uint64_t phases[pairs_per_tile];
    alignas(64) Real cos[pairs_per_tile];
    alignas(64) Real sin[pairs_per_tile];

    void fill(const uint64_t* phase_steps, int64_t position, Real direction) {
        for (int i = 0; i < pairs; ++i) phases[i] = phase_of(position, phase_steps[first + i]);
#pragma omp simd
        for (int i = 0; i < pairs; ++i) {
            const CosSin<Real> by = scaled_cos_sin(phases[i], Real(1), direction);
            cos[i] = by.cos;
            sin[i] = by.sin;
        }
    }
};

// Calls f(table, tile) for every table and tile of pairs.
template <class Real, class F>
void for_each_tile(const LearnableRotaryArgs& args, F&& f) {
    const int half = args.rotary.rotary_dim / 2;
    PairTile<Real> tile;
    for (int table = 0; table < args.tables; ++table) {
        for (tile.first = 0; tile.first < half; tile.first += pairs_per_tile) {
            tile.pairs = std::min(pairs_per_tile, half - tile.first);
            f(table, tile);
        }
    }
}

int64_t offset_of(const HeadStrides& strides, int64_t batch, int64_t token, int64_t head) {
    return batch * strides.batch + token * strides.token + head * strides.head;
}

// Calls f(head) for the heads of a view that use a table.
template <class F>
void for_each_head_of(const HeadsView& view, int tables, int table, F&& f) {
    const int per_table = view.heads / tables;
    for (int head = table * per_table; head < (table + 1) * per_table; ++head) f(head);
}

template <class Storage>
void copy_tail(const RotaryArgs& args, const Storage* in, Storage* out) {
    std::memcpy(out + args.rotary_dim, in + args.rotary_dim, (args.head_dim - args.rotary_dim) * sizeof(Storage));
}

// Sums over the heads of one token that use one table. With v the gradient rotated back: of v x x, whose product with
// the position is the gradient of the frequency, and of v . x, the gradient of the attention factor.
template <class Real>
struct PairSums {
    alignas(64) Real cross[pairs_per_tile];
    alignas(64) Real dot[pairs_per_tile];
};

// The components of pair i are those at i * step and at i * step + second.
template <bool writes, int step, class Storage, class Real>
void add_head(const Storage* x, const Storage* gradient, Storage* out, int second, Real gain,
              const PairTile<Real>& tile, PairSums<Real>& sums) {
#pragma omp simd
    for (int i = 0; i < tile.pairs; ++i) {
        const int a = i * step;
        const int b = a + second;
        const Pair<Real> v = rotate<Real>({load(gradient[a]), load(gradient[b])}, {tile.cos[i], tile.sin[i]});
        const Real x_first = load(x[a]);
        const Real x_second = load(x[b]);
        sums.cross[i] += v.second * x_first - v.first * x_second;
        sums.dot[i] += v.first * x_first + v.second * x_second;
        if constexpr (writes) {
            store(out[a], gain * v.first);
            store(out[b], gain * v.second);
        }
    }
}

template <Pairing pairing, class Storage, class Real>
void add_view(const LearnableRotaryArgs& args, const HeadsView& view, const RotatedGradient& gradient, int64_t batch,
              int64_t token, int table, Real gain, const PairTile<Real>& tile, PairSums<Real>& sums) {
    constexpr bool halves = pairing == Pairing::halves;
    constexpr int step = halves ? 1 : 2;
    const int second = halves ? args.rotary.rotary_dim / 2 : 1;
    const int start = tile.first * step;
    for_each_head_of(view, args.tables, table, [&](int head) {
        const auto* x = static_cast<const Storage*>(view.in) + offset_of(view.in_strides, batch, token, head);
        const auto* g = static_cast<const Storage*>(gradient.data) + offset_of(gradient.strides, batch, token, head);
        if (view.out == nullptr) {
            add_head<false, step>(x + start, g + start, static_cast<Storage*>(nullptr), second, gain, tile, sums);
            return;
        }
        auto* out = static_cast<Storage*>(view.out) + offset_of(view.out_strides, batch, token, head);
        add_head<true, step>(x + start, g + start, out + start, second, gain, tile, sums);
        if (tile.first == 0) copy_tail(args.rotary, g, out);
    });
}

}  // namespace

void MRROPE_INSTRUCTION_SET::learnable_gradient_tokens(const LearnableRotaryGradientArgs& args, double* all_sums,
                                                       int64_t begin, int64_t end) {
    const LearnableRotaryArgs& call = args.call;
    const RotaryArgs& rotary = call.rotary;
    const int half = rotary.rotary_dim / 2;
    with_storage(rotary.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        using Real = decltype(load(storage));
        for (int64_t at = begin; at < end; ++at) {
            const int64_t batch = at / rotary.tokens;
            const int64_t token = at % rotary.tokens;
            const int64_t position = position_at(rotary.positions, 0, batch, token);
            const double signed_position = static_cast<double>(position) * (rotary.conjugate ? -1 : 1);
            for_each_tile<Real>(call, [&](int table, PairTile<Real>& tile) {
                const int64_t first_word = int64_t{table} * (half + 1);
                const uint64_t* words = call.packed_tables + first_word;
                tile.fill(words, position, static_cast<Real>(rotary.conjugate ? 1 : -1));
                PairSums<Real> of_token{};
                const auto gain = static_cast<Real>(factor_of(words[half]));
                const auto add_views = [&]<Pairing pairing>() {
                    add_view<pairing, Storage>(call, rotary.q, args.q, batch, token, table, gain, tile, of_token);
                    add_view<pairing, Storage>(call, rotary.k, args.k, batch, token, table, gain, tile, of_token);
                };
                if (rotary.pairing == Pairing::halves) {
                    add_views.template operator()<Pairing::halves>();
                } else {
                    add_views.template operator()<Pairing::interleaved>();
                }
                double* sums = all_sums + first_word;
                double dot = 0.0;
#pragma omp simd reduction(+ : dot)
                for (int i = 0; i < tile.pairs; ++i) {
                    sums[tile.first + i] += signed_position * static_cast<double>(of_token.cross[i]);
                    dot += static_cast<double>(of_token.dot[i]);
                }
                sums[half] += dot;
            });
        }
    });
}

}  // namespace mrrope
