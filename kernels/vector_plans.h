#pragma once

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "head_split.h"
#include "rotary_plan.h"
#include "rotary_schedule.h"

// Shared by the cache and MLA kernels, whose threads take vectors of one or two heads: alignment, choice and dispatch.

namespace mrrope {

// Components of the widest vector, up to a full one, to which all loads and stores of the heads are aligned. A store
// has as many components as a load; in a float8 cache they are fewer bytes.
inline int aligned_vector(const HeadsView& view, int element_size, int stored_size) {
    int vector = full_vector(element_size);
    const auto is_aligned = [&] {
        return starts_aligned(view.in, view.in_strides, element_size, vector * element_size) &&
               starts_aligned(view.out, view.out_strides, stored_size, vector * stored_size);
    };
    while (vector > 1 && view.heads > 0 && !is_aligned()) vector /= 2;
    return vector;
}

struct VectorsOfThread {
    int vector;
    int heads_per_thread;
};

// Two heads per thread gain from so many threads on, counted with one head and a full vector each, where keys go to a
// cache; threads_for_full_vectors without one.
inline constexpr int64_t threads_for_two_cached_heads = 1 << 17;

// The first of the preferred ones for which has_plan(vector, heads_per_thread), else the widest vectors. Large launches
// share cos/sin between two heads; small ones are latency-bound and finish sooner with half vectors of one.
template <class HasPlan>
VectorsOfThread choose_vectors(int element_size, const VectorsOfThread& preferred, HasPlan&& has_plan) {
    const int full = full_vector(element_size);
    for (const VectorsOfThread& vectors : {preferred, {full, 2}, {full / 2, 1}, {full / 4, 1}}) {
        if (has_plan(vectors.vector, vectors.heads_per_thread)) return vectors;
    }
    return {1, 1};
}

// Calls launch.operator()<pairing, Vector, HeadsPerThread, lookup>() for a plan. Only what Kernels::has is
// instantiated. One table takes a kernel that loads no table index where there is one.
template <class Kernels, class Launch>
void launch_by_plan(Pairing pairing, const VectorsOfThread& plan, bool has_one_table, Launch&& launch) {
    constexpr int full = full_vector(Kernels::element_size);
    const auto launches_kernel = [&]<Pairing p, TableLookup lookup, int Vector, int HeadsPerThread> {
        bool is_planned = false;
        if constexpr (Kernels::has(p, Vector, HeadsPerThread, lookup)) {
            is_planned = pairing == p && plan.vector == Vector && plan.heads_per_thread == HeadsPerThread;
            if (is_planned) launch.template operator()<p, Vector, HeadsPerThread, lookup>();
        }
        return is_planned;
    };
    const auto launches_lookup = [&]<Pairing p, TableLookup lookup> {
        return launches_kernel.template operator()<p, lookup, full, 2>() ||
               launches_kernel.template operator()<p, lookup, full / 2, 1>() ||
               launches_kernel.template operator()<p, lookup, full / 4, 1>() ||
               launches_kernel.template operator()<p, lookup, 1, 1>();
    };
    const auto launches_pairing = [&]<Pairing p> {
        return (has_one_table && launches_lookup.template operator()<p, TableLookup::single>()) ||
               launches_lookup.template operator()<p, TableLookup::indexed>();
    };
    if (launches_pairing.template operator()<Pairing::halves>()) return;
    if (launches_pairing.template operator()<Pairing::interleaved>()) return;
    throw std::logic_error("mrrope: no kernel takes such vectors and heads a thread");
}

}  // namespace mrrope
