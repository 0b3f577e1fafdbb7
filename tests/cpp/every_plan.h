#pragma once

#include <string>
#include <vector>

#include "devices.h"
#include "rotary_plan.h"

namespace mrrope::testing {

// By every kernel that serves the shape, including those that are chosen for large shapes only.
inline std::vector<RotaryPlan> every_plan(const RotaryShape& shape, const RotaryKernels& kernels) {
    std::vector<RotaryPlan> plans;
    for (const RotaryKernel& kernel : kernels) {
        if (serves(kernel, shape)) plans.push_back(plan_by(kernel, shape));
    }
    return plans;
}

inline std::vector<RotaryPlan> every_plan(const RotaryShape& shape) {
    return every_plan(shape, rotary_kernels(shape.element_size));
}

inline std::vector<RotaryPlan> every_plan(const RotaryArgs& args) {
    return every_plan(shape_of(args));
}

inline std::string describe(TableLookup lookup) {
    switch (lookup) {
        case TableLookup::single: return "one table";
        case TableLookup::indexed: return "table index";
        case TableLookup::position_rows: return "position rows";
    }
    return "unknown lookup";
}

inline std::string describe(const RotaryShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.heads) + " head_dim " + std::to_string(s.head_dim) + " rotary_dim " +
           std::to_string(s.rotary_dim) + " element " + std::to_string(s.element_size) + " alignment " +
           std::to_string(s.alignment) + ", " + describe(s.lookup) +
           (s.pairing == Pairing::interleaved ? ", interleaved" : "") +
           (s.table_heads == 1 ? "" : " head tables " + std::to_string(s.table_heads)) +
           (s.has_query_factors ? " query factors" : "");
}

inline std::string describe(const RotaryPlan& plan) {
    return std::to_string(plan.vector) + " components, " + std::to_string(plan.heads_per_thread) +
           " heads per thread, " + describe(plan.lookup) + (plan.is_per_head ? ", per head" : "") +
           (plan.whole_heads ? ", whole heads" : "") + (plan.tokens_inside ? ", tokens inside" : "") +
           (plan.any_shape ? ", any shape" : "");
}

}  // namespace mrrope::testing
