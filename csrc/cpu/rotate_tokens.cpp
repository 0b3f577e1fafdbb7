#include "rotate_tokens.h"

#include <algorithm>
#include <cstring>

#include "rotate_pairs.h"

// Compiled once per instruction set: see instruction_sets.h.

namespace mrrope {
namespace {

// Tokens per tile of cos/sin. In layouts with heads outermost, more tokens make longer contiguous runs; 64 tokens of 64
// float pairs (head_dim 128) are 32 KiB of cos/sin, which fit in a common L1 cache.
constexpr int tokens_per_tile = 64;
// Pairs per tile; wider heads take several tiles.
constexpr int pairs_per_tile = 128;

template <class Real>
struct Tile {
    alignas(64) Real cos[tokens_per_tile][pairs_per_tile];
    alignas(64) Real sin[tokens_per_tile][pairs_per_tile];
};

// The tokens [token, token + count) of one sequence.
struct TokenSpan {
    int64_t batch;
    int64_t token;
    int count;
};

// Calls f(in, out, t, head) for every head of every token of the span, in memory order.
template <class Storage, class F>
void for_each_head(const HeadsView& view, const TokenSpan& span, F&& f) {
    const auto origin = [&](const HeadStrides& strides) {
        return span.batch * strides.batch + span.token * strides.token;
    };
    const auto* in = static_cast<const Storage*>(view.in) + origin(view.in_strides);
    auto* out = static_cast<Storage*>(view.out) + origin(view.out_strides);
    const auto visit = [&](int t, int head) {
        f(in + t * view.in_strides.token + head * view.in_strides.head,
          out + t * view.out_strides.token + head * view.out_strides.head, t, head);
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

// The heads of `view` that use the table of `table_head`.
template <class Storage>
HeadsView heads_of_table(const HeadsView& view, const TableChoice& choice, int table_head) {
    HeadsView part = view;
    part.heads = view.heads / choice.heads;
    const int64_t first = int64_t{table_head} * part.heads;
    part.in = static_cast<const Storage*>(view.in) + first * view.in_strides.head;
    part.out = static_cast<Storage*>(view.out) + first * view.out_strides.head;
    return part;
}

template <class Storage>
void copy_tail(const RotaryArgs& args, const HeadsView& view, const TokenSpan& span) {
    const size_t bytes = (args.head_dim - args.rotary_dim) * sizeof(Storage);
    if (bytes == 0 || view.in == view.out) return;
    for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int, int) {
        std::memcpy(out + args.rotary_dim, in + args.rotary_dim, bytes);
    });
}

// The heads of q or k that use the table of `table_head`.
template <class Storage, class Real>
void rotate_heads(const RotaryArgs& args, const HeadsView& q_or_k, int table_head, const Tile<Real>& tile,
                  const TokenSpan& span, int first_pair, int pairs) {
    const HeadsView view = heads_of_table<Storage>(q_or_k, args.choice, table_head);
    if (&q_or_k == &args.q && args.choice.query_factors != nullptr) {
        const int first_head = table_head * view.heads;
        for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int t, int head) {
            const double factor = query_factor(args.choice, span.batch, span.token + t, first_head + head);
            rotate_pairs_times(static_cast<Real>(factor), in, out, args, first_pair, pairs, tile.cos[t], tile.sin[t]);
        });
    } else {
        for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int t, int) {
            rotate_pairs(in, out, args, first_pair, pairs, tile.cos[t], tile.sin[t]);
        });
    }
}

// fill(cos, sin, t, table_head, first_pair, pairs) computes the cosines and sines of the span's token t.
template <class Storage, class Fill>
void rotate_span(const RotaryArgs& args, const TokenSpan& span, Fill&& fill) {
    using Real = decltype(load(Storage{}));
    const int half = args.rotary_dim / 2;
    Tile<Real> tile;
    for (int first_pair = 0; first_pair < half; first_pair += pairs_per_tile) {
        const int pairs = std::min(pairs_per_tile, half - first_pair);
        for (int table_head = 0; table_head < args.choice.heads; ++table_head) {
            for (int t = 0; t < span.count; ++t) fill(tile.cos[t], tile.sin[t], t, table_head, first_pair, pairs);
            for (const HeadsView* view : {&args.q, &args.k}) {
                rotate_heads<Storage>(args, *view, table_head, tile, span, first_pair, pairs);
            }
        }
    }
    copy_tail<Storage>(args, args.q, span);
    copy_tail<Storage>(args, args.k, span);
}

// Calls f(span) for the tokens [begin, end), numbered across the batch.
template <class F>
void for_each_span(const RotaryArgs& args, int64_t begin, int64_t end, F&& f) {
    for (int64_t at = begin; at < end;) {
        const int64_t token = at % args.tokens;
        const int64_t left = std::min(end - at, args.tokens - token);
        const auto count = static_cast<int>(std::min<int64_t>(left, tokens_per_tile));
        f(TokenSpan{at / args.tokens, token, count});
        at += count;
    }
}

template <int step, class Column, class Real>
void widen_columns(Real* to, const Column* columns, int pairs, Real factor) {
#pragma omp simd
    for (int i = 0; i < pairs; ++i) to[i] = factor * static_cast<Real>(load(columns[i * step]));
}

// The columns of one token, from `first_pair` on, in the precision of the computation and times `factor`.
template <class Real>
void fill_columns(Real* to, const RotaryCosSinArgs& args, const ColumnsView& view, int64_t batch, int64_t token,
                  int first_pair, int pairs, Real factor) {
    const int step = args.columns_per_pair;
    const int64_t first = batch * view.batch_stride + token * view.token_stride + int64_t{first_pair} * step;
    with_storage(args.columns_dtype, [&](auto column) {
        const auto* columns = static_cast<const decltype(column)*>(view.data) + first;
        if (step == 1) {
            widen_columns<1>(to, columns, pairs, factor);
        } else {
            widen_columns<2>(to, columns, pairs, factor);
        }
    });
}

}  // namespace

void MRROPE_INSTRUCTION_SET::rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end) {
    with_storage(args.dtype, [&](auto storage) {
        using Real = decltype(load(storage));
        const auto direction = static_cast<Real>(args.conjugate ? -1 : 1);
        for_each_span(args, begin, end, [&](const TokenSpan& span) {
            const auto fill = [&](Real* cos, Real* sin, int t, int table_head, int first_pair, int pairs) {
                alignas(64) uint64_t phases[pairs_per_tile];
                fill_cos_sin(cos, sin, phases, args, span.batch, span.token + t, table_head, first_pair, pairs,
                             direction);
            };
            rotate_span<decltype(storage)>(args, span, fill);
        });
    });
}

void MRROPE_INSTRUCTION_SET::rotate_tokens_by_columns(const RotaryCosSinArgs& args, int64_t begin, int64_t end) {
    with_storage(args.rotary.dtype, [&](auto storage) {
        using Real = decltype(load(storage));
        const auto direction = static_cast<Real>(args.rotary.conjugate ? -1 : 1);
        for_each_span(args.rotary, begin, end, [&](const TokenSpan& span) {
            const auto fill = [&](Real* cos, Real* sin, int t, int, int first_pair, int pairs) {
                const int64_t token = span.token + t;
                fill_columns(cos, args, args.cos, span.batch, token, first_pair, pairs, Real(1));
                fill_columns(sin, args, args.sin, span.batch, token, first_pair, pairs, direction);
            };
            rotate_span<decltype(storage)>(args.rotary, span, fill);
        });
    });
}

}  // namespace mrrope
