#pragma once

#include <cuda_runtime.h>
#include <cutlass/array.h>
#include <cutlass/fast_math.h>
#include <cutlass/numeric_conversion.h>
#include <cutlass/numeric_types.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "mrrope/rotation.h"
#include "rotary_plan.h"

namespace mrrope {

template <class Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// Passed to the kernel by value. The divisors take a thread's number apart without dividing.
struct RotaryLaunch {
    RotaryArgs args;
    cutlass::FastDivmod lanes;
    cutlass::FastDivmod head_groups;
    cutlass::FastDivmod tokens;
    int threads;
    bool copies_tail;
};

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

template <class Element, int Vector>
struct HeadFragment {
    using Stored = cutlass::AlignedArray<Element, Vector>;
    using Real = RealOf<Element>;

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

    template <bool crosses_vectors>
    __device__ void rotate(const CosSin<Real> (&by)[Vector]) {
        cutlass::NumericArrayConverter<Real, Element, Vector> widen;
        cutlass::NumericArrayConverter<Element, Real, Vector> narrow;
        cutlass::Array<Real, Vector> a = widen(first);
        cutlass::Array<Real, Vector> b = widen(second);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            if constexpr (crosses_vectors) {
                rotate_pair(a[j], b[j], by[j]);
            } else {
                auto& vector = j < Vector / 2 ? a : b;
                const int at = 2 * (j % (Vector / 2));
                rotate_pair(vector[at], vector[at + 1], by[j]);
            }
        }
        static_cast<cutlass::Array<Element, Vector>&>(first) = narrow(a);
        static_cast<cutlass::Array<Element, Vector>&>(second) = narrow(b);
    }

private:
    __device__ static void rotate_pair(Real& a, Real& b, CosSin<Real> by) {
        const Pair<Real> turned = mrrope::rotate<Real>({a, b}, by);
        a = turned.first;
        b = turned.second;
    }
};

// One head of q or k, in and out, seen from one token.
template <class Element>
struct HeadPointers {
    const Element* in;
    Element* out;

    __device__ HeadPointers(const RotaryArgs& args, int batch, int token, int head) {
        const bool is_q = head < args.q.heads;
        const HeadsView& view = is_q ? args.q : args.k;
        const int64_t index = is_q ? head : head - args.q.heads;
        const auto offset = [&](const HeadStrides& strides) {
            return batch * strides.batch + token * strides.token + index * strides.head;
        };
        in = static_cast<const Element*>(view.in) + offset(view.in_strides);
        out = static_cast<Element*>(view.out) + offset(view.out_strides);
    }
};

__device__ inline int64_t position_at(const PositionsView& positions, int64_t row, int batch, int token) {
    const int64_t index = row * positions.row_stride + batch * positions.batch_stride + token * positions.token_stride;
    return positions.is_int64 ? static_cast<const int64_t*>(positions.data)[index]
                              : static_cast<const int32_t*>(positions.data)[index];
}

// A thread takes one vector from either half of HeadsPerThread heads of one token: 16 bytes a load, all of them in
// flight while it computes the Vector phases that those heads share. Neighbouring threads take neighbouring vectors,
// then heads, then tokens; no thread waits for another.
// with_rows: every pair has a position of its own. Apart, since asking at run time costs a decoding step a third of its
// time.
template <class Element, int Vector, int HeadsPerThread, Pairing pairing, bool with_rows>
__global__ void __launch_bounds__(rotary_block_threads, rotary_resident_blocks(HeadsPerThread))
    rotary_kernel(const __grid_constant__ RotaryLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    const RotaryArgs& args = launch.args;
    const int thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= launch.threads) return;

    int item, lane, sequence_token, group, batch, token;
    launch.lanes(item, lane, thread);
    launch.head_groups(sequence_token, group, item);
    launch.tokens(batch, token, sequence_token);

    const int groups = launch.head_groups.divisor;
    const int heads = args.q.heads + args.k.heads;
    const int half = args.rotary_dim / 2;
    const Layout layout{lane, half};

    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        const int head = group + j * groups;
        if (head < heads) fragments[j].load(HeadPointers<Element>(args, batch, token, head).in, layout);
    }

    const PositionsView& positions = args.positions;
    const int64_t only_position = position_at(positions, 0, batch, token);
    const auto gain = static_cast<Real>(attention_factor_of(args.table[half]));
    const Real direction = args.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) {
        const int pair = layout.pair(j);
        int64_t position = only_position;
        if constexpr (with_rows) {
            // Unsigned, so that no row, however wrong, leads out of the positions.
            const auto row = min(positions.row_of_pair[pair], static_cast<uint64_t>(positions.rows - 1));
            position = position_at(positions, static_cast<int64_t>(row), batch, token);
        }
        by[j] = turn(phase_of(position, args.table[pair]), gain, direction);
    }

    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        const int head = group + j * groups;
        if (head >= heads) break;
        fragments[j].template rotate<Layout::crosses_vectors>(by);
        fragments[j].store(HeadPointers<Element>(args, batch, token, head).out, layout);
    }

    if (!launch.copies_tail) return;
    using Stored = cutlass::AlignedArray<Element, Vector>;
    for (int head = group; head < heads; head += groups) {
        const HeadPointers<Element> pointers(args, batch, token, head);
        for (int at = args.rotary_dim + lane * Vector; at < args.head_dim; at += launch.lanes.divisor * Vector) {
            *reinterpret_cast<Stored*>(pointers.out + at) = *reinterpret_cast<const Stored*>(pointers.in + at);
        }
    }
}

inline void check_launch(cudaError_t status) {
    if (status != cudaSuccess) {
        throw std::runtime_error(std::string("mrrope: the rotary kernel could not be launched: ") +
                                 cudaGetErrorString(status));
    }
}

template <class Element, int Vector, int HeadsPerThread, Pairing pairing, bool with_rows = false>
void launch_planned(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const auto threads = static_cast<int>(args.batch * args.tokens * plan.threads_per_token());
    const RotaryLaunch launch{
        .args = args,
        .lanes = cutlass::FastDivmod(plan.lanes),
        .head_groups = cutlass::FastDivmod(plan.head_groups),
        .tokens = cutlass::FastDivmod(static_cast<int>(args.tokens)),
        .threads = threads,
        .copies_tail = args.rotary_dim < args.head_dim && (args.q.in != args.q.out || args.k.in != args.k.out),
    };
    const int blocks = (threads + rotary_block_threads - 1) / rotary_block_threads;
    rotary_kernel<Element, Vector, HeadsPerThread, pairing, with_rows>
        <<<blocks, rotary_block_threads, 0, stream>>>(launch);
    check_launch(cudaGetLastError());
}

template <class Element, int Vector, Pairing pairing>
void launch_vectors(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (args.positions.row_of_pair != nullptr) {
        return launch_planned<Element, Vector, heads_per_thread_with_rows, pairing, true>(args, plan, stream);
    }
    switch (plan.heads_per_thread) {
        case 1: return launch_planned<Element, Vector, 1, pairing>(args, plan, stream);
        case 2: return launch_planned<Element, Vector, 2, pairing>(args, plan, stream);
        case 4: return launch_planned<Element, Vector, 4, pairing>(args, plan, stream);
    }
    throw std::logic_error("mrrope: no rotary kernel takes that many heads a thread");
}

template <class Element, int Vector>
void launch_pairing(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    switch (args.pairing) {
        case Pairing::halves: return launch_vectors<Element, Vector, Pairing::halves>(args, plan, stream);
        case Pairing::interleaved: return launch_vectors<Element, Vector, Pairing::interleaved>(args, plan, stream);
    }
}

// Instantiated in a file per element type, so that they compile side by side.
template <class Element>
void launch_rotary(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    constexpr int full_vector = 16 / sizeof(Element);
    if (plan.vector == full_vector) return launch_pairing<Element, full_vector>(args, plan, stream);
    return launch_pairing<Element, 1>(args, plan, stream);
}

extern template void launch_rotary<double>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<float>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<cutlass::half_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<cutlass::bfloat16_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);

}  // namespace mrrope
