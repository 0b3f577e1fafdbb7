#pragma once

#include <string>
#include <vector>

#include "rotary_plan.h"

namespace mrrope::testing {

// Every plan that there is a kernel for: small shapes as they are taken when they are large, too.
inline std::vector<RotaryPlan> every_plan(const RotaryShape& shape, bool chooses_table) {
    RotaryShape large = shape;
    large.tokens = 1 << 20;
    const int full = plan_rotary(large).vector;
    std::vector<RotaryPlan> plans;
    for (const int heads_per_thread : {1, 2}) {
        if (!shape.with_rows || heads_per_thread == heads_per_thread_with_rows) {
            plans.push_back(plan_with(shape, full, heads_per_thread));
        }
    }
    if (full > 1 && !shape.with_rows) {
        plans.push_back(plan_with(shape, full, 3));
        for (const int vector : {full / 2, 1}) plans.push_back(plan_with(shape, vector, 1));
    }
    if (!chooses_table || shape.with_rows) return plans;
    std::vector<RotaryPlan> with_and_without_guess;
    for (RotaryPlan plan : plans) {
        for (const bool guesses : {true, false}) {
            plan.guesses_table = guesses;
            with_and_without_guess.push_back(plan);
        }
    }
    return with_and_without_guess;
}

inline std::vector<RotaryPlan> every_plan(const RotaryArgs& args) {
    return every_plan(shape_of(args), args.choice.count > 1);
}

inline std::string describe(const RotaryPlan& plan) {
    return std::to_string(plan.vector) + " components, " + std::to_string(plan.heads_per_thread) + " heads a thread" +
           (plan.guesses_table ? "" : ", no guess");
}

}  // namespace mrrope::testing
