#include "mrrope/rotary_and_cache.h"

#include <cstring>
#include <vector>

#include "mrrope/float8.h"
#include "parallel_items.h"
#include "rotate_tokens.h"
#include "storage.h"

// Each token is a call of rotary_cpu that writes k to the token's slot; float8 caches go through a float32 copy.

namespace mrrope {
namespace {

void on_this_thread(int64_t count, int64_t, const RangeBody& body) {
    body(0, count);
}

// The heads of the only token of `args`, with its slot as output. No heads if the slot is out of range.
HeadsView with_slot_as_output(const RotaryAndCacheArgs& args, const CachedHeads& heads) {
    const CacheSlots& slots = args.slots;
    const int64_t slot = slots.of_tokens.is_int64 ? *static_cast<const int64_t*>(slots.of_tokens.data)
                                                  : *static_cast<const int32_t*>(slots.of_tokens.data);
    if (slot < 0 || slot >= slots.count()) return {};
    const HeadStrides& strides = heads.view.out_strides;
    const int64_t element = slot / slots.block_size * strides.batch + slot % slots.block_size * strides.token;
    HeadsView view = heads.view;
    view.out = static_cast<char*>(view.out) + element * (args.float8 ? 1 : size_of(args.rotary.dtype));
    return view;
}

void copy_heads(const HeadsView& view, int64_t head_bytes, int element_size) {
    for (int64_t head = 0; head < view.heads; ++head) {
        std::memcpy(static_cast<char*>(view.out) + head * view.out_strides.head * element_size,
                    static_cast<const char*>(view.in) + head * view.in_strides.head * element_size, head_bytes);
    }
}

std::vector<float> widened(const HeadsView& view, int head_dim, DType dtype) {
    std::vector<float> wide(static_cast<size_t>(view.heads) * head_dim);
    with_storage(dtype, [&](auto storage) {
        for (int64_t head = 0; head < view.heads; ++head) {
            const auto* in = static_cast<const decltype(storage)*>(view.in) + head * view.in_strides.head;
            for (int at = 0; at < head_dim; ++at) wide[head * head_dim + at] = static_cast<float>(load(in[at]));
        }
    });
    return wide;
}

void store_as_float8(const std::vector<float>& wide, const HeadsView& view, const CachedHeads& heads, int head_dim) {
    for (int64_t head = 0; head < view.heads; ++head) {
        const float scale = heads.scale == nullptr ? 1.0f : heads.scale[head * heads.scale_stride];
        const Float8Scale by{scale, 1.0f / scale};
        auto* out = static_cast<uint8_t*>(view.out) + head * view.out_strides.head;
        for (int at = 0; at < head_dim; ++at) out[at] = float8_e4m3_bits(by.divide(wide[head * head_dim + at]));
    }
}

void rotate_in_place(std::vector<float>& wide, int heads, const RotaryArgs& rotary) {
    RotaryArgs args = rotary;
    const HeadStrides strides{.head = rotary.head_dim};
    args.q = {.in = wide.data(), .out = wide.data(), .heads = heads, .in_strides = strides, .out_strides = strides};
    args.dtype = DType::float32;
    rotary_cpu(args, on_this_thread);
}

void rotate_and_cache_token(const RotaryAndCacheArgs& args) {
    RotaryArgs rotary = args.rotary;
    const int head_dim = rotary.head_dim;
    const HeadsView k = with_slot_as_output(args, args.k);
    const HeadsView v = with_slot_as_output(args, args.v);
    if (args.float8) {
        std::vector<float> keys = widened(k, head_dim, rotary.dtype);
        rotate_in_place(keys, k.heads, rotary);
        store_as_float8(keys, k, args.k, head_dim);
        store_as_float8(widened(v, head_dim, rotary.dtype), v, args.v, head_dim);
    } else {
        rotary.k = k;
        copy_heads(v, static_cast<int64_t>(head_dim) * size_of(rotary.dtype), size_of(rotary.dtype));
    }
    rotary_cpu(rotary, on_this_thread);
}

}  // namespace

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const ParallelFor& parallel_for) {
    const RotaryArgs& rotary = args.rotary;
    const int64_t heads = static_cast<int64_t>(rotary.q.heads) + args.k.view.heads + args.v.view.heads;
    const int64_t per_token = heads * rotary.head_dim;
    const auto body = [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; ++at) {
            rotate_and_cache_token(slice(args, at / rotary.tokens, 1, at % rotary.tokens, 1));
        }
    };
    parallel_for_items(parallel_for, rotary.batch * rotary.tokens, per_token, components_per_thread, body);
}

}  // namespace mrrope
