#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "contract_memory.h"
#include "elements.h"
#include "float8_elements.h"
#include "mrrope/learnable_rotary.h"
#include "mrrope/learnable_rotary_phase.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"
#include "reference_rotation.h"

// Every op as its header describes it, in double, one head after the other: for heads of fewer bits than that.

namespace mrrope::testing {

using Numbers = std::vector<double>;

// --- memory

inline void write_number(void* to, int64_t at, DType dtype, double value) {
    const auto write = [&](auto number) {
        std::memcpy(static_cast<std::byte*>(to) + at * sizeof number, &number, sizeof number);
    };
    const double rounded = rounded_to(dtype, value);
    switch (dtype) {
        case DType::float64: return write(value);
        case DType::float32: return write(static_cast<float>(rounded));
        case DType::bfloat16:
            return write(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(rounded)) >> 16));
        case DType::float16: {
            // float16 has the float's bits, but 5 of exponent: scaled so that even its subnormals line up.
            const auto bits = std::bit_cast<uint32_t>(static_cast<float>(std::abs(rounded) * 0x1p-112));
            return write(static_cast<uint16_t>(bits >> 13 | (std::signbit(rounded) ? 0x8000 : 0)));
        }
    }
}

inline void write_numbers(void* to, int64_t first, const Numbers& numbers, DType dtype) {
    for (size_t i = 0; i < numbers.size(); ++i) write_number(to, first + static_cast<int64_t>(i), dtype, numbers[i]);
}

inline void write_stored(void* to, int64_t first, const Numbers& numbers, DType dtype, StoredAs stored_as,
                         float scale) {
    if (!is_float8(stored_as)) return write_numbers(to, first, numbers, dtype);
    for (size_t i = 0; i < numbers.size(); ++i) {
        static_cast<uint8_t*>(to)[first + static_cast<int64_t>(i)] = nearest_float8(numbers[i] / scale, stored_as);
    }
}

inline Numbers read_numbers(const void* from, int64_t first, int64_t count, DType dtype) {
    Numbers numbers(count);
    for (int64_t i = 0; i < count; ++i) {
        numbers[i] = element_at(dtype, static_cast<const std::byte*>(from) + (first + i) * size_of(dtype));
    }
    return numbers;
}

inline int64_t integer_at(const PositionsView& view, int64_t row, int64_t batch, int64_t token) {
    const int64_t at = row * view.row_stride + batch * view.batch_stride + token * view.token_stride;
    return view.is_int64 ? static_cast<const int64_t*>(view.data)[at] : static_cast<const int32_t*>(view.data)[at];
}

inline int64_t offset_of(const HeadStrides& strides, int64_t batch, int64_t token, int64_t head = 0) {
    return batch * strides.batch + token * strides.token + head * strides.head;
}

template <class F>
void for_each_token(int64_t batch, int64_t tokens, const F& f) {
    for (int64_t b = 0; b < batch; ++b) {
        for (int64_t t = 0; t < tokens; ++t) f(b, t);
    }
}

struct PlacedHead {
    int64_t batch, token, head;
};

template <class F>
void for_each_head(const RotaryArgs& args, const HeadsView& view, const F& f) {
    for_each_token(args.batch, args.tokens, [&](int64_t batch, int64_t token) {
        for (int head = 0; head < view.heads; ++head) f(PlacedHead{batch, token, head});
    });
}

inline Numbers read_head(const RotaryArgs& args, const void* data, const HeadStrides& strides, const PlacedHead& at) {
    return read_numbers(data, offset_of(strides, at.batch, at.token, at.head), args.head_dim, args.dtype);
}

inline void write_head(const RotaryArgs& args, const HeadsView& view, const PlacedHead& at, const Numbers& head) {
    write_numbers(view.out, offset_of(view.out_strides, at.batch, at.token, at.head), head, args.dtype);
}

// --- rotation

struct Rotation {
    Numbers cos;  // both include the attention factor and that of a query head
    Numbers sin;
};

inline Rotation rotation_of(const RotaryArgs& args, const HeadsView& view, const PlacedHead& at) {
    const TableChoice& choice = args.choice;
    const int64_t by_index = choice.index == nullptr
                                 ? at.batch
                                 : choice.index[at.batch * choice.batch_stride + at.token * choice.token_stride];
    const int64_t table = choice.count == 1 ? 0 : by_index;
    const int64_t first = table * choice.stride + at.head / (view.heads / choice.heads) * choice.head_stride;
    const int half = args.rotary_dim / 2;
    double gain = std::bit_cast<double>(args.table[first + half]);
    if (&view == &args.q && choice.query_factors != nullptr) {
        gain *= std::bit_cast<double>(choice.query_factors[table * choice.stride + at.head]);
    }
    Rotation by;
    for (int pair = 0; pair < half; ++pair) {
        int64_t row = 0;
        if (args.positions.row_of_pair != nullptr) {
            row = std::min<int64_t>(args.positions.row_of_pair[first + pair] & 0xff, args.positions.rows - 1);
        }
        const int64_t position = integer_at(args.positions, row, at.batch, at.token);
        const auto angle = static_cast<double>(reference_angle(position, args.table[first + pair]));
        by.cos.push_back(gain * std::cos(angle));
        by.sin.push_back(gain * std::sin(args.conjugate ? -angle : angle));
    }
    return by;
}

inline Rotation inverse(Rotation by) {
    for (double& sin : by.sin) sin = -sin;
    return by;
}

struct PairOfComponents {
    int first, second;
};

inline PairOfComponents components_of(const RotaryArgs& args, int pair) {
    if (args.pairing == Pairing::halves) return {pair, pair + args.rotary_dim / 2};
    return {2 * pair, 2 * pair + 1};
}

inline Numbers rotated(const RotaryArgs& args, Numbers head, const Rotation& by) {
    for (int pair = 0; pair < args.rotary_dim / 2; ++pair) {
        const auto [a, b] = components_of(args, pair);
        const double x = head[a];
        const double y = head[b];
        head[a] = x * by.cos[pair] - y * by.sin[pair];
        head[b] = y * by.cos[pair] + x * by.sin[pair];
    }
    return head;
}

inline void rotate_view(const RotaryArgs& args, const HeadsView& view) {
    for_each_head(args, view, [&](const PlacedHead& at) {
        write_head(args, view, at,
                   rotated(args, read_head(args, view.in, view.in_strides, at), rotation_of(args, view, at)));
    });
}

inline void call_reference(const RotaryArgs& args) {
    rotate_view(args, args.q);
    rotate_view(args, args.k);
}

inline void call_reference(const RotaryCosSinArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    for (const HeadsView& view : {rotary.q, rotary.k}) {
        for_each_head(rotary, view, [&](const PlacedHead& at) {
            const auto column = [&](const ColumnsView& columns, int pair) {
                const int64_t first = at.batch * columns.batch_stride + at.token * columns.token_stride;
                return read_numbers(columns.data, first + int64_t{pair} * args.columns_per_pair, 1,
                                    args.columns_dtype)[0];
            };
            Rotation by;
            for (int pair = 0; pair < rotary.rotary_dim / 2; ++pair) {
                by.cos.push_back(column(args.cos, pair));
                by.sin.push_back(column(args.sin, pair) * (rotary.conjugate ? -1 : 1));
            }
            write_head(rotary, view, at, rotated(rotary, read_head(rotary, view.in, view.in_strides, at), by));
        });
    }
}

// --- frequencies that are learned

inline RotaryArgs by_tables_of(const LearnableRotaryArgs& args) {
    RotaryArgs rotary = args.rotary;
    rotary.table = args.packed_tables;
    rotary.choice = {.heads = args.tables, .head_stride = rotary.rotary_dim / 2 + 1};
    return rotary;
}

inline void call_reference(const LearnableRotaryArgs& args) {
    const int half = args.rotary.rotary_dim / 2;
    for (int table = 0; table < args.tables; ++table) {
        uint64_t* words = args.packed_tables + int64_t{table} * (half + 1);
        const Numbers frequencies = read_numbers(args.frequencies, int64_t{table} * half, half, args.table_dtype);
        for (int pair = 0; pair < half; ++pair) words[pair] = phase_step_of(frequencies[pair]);
        words[half] = std::bit_cast<uint64_t>(read_numbers(args.attention_factors, table, 1, args.table_dtype)[0]);
    }
    call_reference(by_tables_of(args));
}

inline void call_reference(const LearnableRotaryGradientArgs& args) {
    const RotaryArgs rotary = by_tables_of(args.call);
    const int half = rotary.rotary_dim / 2;
    Numbers frequencies(args.call.tables * half), factors(args.call.tables);
    for (const bool is_q : {true, false}) {
        const HeadsView& view = is_q ? rotary.q : rotary.k;
        const RotatedGradient& gradient = is_q ? args.q : args.k;
        for_each_head(rotary, view, [&](const PlacedHead& at) {
            const Numbers x = read_head(rotary, view.in, view.in_strides, at);
            const Numbers of_rotated = read_head(rotary, gradient.data, gradient.strides, at);
            const Numbers of_x = rotated(rotary, of_rotated, inverse(rotation_of(rotary, view, at)));
            if (view.out != nullptr) write_head(rotary, view, at, of_x);
            const int64_t table = at.head / (view.heads / args.call.tables);
            const double factor = std::bit_cast<double>(rotary.table[table * (half + 1) + half]);
            const auto position = static_cast<double>(integer_at(rotary.positions, 0, at.batch, at.token));
            for (int pair = 0; pair < half; ++pair) {
                const auto [a, b] = components_of(rotary, pair);
                const double turned = of_x[b] * x[a] - of_x[a] * x[b];
                frequencies[table * half + pair] += (rotary.conjugate ? -position : position) * turned;
                factors[table] += (of_x[a] * x[a] + of_x[b] * x[b]) / factor;
            }
        });
    }
    write_numbers(args.frequencies, 0, frequencies, args.call.table_dtype);
    write_numbers(args.attention_factors, 0, factors, args.call.table_dtype);
}

// --- norms

// What a head of q or k is multiplied by: 1 / rms of the heads that share it, and their weights.
struct Norm {
    double inverse_rms = 1;
    int64_t count = 0;  // of the components that share it
    Numbers weights;
};

inline Norm norm_of(const QkNorm& norm, const RotaryArgs& args, const HeadsView& view, const void* weights,
                    const PlacedHead& at) {
    const bool over_head = norm.over == NormOver::head;
    double squares = 0;
    for (int64_t head = over_head ? at.head : 0; head < (over_head ? at.head + 1 : view.heads); ++head) {
        for (const double x : read_head(args, view.in, view.in_strides, {at.batch, at.token, head})) squares += x * x;
    }
    Norm found;
    found.count = int64_t{over_head ? 1 : view.heads} * args.head_dim;
    found.inverse_rms = 1 / std::sqrt(squares / static_cast<double>(found.count) + norm.eps);
    found.weights = read_numbers(weights, over_head ? 0 : at.head * args.head_dim, args.head_dim, args.dtype);
    for (double& weight : found.weights) weight += norm.weight_offset;
    return found;
}

inline Numbers normed(const QkNorm& norm, const RotaryArgs& args, const HeadsView& view, const void* weights,
                      const PlacedHead& at) {
    Numbers head = read_head(args, view.in, view.in_strides, at);
    if (weights == nullptr) return head;
    const Norm by = norm_of(norm, args, view, weights, at);
    for (size_t i = 0; i < head.size(); ++i) head[i] *= by.inverse_rms * by.weights[i];
    return head;
}

inline void call_reference(const QkNormRotaryArgs& args) {
    for (const bool is_q : {true, false}) {
        const HeadsView& view = is_q ? args.rotary.q : args.rotary.k;
        for_each_head(args.rotary, view, [&](const PlacedHead& at) {
            const Numbers head = normed(args, args.rotary, view, is_q ? args.q_weight : args.k_weight, at);
            write_head(args.rotary, view, at, rotated(args.rotary, head, rotation_of(args.rotary, view, at)));
        });
    }
}

inline void call_reference(const QkNormRotaryGradientArgs& args) {
    const QkNormRotaryArgs& call = args.call;
    const RotaryArgs& rotary = call.rotary;
    const bool over_head = call.over == NormOver::head;
    for (const bool is_q : {true, false}) {
        const HeadsView& view = is_q ? rotary.q : rotary.k;
        const OutputGradient& gradient = is_q ? args.q : args.k;
        const void* weights = is_q ? call.q_weight : call.k_weight;
        const auto of_normed = [&](const PlacedHead& at) {
            return rotated(rotary, read_head(rotary, gradient.data, gradient.strides, at),
                           inverse(rotation_of(rotary, view, at)));
        };
        Numbers of_weights(call.weight_count(is_q));
        for_each_head(rotary, view, [&](const PlacedHead& at) {
            const Norm by = norm_of(call, rotary, view, weights, at);
            double projection = 0;  // of the gradient on x, over the components that share a norm
            for (int64_t head = over_head ? at.head : 0; head < (over_head ? at.head + 1 : view.heads); ++head) {
                const PlacedHead other{at.batch, at.token, head};
                const Numbers x = read_head(rotary, view.in, view.in_strides, other);
                const Numbers v = of_normed(other);
                const Norm of_other = norm_of(call, rotary, view, weights, other);
                for (size_t i = 0; i < x.size(); ++i) projection += v[i] * of_other.weights[i] * x[i];
            }
            Numbers x = read_head(rotary, view.in, view.in_strides, at);
            const Numbers v = of_normed(at);
            const double cube = std::pow(by.inverse_rms, 3) / static_cast<double>(by.count);
            for (size_t i = 0; i < x.size(); ++i) {
                of_weights[(over_head ? 0 : at.head * rotary.head_dim) + i] += v[i] * x[i] * by.inverse_rms;
                x[i] = by.inverse_rms * by.weights[i] * v[i] - x[i] * cube * projection;
            }
            write_head(rotary, view, at, x);
        });
        if (gradient.weights != nullptr) write_numbers(gradient.weights, 0, of_weights, rotary.dtype);
    }
}

// --- caches

// The element of a token's slot in a cache, or -1 if it has none.
inline int64_t cache_offset(const CacheSlots& slots, const HeadsView& view, const PlacedHead& at) {
    const int64_t slot = integer_at(slots.of_tokens, 0, at.batch, at.token);
    if (slot < 0 || slot >= (slots.paged ? slots.blocks * slots.block_size : slots.block_size)) return -1;
    return offset_of(view.out_strides, slots.paged ? slot / slots.block_size : at.batch, slot % slots.block_size,
                     at.head);
}

// Without weights for rotary_and_cache.
inline void cache_heads(const RotaryAndCacheArgs& args, const QkNorm& norm) {
    const RotaryArgs& rotary = args.rotary;
    for (const bool is_key : {true, false}) {
        const CachedHeads& cached = is_key ? args.k : args.v;
        for_each_head(rotary, cached.view, [&](const PlacedHead& at) {
            const int64_t offset = cache_offset(args.slots, cached.view, at);
            if (offset < 0) return;
            Numbers head = normed(norm, rotary, cached.view, is_key ? norm.k_weight : nullptr, at);
            if (is_key) head = rotated(rotary, head, rotation_of(rotary, cached.view, at));
            const float scale = cached.scale == nullptr ? 1.0f : cached.scale[at.head * cached.scale_stride];
            write_stored(cached.view.out, offset, head, rotary.dtype, args.cached_as, scale);
        });
    }
}

inline void call_reference(const RotaryAndCacheArgs& args) {
    rotate_view(args.rotary, args.rotary.q);
    cache_heads(args, {});
}

inline void call_reference(const QkNormRotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    for_each_head(rotary, rotary.q, [&](const PlacedHead& at) {
        const Numbers head =
            rotated(rotary, normed(args, rotary, rotary.q, args.q_weight, at), rotation_of(rotary, rotary.q, at));
        float scale = args.q_scale == nullptr ? 1.0f : args.q_scale[at.head * args.q_scale_stride];
        if (args.q_scale_out != nullptr && is_float8(args.q_stored_as)) {
            double largest = 0;
            for (const double x : head) largest = std::max(largest, std::abs(x));
            scale = static_cast<float>(largest / largest_finite(args.q_stored_as));
            args.q_scale_out[offset_of(args.q_scale_out_strides, at.batch, at.token, at.head)] = scale;
        }
        write_stored(rotary.q.out, offset_of(rotary.q.out_strides, at.batch, at.token, at.head), head, rotary.dtype,
                     args.q_stored_as, scale);
    });
    cache_heads(args, args);
    for_each_head(rotary, args.gate, [&](const PlacedHead& at) {
        Numbers gate = read_head(rotary, args.gate.in, args.gate.in_strides, at);
        for (double& x : gate) x = 1 / (1 + std::exp(-x));
        write_head(rotary, args.gate, at, gate);
    });
}

// --- latent attention

inline void copy_part(const RotaryArgs& rotary, const CopiedPart& part) {
    RotaryArgs copied = rotary;
    copied.head_dim = part.dim;
    for_each_head(copied, part.view, [&](const PlacedHead& at) {
        write_head(copied, part.view, at, read_head(copied, part.view.in, part.view.in_strides, at));
    });
}

inline void call_reference(const MlaRotaryArgs& args) {
    call_reference(args.rotary);
    copy_part(args.rotary, args.q_nope);
    copy_part(args.rotary, args.k_nope);
}

inline void call_reference(const MlaRotaryGradientArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    rotate_view(rotary, rotary.q);
    copy_part(rotary, args.q_nope);
    if (rotary.k.heads == 0) return;
    for_each_token(rotary.batch, rotary.tokens, [&](int64_t batch, int64_t token) {
        Numbers sum(rotary.head_dim);
        for (int head = 0; head < rotary.k.heads; ++head) {
            const Numbers x = read_head(rotary, rotary.k.in, rotary.k.in_strides, {batch, token, head});
            for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
        }
        const PlacedHead at{batch, token, 0};
        write_head(rotary, rotary.k, at, rotated(rotary, sum, rotation_of(rotary, rotary.k, at)));
    });
}

inline void call_reference(const MlaRotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    rotate_view(rotary, rotary.q);
    const float scale = args.scale == nullptr ? 1.0f : *args.scale;
    for_each_token(rotary.batch, rotary.tokens, [&](int64_t batch, int64_t token) {
        const PlacedHead at{batch, token, 0};
        const HeadsView& latent = args.latent.view;
        if (cache_offset(args.slots, latent, at) < 0) return;
        const Numbers copied =
            read_numbers(latent.in, offset_of(latent.in_strides, batch, token), args.latent.dim, rotary.dtype);
        write_stored(latent.out, cache_offset(args.slots, latent, at), copied, rotary.dtype, args.cached_as, scale);
        const Numbers key =
            rotated(rotary, read_head(rotary, rotary.k.in, rotary.k.in_strides, at), rotation_of(rotary, rotary.k, at));
        write_stored(rotary.k.out, cache_offset(args.slots, rotary.k, at), key, rotary.dtype, args.cached_as, scale);
    });
}

// --- rescaling

// From one table back to no rotation, and on to the other.
inline void call_reference(const RescaleCacheArgs& args) {
    const int64_t words = args.rotary_dim / 2 + 1;
    for (size_t layer = 0; layer < args.keys.size(); ++layer) {
        const int64_t table_layer = args.layer_of_keys.empty() ? 0 : args.layer_of_keys[layer];
        const HeadsView keys{args.keys[layer], args.keys[layer], args.heads, args.strides, args.strides};
        RotaryArgs rotary{.q = keys,
                          .k = {},
                          .positions = args.positions,
                          .choice = {.heads = args.table_heads, .head_stride = static_cast<int32_t>(words)},
                          .batch = args.batch,
                          .tokens = args.tokens,
                          .head_dim = args.rotary_dim,
                          .rotary_dim = args.rotary_dim,
                          .dtype = args.dtype,
                          .pairing = args.pairing};
        for_each_head(rotary, keys, [&](const PlacedHead& at) {
            const int32_t from = args.from[at.batch];
            const int32_t to = args.to[at.batch];
            if (from == to) return;
            const auto by = [&](int64_t table) {
                rotary.table = args.tables +
                               (table * args.table_layers + table_layer) * args.table_rows * args.table_heads * words;
                return rotation_of(rotary, keys, at);
            };
            Rotation back = inverse(by(from));
            for (int pair = 0; pair < args.rotary_dim / 2; ++pair) {
                const double square = back.cos[pair] * back.cos[pair] + back.sin[pair] * back.sin[pair];
                back.cos[pair] /= square;
                back.sin[pair] /= square;
            }
            const Numbers unrotated = rotated(rotary, read_head(rotary, keys.in, keys.in_strides, at), back);
            write_head(rotary, keys, at, rotated(rotary, unrotated, by(to)));
        });
    }
}

inline constexpr auto run_reference = [](const auto& args, ContractMemory&) { call_reference(args); };

}  // namespace mrrope::testing
