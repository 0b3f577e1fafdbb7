#pragma once

#include <vector>

#include "rotary_plan.h"

namespace mrrope::testing {

// Every plan that there is a kernel for: small shapes as they are taken when they are large, too.
inline std::vector<RotaryPlan> every_plan(const RotaryShape& shape) {
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
    const size_t known = plans.size();
    for (size_t i = 0; i < known && !shape.with_rows; ++i) {
        plans.push_back(plans[i]);
        plans.back().guesses_table = !plans[i].guesses_table;
    }
    return plans;
}

}  // namespace mrrope::testing
