#pragma once

#include <cuda_runtime.h>
#include <cutlass/array.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

#include "device/cos_sin.cuh"
#include "head_split.h"
#include "lane_layout.h"
#include "mrrope/rotary.h"
#include "mrrope/rotation.h"

// Loads, rotates and stores a lane's part of a head; loads positions and phase steps.

namespace mrrope {

// The phase steps of a lane's pairs: two per load where the table starts at a multiple of 16 bytes.
template <class Layout, int Vector>
__device__ void load_phase_steps(uint64_t (&steps)[Vector], const uint64_t* table, Layout layout) {
    struct alignas(16) Two {
        uint64_t first;
        uint64_t second;
    };
    constexpr bool has_neighbours = Vector % (Layout::crosses_vectors ? 2 : 4) == 0;
    if (has_neighbours && reinterpret_cast<uintptr_t>(table) % alignof(Two) == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j + 1 < Vector; j += 2) {
            const Two two = *reinterpret_cast<const Two*>(table + layout.pair(j));
            steps[j] = two.first;
            steps[j + 1] = two.second;
        }
    } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) steps[j] = table[layout.pair(j)];
    }
}

// The rows of positions of a lane's pairs. A word has those of eight neighbouring pairs.
template <class Layout, int Vector>
struct PairRows {
    static constexpr bool has_two_runs = !Layout::crosses_vectors;  // of neighbouring pairs
    static constexpr int run = has_two_runs ? Vector / 2 : Vector;
    static_assert(run <= 8);

    uint64_t words[has_two_runs ? 2 : 1];

    __device__ void load(const uint64_t* row_of_pair, const Layout& layout) {
        words[0] = row_of_pair[layout.pair(0)];
        if constexpr (has_two_runs) words[1] = row_of_pair[layout.pair(run)];
    }

    // Not clamped to the rows that exist.
    __device__ int operator[](int j) const { return named_row(words[j / run], j % run); }
};

// A lane's two vectors in the precision of the computation.
template <class Real, int Vector>
struct WideFragment {
    cutlass::Array<Real, Vector> first;
    cutlass::Array<Real, Vector> second;

    // Calls f(j, a, b) with the components of every pair j.
    template <bool crosses_vectors, class F>
    __device__ void for_each_pair(F&& f) {
        mrrope::for_each_pair<crosses_vectors, Vector>(first, second, f);
    }

    __device__ void multiply(const WideFragment& by, Real scale = 1) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            first[j] *= scale * by.first[j];
            second[j] *= scale * by.second[j];
        }
    }

    __device__ void scale(Real by) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            first[j] *= by;
            second[j] *= by;
        }
    }

    template <bool crosses_vectors>
    __device__ void rotate(const CosSin<Real> (&by)[Vector]) {
        for_each_pair<crosses_vectors>([&](int j, Real& a, Real& b) {
            const Pair<Real> rotated = mrrope::rotate<Real>({a, b}, by[j]);
            a = rotated.first;
            b = rotated.second;
        });
    }
};

// A lane's two vectors as they are in memory.
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

    // Calls finish(wide) with what is rotated before it is rounded.
    template <bool crosses_vectors, class F>
    __device__ void rotate(const CosSin<Real> (&by)[Vector], F&& finish) {
        Wide wide = widened();
        wide.template rotate<crosses_vectors>(by);
        finish(wide);
        narrow(wide);
    }

    template <bool crosses_vectors>
    __device__ void rotate(const CosSin<Real> (&by)[Vector]) {
        Wide wide = widened();
        wide.template rotate<crosses_vectors>(by);
        narrow(wide);
    }
};

// A lane's part of the unrotated tail of a head.
template <int Vector, class Element>
__device__ void copy_tail(const Element* in, Element* out, int lane, int lanes, const RotaryArgs& args) {
    using Stored = cutlass::AlignedArray<Element, Vector>;
    for (int at = first_tail_component<Vector>(lane, args.rotary_dim); at < args.head_dim;
         at += tail_step<Vector>(lanes)) {
        *reinterpret_cast<Stored*>(out + at) = *reinterpret_cast<const Stored*>(in + at);
    }
}

template <class Index>
__device__ const void* position_address(const PositionsView& positions, int64_t row, Index batch, Index token) {
    const int64_t index = row * positions.row_stride + batch * positions.batch_stride + token * positions.token_stride;
    return static_cast<const char*>(positions.data) + index * (positions.is_int64 ? 8 : 4);
}

__device__ inline int64_t load_position(const PositionsView& positions, const void* address) {
    return positions.is_int64 ? *static_cast<const int64_t*>(address) : *static_cast<const int32_t*>(address);
}

template <class Index>
__device__ int64_t load_position(const PositionsView& positions, int64_t row, Index batch, Index token) {
    return load_position(positions, position_address(positions, row, batch, token));
}

// The first positions of a token that may have several, loaded before the row of a pair is known, so that the two loads
// do not wait for one another.
struct PositionRowsAhead {
    int64_t of[max_rows_with_vectors];

    // `first`: the address of the token's position in row 0. Rows that do not exist repeat the last.
    __device__ void load(const PositionsView& positions, const void* first) {
        const int64_t row_bytes = positions.row_stride * (positions.is_int64 ? 8 : 4);
        const auto* address = static_cast<const char*>(first);
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < max_rows_with_vectors; ++row) {
            if (row > 0 && row < positions.rows) address += row_bytes;
            of[row] = load_position(positions, address);
        }
    }

    __device__ int64_t operator[](int row) const {
        int64_t position = of[0];
        CUTLASS_PRAGMA_UNROLL
        for (int other = 1; other < max_rows_with_vectors; ++other) position = row >= other ? of[other] : position;
        return position;
    }
};

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
