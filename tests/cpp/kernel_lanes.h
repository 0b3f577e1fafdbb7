#pragma once

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "lane_layout.h"

// Runs the kernels' own lane layouts (kernels/lane_layout.h) on component numbers instead of components.

namespace mrrope::testing {

// Calls f.operator()<pairing, vector>().
template <class F>
void with_pairing_and_vector(Pairing pairing, int vector, F&& f) {
    const auto with_vector = [&]<Pairing p>() {
        switch (vector) {
            case 1: return f.template operator()<p, 1>();
            case 2: return f.template operator()<p, 2>();
            case 4: return f.template operator()<p, 4>();
            case 8: return f.template operator()<p, 8>();
        }
        FAIL() << "no kernel has vectors of " << vector;
    };
    if (pairing == Pairing::halves) return with_vector.template operator()<Pairing::halves>();
    return with_vector.template operator()<Pairing::interleaved>();
}

// What HeadFragment does to one head: calls touch(component) for both components of every pair of the lane, and expects
// them to be the pair whose phase step the lane loads. Loads must be aligned, given aligned heads.
template <Pairing pairing, int Vector, class Layout, class Touch>
void rotate_components(const Layout& layout, int half, Touch&& touch) {
    ASSERT_EQ(layout.first() % Vector, 0);
    ASSERT_EQ(layout.second() % Vector, 0);
    std::array<int, Vector> first, second;
    std::iota(first.begin(), first.end(), layout.first());
    std::iota(second.begin(), second.end(), layout.second());
    for_each_pair<Layout::crosses_vectors, Vector>(first, second, [&](int j, int a, int b) {
        const int pair = layout.pair(j);
        ASSERT_EQ(a, pairing == Pairing::halves ? pair : 2 * pair);
        ASSERT_EQ(b, pairing == Pairing::halves ? pair + half : 2 * pair + 1);
        touch(a);
        touch(b);
    });
}

}  // namespace mrrope::testing
