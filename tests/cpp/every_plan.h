#pragma once

#include <string>
#include <vector>

#include "devices.h"
#include "rotary_plan.h"

namespace mrrope::testing {

// Every plan that there is an instantiation for, including those that are chosen for large shapes only.
inline std::vector<RotaryPlan> every_plan(const RotaryShape& shape, bool has_choice) {
    RotaryShape large = shape;
    large.tokens = 1 << 20;
    const int full = plan(large, h200).vector;
    std::vector<RotaryPlan> plans;
    const bool has_rows_and_head_tables = shape.with_rows && shape.is_per_head();
    for (const int heads_per_thread : {1, 2}) {
        if (!has_rows_and_head_tables || heads_per_thread == heads_per_thread_with_rows) {
            plans.push_back(plan_with(shape, h200, full, heads_per_thread));
        }
    }
    if (full > 1 && !has_rows_and_head_tables) {
        plans.push_back(plan_with(shape, h200, full, 3));
        if (shape.is_per_head()) plans.push_back(plan_with(shape, h200, full, heads_of_whole_table));
        for (const int vector : {full / 2, 1}) plans.push_back(plan_with(shape, h200, vector, 1));
    }
    if (!has_choice && !shape.with_rows && !shape.is_per_head() && full * shape.element_size == access_bytes) {
        plans.push_back(plan_with(shape, h200, full, 2));
        plans.back().tokens_inside = true;
    }
    if (has_whole_head_plan(shape)) plans.push_back(plan_whole_heads(shape, h200));
    if (!has_choice || shape.with_rows) return plans;
    std::vector<RotaryPlan> with_and_without_speculation;
    for (RotaryPlan plan : plans) {
        for (const bool speculates : {true, false}) {
            plan.speculates_table = speculates;
            with_and_without_speculation.push_back(plan);
        }
    }
    return with_and_without_speculation;
}

inline std::vector<RotaryPlan> every_plan(const RotaryArgs& args) {
    return every_plan(shape_of(args), args.choice.count > 1);
}

inline std::string describe(const RotaryShape& s) {
    return "batch " + std::to_string(s.batch) + " tokens " + std::to_string(s.tokens) + " heads " +
           std::to_string(s.heads) + " head_dim " + std::to_string(s.head_dim) + " rotary_dim " +
           std::to_string(s.rotary_dim) + " element " + std::to_string(s.element_size) +
           (s.aligned ? " aligned" : " unaligned") +
           (s.table_heads == 1 ? "" : " head tables " + std::to_string(s.table_heads)) +
           (s.has_query_factors ? " query factors" : "");
}

inline std::string describe(const RotaryPlan& plan) {
    return std::to_string(plan.vector) + " components, " + std::to_string(plan.heads_per_thread) + " heads per thread" +
           (plan.whole_heads ? ", whole heads" : "") + (plan.tokens_inside ? ", tokens inside" : "") +
           (plan.speculates_table ? ", speculative" : "");
}

}  // namespace mrrope::testing
