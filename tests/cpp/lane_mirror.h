#pragma once

#include <gtest/gtest.h>

#include "mrrope/rotary.h"

// The kernels' index arithmetic within a head, mirrored.

namespace mrrope::testing {

// What kernels/head_fragment.cuh calls LaneLayout, which only nvcc can compile.
struct LaneMirror {
    Pairing pairing;
    int vector;
    int lane;
    int half;

    bool crosses_vectors() const { return pairing == Pairing::halves || vector == 1; }
    bool takes_neighbours() const { return pairing == Pairing::interleaved && vector == 1; }
    int first() const { return takes_neighbours() ? 2 * lane : lane * vector; }
    int second() const { return takes_neighbours() ? 2 * lane + 1 : half + lane * vector; }
    int pair(int j) const {
        if (crosses_vectors()) return lane * vector + j;
        const int held = vector / 2;
        return lane * held + (j < held ? j : half / 2 + j - held);
    }

    // What HeadFragment does to one head: calls touch(component) for both components of every pair of the lane, and
    // expects them to be the pair whose turns the kernel reads. Heads start at multiples of 16 bytes wherever there are
    // vectors.
    template <class Touch>
    void rotate(Touch&& touch) const {
        ASSERT_EQ(first() % vector, 0);
        ASSERT_EQ(second() % vector, 0);
        for (int j = 0; j < vector; ++j) {
            int a = first() + j;
            int b = second() + j;
            if (!crosses_vectors()) {
                const int start = j < vector / 2 ? first() : second();
                a = start + 2 * (j % (vector / 2));
                b = a + 1;
            }
            const bool halves = pairing == Pairing::halves;
            ASSERT_EQ(a, halves ? pair(j) : 2 * pair(j));
            ASSERT_EQ(b, halves ? pair(j) + half : 2 * pair(j) + 1);
            touch(a);
            touch(b);
        }
    }
};

}  // namespace mrrope::testing
