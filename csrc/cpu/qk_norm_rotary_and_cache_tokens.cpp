#include "qk_norm_rotary_and_cache_tokens.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "mrrope/float8.h"
#include "norm_rows.h"

// Compiled once per instruction set: see instruction_sets.h.

namespace mrrope {
namespace {

// One row, widened to Real, the phases of its token, and its cosines and sines by every head's table.
template <class Real>
struct Scratch {
    Real* row;
    TokenCosSin<Real> by;

    Scratch(double* memory, const RotaryArgs& args) {
        const int64_t half = args.rotary_dim / 2;
        const int64_t all_tables = args.choice.heads * half;
        by.phases = reinterpret_cast<uint64_t*>(memory);
        by.cos = reinterpret_cast<Real*>(memory + half);
        by.sin = reinterpret_cast<Real*>(memory + half + all_tables);
        row = reinterpret_cast<Real*>(memory + half + 2 * all_tables);
    }
};

// Where the heads of one token go; nowhere if `token` is nullptr.
struct Destination {
    char* token = nullptr;
    int64_t head_stride = 0;  // in bytes

    char* head(int64_t head) const { return token + head * head_stride; }
};

Destination destination(const HeadsView& view, int64_t outer, int64_t inner, int element_size) {
    const int64_t offset = outer * view.out_strides.batch + inner * view.out_strides.token;
    return {static_cast<char*>(view.out) + offset * element_size, view.out_strides.head * element_size};
}

// The cache slot of a token; nowhere if it is out of range.
Destination cache_slot(const RotaryAndCacheArgs& args, const CachedHeads& cached, int64_t batch, int64_t token) {
    const CacheSlots& slots = args.slots;
    const int64_t slot = position_at(slots.of_tokens, 0, batch, token);
    if (slot < 0 || slot >= slots.count()) return {};
    const int64_t block = slots.paged ? slot / slots.block_size : batch;
    return destination(cached.view, block, slot % slots.block_size, size_of(args.cached_as, args.rotary.dtype));
}

void store_float8(const float* wide, int count, float scale, StoredAs stored_as, char* to) {
    const Float8Scale by{scale, nan_unless_float8_scale(scale, 1.0f / scale)};
    auto* bytes = reinterpret_cast<uint8_t*>(to);
#pragma omp simd
    for (int i = 0; i < count; ++i) bytes[i] = float8_bits(by.divide(wide[i]), stored_as);
}

float largest_magnitude(const float* wide, int count) {
    float largest = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < count; ++i) largest = std::fmax(largest, std::abs(wide[i]));
    return largest;
}

// No exponential overflows, so small results keep their precision.
template <class Real>
Real sigmoid(Real x) {
    const Real small = std::exp(-std::abs(x));
    return (x < 0 ? small : Real(1)) / (Real(1) + small);
}

// One token of one of q, k, v and gate.
template <class Storage>
class TokenHeads {
    using Real = decltype(load(Storage{}));

public:
    TokenHeads(const QkNormRotaryAndCacheArgs& args, const HeadsView& view, int64_t batch, int64_t token,
               const Scratch<Real>& scratch)
        : args_(args), view_(view), batch_(batch), token_(token), scratch_(scratch) {}

    // store_head(head, wide) stores one head of the normed, if `weights` are given, and rotated row.
    template <class StoreHead>
    void norm_and_rotate(const void* weights, StoreHead&& store_head) {
        for_each_row(args_.rotary, args_.over, view_, batch_, token_, [&](const Row& row) {
            Real* wide = scratch_.row;
            read<Storage>(row, view_.in, view_.in_strides, wide);
            if (weights != nullptr) norm_row<Storage>(args_, weights, wide, row.size());
            scratch_.by.rotate(args_.rotary, row, wide);
            for (int head = 0; head < row.heads; ++head) store_head(row.first + head, wide + head * row.head_dim);
        });
    }

    template <class StoreHead>
    void each_widened(StoreHead&& store_head) {
        for_each_row(args_.rotary, NormOver::head, view_, batch_, token_, [&](const Row& row) {
            read<Storage>(row, view_.in, view_.in_strides, scratch_.row);
            store_head(row.first, scratch_.row);
        });
    }

    // As the heads' dtype. Components that are neither normed nor rotated keep their bits.
    void store_narrowed(int head, const Real* wide, bool keeps_tail, const Destination& out) const {
        auto* to = reinterpret_cast<Storage*>(out.head(head));
        const int narrowed = keeps_tail ? args_.rotary.rotary_dim : args_.rotary.head_dim;
#pragma omp simd
        for (int i = 0; i < narrowed; ++i) store(to[i], wide[i]);
        std::memmove(to + narrowed, in(head) + narrowed, (args_.rotary.head_dim - narrowed) * sizeof(Storage));
    }

    void copy(const Destination& out) const {
        for (int head = 0; head < view_.heads; ++head) {
            std::memcpy(out.head(head), in(head), args_.rotary.head_dim * sizeof(Storage));
        }
    }

private:
    const Storage* in(int64_t head) const {
        const HeadStrides& strides = view_.in_strides;
        return static_cast<const Storage*>(view_.in) + batch_ * strides.batch + token_ * strides.token +
               head * strides.head;
    }

    const QkNormRotaryAndCacheArgs& args_;
    const HeadsView& view_;
    int64_t batch_;
    int64_t token_;
    const Scratch<Real>& scratch_;
};

template <class Storage, class Real>
void store_query(const QkNormRotaryAndCacheArgs& args, int64_t batch, int64_t token, const Scratch<Real>& scratch) {
    const HeadsView& view = args.rotary.q;
    TokenHeads<Storage> heads(args, view, batch, token, scratch);
    const Destination out = destination(view, batch, token, size_of(args.q_stored_as, args.rotary.dtype));
    heads.norm_and_rotate(args.q_weight, [&](int head, const Real* wide) {
        if constexpr (std::is_same_v<Real, float>) {
            if (is_float8(args.q_stored_as)) {
                const int head_dim = args.rotary.head_dim;
                float scale = args.q_scale == nullptr ? 1.0f : args.q_scale[head * args.q_scale_stride];
                if (args.q_scale_out != nullptr) {
                    const HeadStrides& strides = args.q_scale_out_strides;
                    scale = Float8Range::of(args.q_stored_as).scale_of(largest_magnitude(wide, head_dim));
                    args.q_scale_out[batch * strides.batch + token * strides.token + head * strides.head] = scale;
                }
                return store_float8(wide, head_dim, scale, args.q_stored_as, out.head(head));
            }
        }
        heads.store_narrowed(head, wide, args.q_weight == nullptr, out);
    });
}

template <class Storage, class Real>
void cache_key_and_value(const QkNormRotaryAndCacheArgs& args, int64_t batch, int64_t token,
                         const Scratch<Real>& scratch) {
    for (const bool is_key : {true, false}) {
        const CachedHeads& cached = is_key ? args.k : args.v;
        if (cached.view.heads == 0) continue;
        const Destination out = cache_slot(args, cached, batch, token);
        if (out.token == nullptr) continue;
        TokenHeads<Storage> heads(args, cached.view, batch, token, scratch);
        if (is_float8(args.cached_as)) {
            if constexpr (std::is_same_v<Real, float>) {
                const auto store_head = [&](int head, const float* wide) {
                    const float scale = cached.scale == nullptr ? 1.0f : cached.scale[head * cached.scale_stride];
                    store_float8(wide, args.rotary.head_dim, scale, args.cached_as, out.head(head));
                };
                if (is_key) {
                    heads.norm_and_rotate(args.k_weight, store_head);
                } else {
                    heads.each_widened(store_head);
                }
            }
        } else if (is_key) {
            heads.norm_and_rotate(args.k_weight, [&](int head, const Real* wide) {
                heads.store_narrowed(head, wide, args.k_weight == nullptr, out);
            });
        } else {
            heads.copy(out);
        }
    }
}

template <class Storage, class Real>
void open_gate(const QkNormRotaryAndCacheArgs& args, int64_t batch, int64_t token, const Scratch<Real>& scratch) {
    const Destination out = destination(args.gate, batch, token, sizeof(Storage));
    TokenHeads<Storage> heads(args, args.gate, batch, token, scratch);
    heads.each_widened([&](int head, Real* wide) {
        for (int i = 0; i < args.rotary.head_dim; ++i) wide[i] = sigmoid(wide[i]);
        heads.store_narrowed(head, wide, /*keeps_tail=*/false, out);
    });
}

}  // namespace

void MRROPE_INSTRUCTION_SET::store_tokens(const QkNormRotaryAndCacheArgs& args, double* memory, int64_t begin,
                                          int64_t end) {
    with_storage(args.rotary.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        const Scratch<decltype(load(storage))> scratch(memory, args.rotary);
        for (int64_t at = begin; at < end; ++at) {
            const int64_t batch = at / args.rotary.tokens;
            const int64_t token = at % args.rotary.tokens;
            scratch.by.fill(args.rotary, args.rotary.conjugate, batch, token);
            store_query<Storage>(args, batch, token, scratch);
            cache_key_and_value<Storage>(args, batch, token, scratch);
            if (args.gate.heads > 0) open_gate<Storage>(args, batch, token, scratch);
        }
    });
}

}  // namespace mrrope
