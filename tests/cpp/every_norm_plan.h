#pragma once

#include <vector>

#include "devices.h"
#include "qk_norm_rotary_and_cache_plan.h"
#include "qk_norm_rotary_plan.h"

namespace mrrope::testing {

// Every plan that there is an instantiation for: kernels with a lookup for calls without one, too, and two passes last.
// `Shape`: QkNormRotaryShape or QkNormRotaryAndCacheShape.
template <class Shape>
auto every_norm_plan(const Shape& shape, const Device& device = h200) {
    std::vector<decltype(plan(shape, device))> plans;
    for (const bool needs_lookup : {false, true}) {
        if (shape.needs_lookup && !needs_lookup) continue;
        Shape other = shape;
        other.needs_lookup = needs_lookup;
        for (const int heads_per_thread : {1, 2, 4, 8}) {
            const auto found = plan_with(other, device, heads_per_thread);
            if (found.in_registers && found.needs_lookup == needs_lookup) plans.push_back(found);
        }
    }
    plans.push_back(plan_with(shape, device, 0));
    return plans;
}

inline std::vector<QkNormRotaryGradientPlan> every_gradient_plan(const QkNormRotaryShape& shape,
                                                                 const Device& device = h200) {
    std::vector<QkNormRotaryGradientPlan> plans;
    QkNormRotaryShape other = shape;
    for (const bool needs_lookup : {false, true}) {
        other.needs_lookup = shape.needs_lookup || needs_lookup;
        const QkNormRotaryGradientPlan found = plan_gradient(other, device);
        if (found.in_registers && found.needs_lookup == needs_lookup) plans.push_back(found);
    }
    other.aligned = false;
    plans.push_back(plan_gradient(other, device));
    return plans;
}

}  // namespace mrrope::testing
