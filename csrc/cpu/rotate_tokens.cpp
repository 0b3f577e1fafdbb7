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

// Calls f(in, out, t) for every head of every token of the span, in memory order.
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
    for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int) {
        std::memcpy(out + args.rotary_dim, in + args.rotary_dim, bytes);
    });
}

template <class Storage, class Real>
void rotate_heads(const RotaryArgs& args, const HeadsView& view, const Tile<Real>& tile, const TokenSpan& span,
                  int first_pair, int pairs) {
    for_each_head<Storage>(view, span, [&](const Storage* in, Storage* out, int t) {
        rotate_pairs(in, out, args, first_pair, pairs, tile.cos[t], tile.sin[t]);
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
        for (int table_head = 0; table_head < args.choice.heads; ++table_head) {
            for (int t = 0; t < span.count; ++t) {
                alignas(64) uint64_t phases[pairs_per_tile];
                fill_cos_sin(tile.cos[t], tile.sin[t], phases, args, span.batch, span.token + t, table_head, first_pair,
                             pairs, direction);
            }
            for (const HeadsView& view : {args.q, args.k}) {
                rotate_heads<Storage>(args, heads_of_table<Storage>(view, args.choice, table_head), tile, span,
                                      first_pair, pairs);
            }
        }
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
