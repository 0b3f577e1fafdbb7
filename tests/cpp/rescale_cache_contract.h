#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "args_contract.h"
#include "contract_memory.h"
#include "field_changes.h"
#include "mrrope/rescale_cache.h"
#include "rotary_contract.h"

// The contract of rescale_cache.

namespace mrrope::testing {

inline Contract<RescaleCacheArgs> rescale_cache_contract(const ContractOptions& options) {
    using Args = RescaleCacheArgs;
    // In host memory on every backend.
    struct Layers {
        std::array<void*, 2> keys;
        std::array<int32_t, 2> layer_of_keys = {1, 0};
    };
    CallParts parts(options);
    const auto layers = std::make_shared<Layers>();
    for (void*& keys : layers->keys) {
        keys = parts.add_heads(&keys == &layers->keys[0] ? "keys[0]" : "keys[1]", Holds::heads, CallParts::q_heads);
    }
    Args call{.keys = layers->keys,
              .strides = parts.strides(CallParts::q_heads),
              .positions = parts.add_positions(),
              .tables = parts.memory()->add_tables("tables", Holds::input, 2048),
              .table_count = 3,
              .from = parts.memory()->add_integers("from", {0, 1, 2}),
              .to = parts.memory()->add_integers("to", {1, 2, 0}),
              .batch = CallParts::batch,
              .tokens = CallParts::tokens,
              .heads = CallParts::q_heads,
              .rotary_dim = parts.rotary_dim(),
              .dtype = options.dtype};
    if (options.has_choice) {
        call.table_layers = 2;
        call.layer_of_keys = layers->layer_of_keys;
        call.table_heads = CallParts::table_heads;
    }
    call.table_rows = options.has_rows ? 2 : 1;
    FieldChanges<Args> fields;
    // `layers` lives as long as the change that holds it.
    fields.add("keys", [layers](Args& a) { a.keys = a.keys.first(1); })
        .add_struct("strides", &Args::strides, stride_changes())
        .add_struct("positions", &Args::positions, position_changes())
        .add("tables", [](Args& a) { advance(a.tables); })
        .add_unused("table_count", [](Args& a) { ++a.table_count; })  // bounds indices, which are in bounds
        .add("table_layers", [](Args& a) { ++a.table_layers; })
        .add("layer_of_keys", [](Args& a) { a.layer_of_keys = {}; })
        .add("table_rows", [](Args& a) { a.table_rows = a.table_rows == 1 ? 2 : 1; })
        .add("table_heads", [](Args& a) { a.table_heads = a.table_heads == 1 ? 2 : 1; })
        .add("from", [](Args& a) { advance(a.from); })
        .add("to", [](Args& a) { advance(a.to); })
        .add("batch", [](Args& a) { --a.batch; })
        .add("tokens", [](Args& a) { --a.tokens; })
        .add("heads", [](Args& a) { a.heads /= 2; })
        .add("rotary_dim", [](Args& a) { a.rotary_dim -= 16; })
        .add("dtype", [](Args& a) { a.dtype = other_dtype(a.dtype); })
        .add("pairing", [](Args& a) { flip(a.pairing); });
    return make_contract("rescale_cache", parts, call, fields);
}

}  // namespace mrrope::testing
