#pragma once

#include <cstddef>
#include <utility>

namespace mrrope::testing {

// Converts to any field; only used unevaluated.
struct AnyField {
    template <class T>
    operator T() const;
};

template <class Aggregate, size_t... Index>
constexpr bool takes_initializers(std::index_sequence<Index...>) {
    return requires { Aggregate{(static_cast<void>(Index), AnyField{})...}; };
}

// The number of fields of an aggregate, a base counting as one: the most initializers that it takes.
template <class Aggregate, size_t count = 0>
constexpr size_t field_count() {
    if constexpr (takes_initializers<Aggregate>(std::make_index_sequence<count + 1>{})) {
        return field_count<Aggregate, count + 1>();
    } else {
        return count;
    }
}

}  // namespace mrrope::testing
