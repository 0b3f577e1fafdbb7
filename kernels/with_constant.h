#pragma once

#include <stdexcept>

namespace mrrope {

// Calls f.operator()<v>() for the one of the constants v that equals `value`: makes it a template argument.
template <auto first, auto... others, class F>
auto with_constant(decltype(first) value, F&& f) {
    if constexpr (sizeof...(others) > 0) {
        if (value != first) return with_constant<others...>(value, f);
    }
    if (value != first) throw std::logic_error("mrrope: no kernel is instantiated for this plan");
    return f.template operator()<first>();
}

}  // namespace mrrope
