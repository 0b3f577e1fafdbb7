#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "args_contract.h"
#include "contract_memory.h"
#include "field_changes.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rotary_and_cache.h"
#include "norm_contract.h"
#include "rotary_contract.h"

// The contracts of rotary_and_cache and qk_norm_rotary_and_cache.

namespace mrrope::testing {

inline FieldChanges<CacheSlots> cache_slot_changes() {
    return FieldChanges<CacheSlots>()
        .add_struct("of_tokens", &CacheSlots::of_tokens, slot_changes())
        .add("paged", [](CacheSlots& s) { s.paged = !s.paged; })
        .add("blocks", [](CacheSlots& s) { s.blocks /= 2; })
        .add("block_size", [](CacheSlots& s) { s.block_size /= 2; });
}

inline CacheSlots add_slots(CallParts& parts) {
    constexpr int64_t blocks = 4;
    constexpr int64_t block_size = 8;
    return {.of_tokens = {.data = parts.memory()->add_slots("slots", 128, blocks * block_size),
                          .is_int64 = false,
                          .batch_stride = 16,
                          .token_stride = 1},
            .blocks = blocks,
            .block_size = block_size};
}

// The number of `heads` is that of k and v.
inline FieldChanges<CachedHeads> cached_heads_changes() {
    return FieldChanges<CachedHeads>()
        .add_struct("view", &CachedHeads::view, view_changes())
        .drop("view.heads")
        .add("scale", [](CachedHeads& c) { advance(c.scale); })
        .add("scale", [](CachedHeads& c) { c.scale = nullptr; })
        .add("scale_stride", [](CachedHeads& c) { c.scale_stride = 0; });
}

inline const float* add_scales(CallParts& parts, const std::string& name) {
    return reinterpret_cast<const float*>(parts.memory()->add_positive_numbers(name, 32));
}

// A cache in place of the output.
inline HeadsView add_cached_view(CallParts& parts, const std::string& name, int heads, const CacheSlots& slots) {
    HeadsView view{.in = parts.add_heads(name + ".in", Holds::input, heads),
                   .heads = heads,
                   .in_strides = parts.strides(heads),
                   .out_strides = parts.strides(heads, slots.block_size)};
    view.out = parts.memory()->add_numbers(name + ".out", Holds::cache, slots.blocks * (view.out_strides.batch + 16));
    return view;
}

inline CachedHeads add_cached_heads(CallParts& parts, const std::string& name, const CacheSlots& slots) {
    return {.view = add_cached_view(parts, name, CallParts::k_heads, slots),
            .scale = add_scales(parts, name + ".scale"),
            .scale_stride = 1};
}

inline void change(StoredAs& stored_as) {
    stored_as = stored_as == StoredAs::float8_e4m3 ? StoredAs::float8_e5m2 : StoredAs::heads_dtype;
}

inline FieldChanges<RotaryAndCacheArgs> rotary_and_cache_changes() {
    using Args = RotaryAndCacheArgs;
    return FieldChanges<Args>()
        .add_struct("rotary", &Args::rotary, rotary_changes())
        .keep("rotary.k", "rotary is of q only")
        .keep("rotary.conjugate", "a cache has no gradient: launchers throw")
        .add_struct("k", &Args::k, cached_heads_changes())
        .add_struct("v", &Args::v, cached_heads_changes())
        .add_together({"k.view.heads", "v.view.heads"},
                      [](Args& a) { a.k.view.heads = a.v.view.heads = a.v.view.heads / 2; })
        .add_struct("slots", &Args::slots, cache_slot_changes())
        .add("cached_as", [](Args& a) { change(a.cached_as); })
        .add("cached_as", [](Args& a) { a.cached_as = StoredAs::heads_dtype; });
}

inline RotaryAndCacheArgs add_rotary_and_cache(CallParts& parts) {
    RotaryAndCacheArgs call{.rotary = parts.add_rotation(), .k = {}, .v = {}, .slots = add_slots(parts)};
    call.rotary.q = parts.add_view("q", CallParts::q_heads, Holds::q);
    call.k = add_cached_heads(parts, "k", call.slots);
    call.v = add_cached_heads(parts, "v", call.slots);
    if (parts.options().rounds_to_float8) call.cached_as = StoredAs::float8_e4m3;
    return call;
}

inline Contract<RotaryAndCacheArgs> rotary_and_cache_contract(const ContractOptions& options) {
    CallParts parts(options);
    return make_contract("rotary_and_cache", parts, add_rotary_and_cache(parts), rotary_and_cache_changes());
}

// Fields of `gate.in` are those of `gate.out`: it is replaced in place.
inline FieldChanges<QkNormRotaryAndCacheArgs> qk_norm_rotary_and_cache_changes() {
    using Args = QkNormRotaryAndCacheArgs;
    FieldChanges<Args> changes;
    changes.add_base(rotary_and_cache_changes())
        .add_base(norm_changes())
        .add("q_weight", [](Args& a) { a.q_weight = nullptr; })
        .add("k_weight", [](Args& a) { a.k_weight = nullptr; })
        .add("q_stored_as", [](Args& a) { change(a.q_stored_as); })
        .add("q_stored_as", [](Args& a) { a.q_stored_as = StoredAs::heads_dtype; })
        .add("gate.heads", [](Args& a) { a.gate.heads /= 2; })
        .add("gate.heads", [](Args& a) { a.gate.heads = 0; })
        .add_together({"gate.in", "gate.out"}, [](Args& a) {
            advance_by_vectors(a.gate.out);
            a.gate.in = a.gate.out;
        });
    const FieldChanges<HeadStrides> strides = stride_changes();
    for (const Change<HeadStrides>& stride : strides.changes()) {
        const std::string& name = stride.fields.front();
        changes.add_together({"gate.in_strides." + name, "gate.out_strides." + name}, [apply = stride.apply](Args& a) {
            apply(a.gate.in_strides);
            apply(a.gate.out_strides);
        });
    }
    return changes;
}

inline QkNormRotaryAndCacheArgs add_qk_norm_rotary_and_cache(CallParts& parts) {
    QkNormRotaryAndCacheArgs call;
    static_cast<RotaryAndCacheArgs&>(call) = add_rotary_and_cache(parts);
    static_cast<QkNorm&>(call) = add_norm(parts);
    if (parts.options().rounds_to_float8) call.q_stored_as = StoredAs::float8_e4m3;
    std::byte* gate = parts.add_heads("gate", Holds::heads, CallParts::q_heads);
    call.gate = {.in = gate,
                 .out = gate,
                 .heads = CallParts::q_heads,
                 .in_strides = parts.strides(CallParts::q_heads),
                 .out_strides = parts.strides(CallParts::q_heads)};
    return call;
}

inline Contract<QkNormRotaryAndCacheArgs> qk_norm_rotary_and_cache_contract(const ContractOptions& options) {
    using Args = QkNormRotaryAndCacheArgs;
    CallParts parts(options);
    Args call = add_qk_norm_rotary_and_cache(parts);
    call.q_scale = add_scales(parts, "q_scale");
    call.q_scale_stride = 1;
    const std::string why = "scales are given: see the contract with computed ones";
    return make_contract("qk_norm_rotary_and_cache", parts, call,
                         qk_norm_rotary_and_cache_changes()
                             .add("q_scale", [](Args& a) { advance(a.q_scale); })
                             .add("q_scale", [](Args& a) { a.q_scale = nullptr; })
                             .add("q_scale_stride", [](Args& a) { a.q_scale_stride = 0; })
                             .keep("q_scale_out", why)
                             .keep("q_scale_out_strides", why));
}

inline Contract<QkNormRotaryAndCacheArgs> qk_norm_rotary_and_cache_contract_with_computed_scales(
    const ContractOptions& options) {
    using Args = QkNormRotaryAndCacheArgs;
    CallParts parts(options);
    Args call = add_qk_norm_rotary_and_cache(parts);
    call.q_scale = add_scales(parts, "q_scale");
    call.q_scale_stride = 1;
    call.q_scale_out = reinterpret_cast<float*>(parts.memory()->add_numbers("q_scale_out", Holds::scales, 2048));
    call.q_scale_out_strides = {.batch = 1024, .token = 64, .head = 1};
    return make_contract("qk_norm_rotary_and_cache with computed scales", parts, call,
                         qk_norm_rotary_and_cache_changes()
                             .add_unused("q_scale", [](Args& a) { a.q_scale = nullptr; })
                             .add_unused("q_scale_stride", [](Args& a) { a.q_scale_stride = 0; })
                             .add("q_scale_out", [](Args& a) { advance(a.q_scale_out); })
                             .add("q_scale_out", [](Args& a) { a.q_scale_out = nullptr; })
                             .add_struct("q_scale_out_strides", &Args::q_scale_out_strides, stride_changes()));
}

}  // namespace mrrope::testing
