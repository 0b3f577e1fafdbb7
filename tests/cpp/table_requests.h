// Requests for tables of a Llama 3, as tests vary them.

#pragma once

#include <limits>

#include "mrrope/frequency_table.h"

namespace mrrope {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

inline TableRequest llama(Method method, double scale = 16.0) {
    return {.method = method, .rotary_dim = 128, .base = 5e5, .original_max_position = 8192, .scale = scale};
}

inline TableRequest with_bounds(TableRequest request, Bounds bounds) {
    request.bounds = bounds;
    return request;
}

inline TableRequest with_power(TableRequest request, double power) {
    request.method = Method::mrrope_pow;
    request.power = power;
    return request;
}

}  // namespace mrrope
