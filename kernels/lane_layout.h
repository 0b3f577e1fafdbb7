#pragma once

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"

// Which components of a head a lane holds, and which pairs they form. Written once for host and device: the plan tests
// run the kernels' own index arithmetic.

#if defined(__CUDA_ARCH__)
#define MRROPE_UNROLL _Pragma("unroll")
#else
#define MRROPE_UNROLL
#endif

// For __host__ __device__ functions that call a functor which may be host-only or device-only.
#if defined(__CUDACC__)
#define MRROPE_NO_EXEC_CHECK _Pragma("nv_exec_check_disable")
#else
#define MRROPE_NO_EXEC_CHECK
#endif

namespace mrrope {

// A lane loads one vector from each half of the rotated part, in both pairings. Vectors of `interleaved` pairing hold
// whole pairs; in `halves` pairing, and with vectors of one component, a pair has one component in each vector.
template <Pairing pairing, int Vector>
struct LaneLayout {
    int lane;
    int half;  // of the rotated part, in components

    static constexpr bool crosses_vectors = pairing == Pairing::halves || Vector == 1;

    static constexpr bool rotates() { return true; }

    // The first component of each vector.
    MRROPE_HOST_DEVICE int first() const {
        return pairing == Pairing::interleaved && Vector == 1 ? 2 * lane : lane * Vector;
    }
    MRROPE_HOST_DEVICE int second() const {
        return pairing == Pairing::interleaved && Vector == 1 ? 2 * lane + 1 : half + lane * Vector;
    }

    // The number of the lane's j-th pair in the table.
    MRROPE_HOST_DEVICE int pair(int j) const {
        if constexpr (crosses_vectors) return lane * Vector + j;
        constexpr int pairs_per_vector = Vector / 2;
        return lane * pairs_per_vector + (j < pairs_per_vector ? j : half / 2 + j - pairs_per_vector);
    }
};

// The layout of a whole head, for kernels that also move the unrotated tail: lanes past the rotated part hold two
// neighbouring vectors of the tail.
template <Pairing pairing, int Vector>
struct WholeHeadLayout {
    static constexpr bool crosses_vectors = LaneLayout<pairing, Vector>::crosses_vectors;

    LaneLayout<pairing, Vector> rotated;
    int tail;  // first component, or -1 in the rotated part

    MRROPE_HOST_DEVICE WholeHeadLayout(int lane, int half)
        : rotated{lane, half}, tail(lane * Vector < half ? -1 : 2 * lane * Vector) {}

    MRROPE_HOST_DEVICE bool rotates() const { return tail < 0; }
    MRROPE_HOST_DEVICE int first() const { return rotates() ? rotated.first() : tail; }
    MRROPE_HOST_DEVICE int second() const { return rotates() ? rotated.second() : tail + Vector; }
    // Tail lanes return pairs that exist, so that their loads are valid; the values are unused.
    MRROPE_HOST_DEVICE int pair(int j) const { return rotates() ? rotated.pair(j) : j; }
};

// A lane's two vectors, from the address of the first.
struct VectorsFromFirst {
    int distance;  // in components

    static constexpr int first() { return 0; }
    MRROPE_HOST_DEVICE int second() const { return distance; }
};

// Calls f(j, a, b) with the two components of every pair j of a lane's vectors.
MRROPE_NO_EXEC_CHECK
template <bool crosses_vectors, int Vector, class Components, class F>
MRROPE_HOST_DEVICE void for_each_pair(Components& first, Components& second, F&& f) {
    MRROPE_UNROLL
    for (int j = 0; j < Vector; ++j) {
        if constexpr (crosses_vectors) {
            f(j, first[j], second[j]);
        } else {
            auto& vector = j < Vector / 2 ? first : second;
            const int at = 2 * (j % (Vector / 2));
            f(j, vector[at], vector[at + 1]);
        }
    }
}

// The vectors of the unrotated tail are distributed round-robin over the lanes of a head: a lane starts at
// first_tail_component and advances by tail_step.
template <int Vector>
MRROPE_HOST_DEVICE int first_tail_component(int lane, int rotary_dim) {
    return rotary_dim + lane * Vector;
}
template <int Vector>
MRROPE_HOST_DEVICE int tail_step(int lanes) {
    return lanes * Vector;
}

}  // namespace mrrope
