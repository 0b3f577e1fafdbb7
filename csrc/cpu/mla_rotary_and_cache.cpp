#include "mrrope/mla_rotary_and_cache.h"

#include <cstring>
#include <vector>

#include "mrrope/float8.h"
#include "parallel_items.h"
#include "rotate_tokens.h"
#include "storage.h"

namespace mrrope {
namespace {

void on_this_thread(int64_t count, int64_t, const RangeBody& body) {
    body(0, count);
}

// The slot of the only token of `args`, or -1 if it is out of range.
int64_t slot_of(const CacheSlots& slots) {
    const int64_t slot = slots.of_tokens.is_int64 ? *static_cast<const int64_t*>(slots.of_tokens.data)
                                                  : *static_cast<const int32_t*>(slots.of_tokens.data);
    return slot < slots.count() ? slot : -1;
}

void* in_slot(const HeadsView& cached, int64_t slot, const CacheSlots& slots, int element_size) {
    const HeadStrides& strides = cached.out_strides;
    const int64_t element = slot / slots.block_size * strides.batch + slot % slots.block_size * strides.token;
    return static_cast<char*>(cached.out) + element * element_size;
}

std::vector<float> widened(const void* in, int count, DType dtype) {
    std::vector<float> wide(count);
    with_storage(dtype, [&](auto storage) {
        const auto* components = static_cast<const decltype(storage)*>(in);
        for (int at = 0; at < count; ++at) wide[at] = static_cast<float>(load(components[at]));
    });
    return wide;
}

void store_as_float8(const std::vector<float>& wide, float scale, StoredAs format, void* out) {
    const Float8Scale by{scale, nan_unless_float8_scale(scale, 1.0f / scale)};
    auto* bytes = static_cast<uint8_t*>(out);
    for (const float x : wide) *bytes++ = float8_bits(by.divide(x), format);
}

// Rotates one head of the only token of `rotary`.
void rotate_head(RotaryArgs rotary, DType dtype, const void* in, void* out) {
    rotary.k = {};
    rotary.q = {.in = in, .out = out, .heads = 1, .in_strides = {}, .out_strides = {}};
    rotary.dtype = dtype;
    rotary_cpu(rotary, on_this_thread);
}

// Of the only token of `args`.
void write_row(const MlaRotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const int64_t slot = slot_of(args.slots);
    if (slot < 0) return;
    const CopiedPart& latent = args.latent;
    const bool float8 = is_float8(args.cached_as);
    const int cached_size = float8 ? 1 : size_of(rotary.dtype);
    void* latent_out = in_slot(latent.view, slot, args.slots, cached_size);
    void* key_out = in_slot(rotary.k, slot, args.slots, cached_size);
    if (!float8) {
        std::memcpy(latent_out, latent.view.in, int64_t{latent.dim} * cached_size);
        return rotate_head(rotary, rotary.dtype, rotary.k.in, key_out);
    }
    const float scale = args.scale == nullptr ? 1.0f : *args.scale;
    store_as_float8(widened(latent.view.in, latent.dim, rotary.dtype), scale, args.cached_as, latent_out);
    std::vector<float> key = widened(rotary.k.in, rotary.rotary_dim, rotary.dtype);
    rotate_head(rotary, DType::float32, key.data(), key.data());
    store_as_float8(key, scale, args.cached_as, key_out);
}

}  // namespace

void mla_rotary_and_cache_cpu(const MlaRotaryAndCacheArgs& args, const ParallelFor& parallel_for) {
    validate(args);
    const RotaryArgs& rotary = args.rotary;
    RotaryArgs queries = rotary;
    queries.k = {};
    rotary_cpu(queries, parallel_for);
    const int64_t per_token = int64_t{args.latent.dim} + rotary.rotary_dim;
    parallel_for_items(parallel_for, rotary.batch * rotary.tokens, per_token, components_per_thread,
                       [&](int64_t begin, int64_t end) {
                           for (int64_t at = begin; at < end; ++at) {
                               write_row(slice(args, at / rotary.tokens, 1, at % rotary.tokens, 1));
                           }
                       });
}

}  // namespace mrrope
