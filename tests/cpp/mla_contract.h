#pragma once

#include <string>

#include "args_contract.h"
#include "cache_contract.h"
#include "contract_memory.h"
#include "field_changes.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "rotary_contract.h"

// The contracts of mla_rotary, of its gradient and of mla_rotary_and_cache.

namespace mrrope::testing {

// The heads of both parts of a head change together.
inline FieldChanges<CopiedPart> copied_part_changes() {
    return FieldChanges<CopiedPart>()
        .add_struct("view", &CopiedPart::view, view_changes())
        .drop("view.heads")
        .add("dim", [](CopiedPart& p) { p.dim -= 16; })
        .add("dim", [](CopiedPart& p) { p.dim = 0; });
}

template <class Args>
FieldChanges<Args> mla_rotation_changes() {
    const std::string one_row = "the kernels take one position per token";
    const std::string one_table = "there are no head tables";
    return FieldChanges<Args>()
        .add_struct("rotary", &Args::rotary, rotary_changes())
        .drop("rotary.q.heads")
        .drop("rotary.k.heads")
        .drop("rotary.head_dim")
        .drop("rotary.rotary_dim")
        .add_together({"rotary.head_dim", "rotary.rotary_dim"},
                      [](Args& a) { a.rotary.head_dim = a.rotary.rotary_dim = a.rotary.rotary_dim - 16; })
        .keep("rotary.positions.rows", one_row)
        .keep("rotary.positions.row_stride", one_row)
        .keep("rotary.positions.row_of_pair", one_row)
        .keep("rotary.choice.heads", one_table)
        .keep("rotary.choice.head_stride", one_table)
        .keep("rotary.choice.query_factors", one_table);
}

inline RotaryArgs add_mla_rotation(CallParts& parts) {
    RotaryArgs rotation = parts.add_rotation();
    rotation.head_dim = rotation.rotary_dim;
    rotation.choice.heads = 1;
    rotation.choice.head_stride = 0;
    rotation.choice.query_factors = nullptr;
    return rotation;
}

inline ContractOptions for_mla(ContractOptions options) {
    options.has_rows = false;
    return options;
}

// Both parts of a head have memory of their own, so that each can be moved alone.
inline Contract<MlaRotaryArgs> mla_rotary_contract(const ContractOptions& options) {
    using Args = MlaRotaryArgs;
    CallParts parts(for_mla(options));
    Args call{.rotary = add_mla_rotation(parts), .q_nope = {}, .k_nope = {}};
    call.rotary.q = parts.add_view("q", CallParts::q_heads);
    call.rotary.k = parts.add_view("k", CallParts::k_heads);
    call.rotary.k.in_strides.head = 0;
    call.q_nope = {.view = parts.add_view("q_nope", CallParts::q_heads), .dim = 48};
    call.k_nope = {.view = parts.add_view("k_nope", CallParts::k_heads), .dim = 48};
    return make_contract(
        "mla_rotary", parts, call,
        mla_rotation_changes<Args>()
            .add_struct("q_nope", &Args::q_nope, copied_part_changes())
            .add_struct("k_nope", &Args::k_nope, copied_part_changes())
            .add_together({"rotary.q.heads", "q_nope.view.heads"},
                          [](Args& a) { a.rotary.q.heads = a.q_nope.view.heads = a.rotary.q.heads / 2; })
            .add_together({"rotary.k.heads", "k_nope.view.heads"},
                          [](Args& a) { a.rotary.k.heads = a.k_nope.view.heads = a.rotary.k.heads / 2; }));
}

inline Contract<MlaRotaryGradientArgs> mla_rotary_gradient_contract(const ContractOptions& options) {
    using Args = MlaRotaryGradientArgs;
    CallParts parts(for_mla(options));
    Args call{.rotary = add_mla_rotation(parts), .q_nope = {}};
    call.rotary.q = parts.add_view("q", CallParts::q_heads);
    call.rotary.k = parts.add_view("k", CallParts::k_heads);
    call.q_nope = {.view = parts.add_view("q_nope", CallParts::q_heads), .dim = 48};
    return make_contract("mla_rotary_gradient", parts, call,
                         mla_rotation_changes<Args>()
                             .unused("rotary.k.out_strides.head")
                             .add("rotary.k.heads", [](Args& a) { a.rotary.k.heads /= 2; })
                             .add_struct("q_nope", &Args::q_nope, copied_part_changes())
                             .add_together({"rotary.q.heads", "q_nope.view.heads"}, [](Args& a) {
                                 a.rotary.q.heads = a.q_nope.view.heads = a.rotary.q.heads / 2;
                             }));
}

inline Contract<MlaRotaryAndCacheArgs> mla_rotary_and_cache_contract(const ContractOptions& options) {
    using Args = MlaRotaryAndCacheArgs;
    CallParts parts(for_mla(options));
    Args call{.rotary = add_mla_rotation(parts), .latent = {}, .slots = add_slots(parts)};
    call.rotary.q = parts.add_view("q", CallParts::q_heads, Holds::q);
    call.rotary.k = add_cached_view(parts, "k", 1, call.slots);
    call.latent = {.view = add_cached_view(parts, "latent", 1, call.slots), .dim = 48};
    if (options.rounds_to_float8) call.cached_as = StoredAs::float8_e4m3;
    call.scale = add_scales(parts, "scale");
    const std::string one_head = "the key and the latent are one head";
    return make_contract("mla_rotary_and_cache", parts, call,
                         mla_rotation_changes<Args>()
                             .add("rotary.q.heads", [](Args& a) { a.rotary.q.heads /= 2; })
                             .add("rotary.q.heads", [](Args& a) { a.rotary.q.heads = 0; })
                             .keep("rotary.k.heads", one_head)
                             .unused("rotary.k.in_strides.head")
                             .unused("rotary.k.out_strides.head")
                             .add_struct("latent", &Args::latent, copied_part_changes())
                             .keep("latent.view.heads", one_head)
                             .unused("latent.view.in_strides.head")
                             .unused("latent.view.out_strides.head")
                             .add_struct("slots", &Args::slots, cache_slot_changes())
                             .add("cached_as", [](Args& a) { change(a.cached_as); })
                             .add("cached_as", [](Args& a) { a.cached_as = StoredAs::heads_dtype; })
                             .add("scale", [](Args& a) { advance(a.scale); })
                             .add("scale", [](Args& a) { a.scale = nullptr; }));
}

}  // namespace mrrope::testing
