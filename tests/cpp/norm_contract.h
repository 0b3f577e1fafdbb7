#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "args_contract.h"
#include "contract_memory.h"
#include "field_changes.h"
#include "mrrope/qk_norm_rotary.h"
#include "rotary_contract.h"

// The contracts of qk_norm_rotary and of its gradient.

namespace mrrope::testing {

inline FieldChanges<QkNorm> norm_changes() {
    return FieldChanges<QkNorm>()
        .add("q_weight", [](QkNorm& n) { advance_by_vectors(n.q_weight); })
        .add("k_weight", [](QkNorm& n) { advance_by_vectors(n.k_weight); })
        .add("eps", [](QkNorm& n) { n.eps += 0.5; })
        .add("weight_offset", [](QkNorm& n) { n.weight_offset += 1.0; })
        .add("over", [](QkNorm& n) { n.over = n.over == NormOver::head ? NormOver::all_heads : NormOver::head; });
}

inline QkNorm add_norm(CallParts& parts) {
    const size_t most_weights = CallParts::q_heads * (CallParts::head_dim + 16) + 64;
    return {.q_weight = parts.memory()->add_numbers("q_weight", Holds::input, most_weights),
            .k_weight = parts.memory()->add_numbers("k_weight", Holds::input, most_weights),
            .eps = 1e-6,
            .weight_offset = 0.25,
            .over = parts.options().norms_all_heads ? NormOver::all_heads : NormOver::head};
}

inline FieldChanges<QkNormRotaryArgs> qk_norm_rotary_changes() {
    return FieldChanges<QkNormRotaryArgs>()
        .add_base(norm_changes())
        .add_struct("rotary", &QkNormRotaryArgs::rotary, rotary_changes());
}

inline QkNormRotaryArgs add_qk_norm_rotary(CallParts& parts) {
    return {add_norm(parts), parts.add_rotary()};
}

inline Contract<QkNormRotaryArgs> qk_norm_rotary_contract(const ContractOptions& options) {
    CallParts parts(options);
    return make_contract("qk_norm_rotary", parts, add_qk_norm_rotary(parts), qk_norm_rotary_changes());
}

inline FieldChanges<OutputGradient> output_gradient_changes() {
    return FieldChanges<OutputGradient>()
        .add("data", [](OutputGradient& g) { advance_by_vectors(g.data); })
        .add_struct("strides", &OutputGradient::strides, stride_changes())
        .add("weights", [](OutputGradient& g) { advance_by_vectors(g.weights); })
        .add("weight_sums", [](OutputGradient& g) { advance_by_vectors(g.weight_sums); })
        .add_together({"weights", "weight_sums"}, [](OutputGradient& g) { g.weights = g.weight_sums = nullptr; });
}

inline constexpr int64_t weight_sums = 8192;  // most that there is memory for

inline OutputGradient add_output_gradient(CallParts& parts, const std::string& name, int heads) {
    ContractMemory& memory = *parts.memory();
    return {.data = parts.add_heads(name, Holds::input, heads),
            .strides = parts.strides(heads),
            .weights = memory.add_numbers(name + ".weights", Holds::head_sums, heads * (CallParts::head_dim + 16) + 64),
            .weight_sums = memory.add_numbers(name + ".weight_sums", Holds::scratch, weight_sums + 8)};
}

inline Contract<QkNormRotaryGradientArgs> qk_norm_rotary_gradient_contract(const ContractOptions& options) {
    using Args = QkNormRotaryGradientArgs;
    CallParts parts(options);
    const Args call{.call = add_qk_norm_rotary(parts),
                    .q = add_output_gradient(parts, "q", CallParts::q_heads),
                    .k = add_output_gradient(parts, "k", CallParts::k_heads)};
    return make_contract("qk_norm_rotary_gradient", parts, call,
                         FieldChanges<Args>()
                             .add_struct("call", &Args::call, qk_norm_rotary_changes())
                             .add_struct("q", &Args::q, output_gradient_changes())
                             .add_struct("k", &Args::k, output_gradient_changes()));
}

}  // namespace mrrope::testing
