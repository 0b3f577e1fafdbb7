#pragma once

#include <string>
#include <vector>

namespace mrrope::testing {

// Every plan that there is a kernel for, including those that are chosen for larger or smaller launches only. Of the
// kernels that write caches and those of MLA.
template <class Shape>
auto plans_with_kernel(const Shape& shape) {
    std::vector<decltype(plan_with(shape, 1, 1))> plans;
    for (const int vector : {8, 4, 2, 1}) {
        for (const int heads_per_thread : {1, 2}) {
            if (has_plan(shape, vector, heads_per_thread)) plans.push_back(plan_with(shape, vector, heads_per_thread));
        }
    }
    return plans;
}

template <class Plan>
std::string describe_vectors(const Plan& plan) {
    return std::to_string(plan.vector) + " components, " + std::to_string(plan.heads_per_thread) + " heads per thread";
}

}  // namespace mrrope::testing
