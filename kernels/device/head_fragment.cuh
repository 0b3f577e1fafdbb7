#pragma once

#include <cuda_runtime.h>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"

// What every kernel that rotates heads is made of: a thread's part of a head, read, turned and written.

namespace mrrope {

template <class Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Where lane `lane` of a head finds its two vectors, and which pairs they hold. Both pairings touch memory alike: one
// vector in either half of the rotated part; interleaved vectors hold whole pairs, so the two hold different ones.
template <Pairing pairing, int Vector>
struct LaneLayout {
    int lane;
    int half;

    static constexpr bool crosses_vectors = pairing == Pairing::halves || Vector == 1;

    __device__ int first() const { return pairing == Pairing::interleaved && Vector == 1 ? 2 * lane : lane * Vector; }

    __device__ int second() const {
        return pairing == Pairing::interleaved && Vector == 1 ? 2 * lane + 1 : half + lane * Vector;
    }

    __device__ int pair(int j) const {
        if constexpr (crosses_vectors) return lane * Vector + j;
        constexpr int held = Vector / 2;
        return lane * held + (j < held ? j : half / 2 + j - held);
    }
};

// The turns of a lane's pairs: two at a time where the table starts at a multiple of 16 bytes.
template <class Layout, int Vector>
__device__ void load_turns(uint64_t (&turns)[Vector], const uint64_t* table, Layout layout) {
    struct alignas(16) Two {
        uint64_t first;
        uint64_t second;
    };
    constexpr bool come_in_twos = Vector % (Layout::crosses_vectors ? 2 : 4) == 0;
    if (come_in_twos && reinterpret_cast<uintptr_t>(table) % alignof(Two) == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j + 1 < Vector; j += 2) {
            const Two two = *reinterpret_cast<const Two*>(table + layout.pair(j));
            turns[j] = two.first;
            turns[j + 1] = two.second;
        }
    } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) turns[j] = table[layout.pair(j)];
    }
}

// A lane's part of a head in the precision of the computation.
template <class Real, int Vector>
struct WideFragment {
    cutlass::Array<Real, Vector> first;
    cutlass::Array<Real, Vector> second;

    // Calls f(j, first, second) for the components of every pair j.
    template <bool crosses_vectors, class F>
    __device__ void for_each_pair(F&& f) {
        CUTLASS_PRAGMA_UNROLL
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

    __device__ void multiply(const WideFragment& by, Real scale = 1) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            first[j] *= scale * by.first[j];
            second[j] *= scale * by.second[j];
        }
    }

    template <bool crosses_vectors>
    __device__ void rotate(const CosSin<Real> (&by)[Vector]) {
        for_each_pair<crosses_vectors>([&](int j, Real& a, Real& b) {
            const Pair<Real> turned = mrrope::rotate<Real>({a, b}, by[j]);
            a = turned.first;
            b = turned.second;
        });
    }
};

template <class Element, int Vector>
struct HeadFragment {
    using Stored = cutlass::AlignedArray<Element, Vector>;
    using Real = RealOf<Element>;
    using Wide = WideFragment<Real, Vector>;

    Stored first;
    Stored second;

    template <class Layout>
    __device__ void load(const Element* head, Layout layout) {
        first = *reinterpret_cast<const Stored*>(head + layout.first());
        second = *reinterpret_cast<const Stored*>(head + layout.second());
    }

    template <class Layout>
    __device__ void store(Element* head, Layout layout) const {
        *reinterpret_cast<Stored*>(head + layout.first()) = first;
        *reinterpret_cast<Stored*>(head + layout.second()) = second;
    }

    __device__ Wide widened() const {
        cutlass::NumericArrayConverter<Real, Element, Vector> widen;
        return {widen(first), widen(second)};
    }

    __device__ void narrow(const Wide& wide) {
        cutlass::NumericArrayConverter<Element, Real, Vector> narrow;
        static_cast<cutlass::Array<Element, Vector>&>(first) = narrow(wide.first);
        static_cast<cutlass::Array<Element, Vector>&>(second) = narrow(wide.second);
    }

    template <bool crosses_vectors>
    __device__ void rotate(const CosSin<Real> (&by)[Vector]) {
        Wide wide = widened();
        wide.template rotate<crosses_vectors>(by);
        narrow(wide);
    }
};

template <class Index>
__device__ const void* address_of_position(const PositionsView& positions, int64_t row, Index batch, Index token) {
    const int64_t index = row * positions.row_stride + batch * positions.batch_stride + token * positions.token_stride;
    return static_cast<const char*>(positions.data) + index * (positions.is_int64 ? 8 : 4);
}

__device__ inline int64_t position_at(const PositionsView& positions, const void* address) {
    return positions.is_int64 ? *static_cast<const int64_t*>(address) : *static_cast<const int32_t*>(address);
}

template <class Index>
__device__ int64_t position_at(const PositionsView& positions, int64_t row, Index batch, Index token) {
    return position_at(positions, address_of_position(positions, row, batch, token));
}

// Calls f with a value of the element type that `dtype` names.
template <class F>
void with_element(DType dtype, F&& f) {
    switch (dtype) {
        case DType::float64: return f(double{});
        case DType::float32: return f(float{});
        case DType::float16: return f(cutlass::half_t{});
        case DType::bfloat16: return f(cutlass::bfloat16_t{});
    }
}

}  // namespace mrrope
