#pragma once

#include "mrrope/rotary_cos_sin.h"
#include "rotary_kernel.cuh"

namespace mrrope {

// Passed to the kernel by value.
struct RotaryCosSinLaunch {
    RotaryCosSinArgs args;
    RotaryMap<cutlass::FastDivmod> map;
    int threads;
    bool copies_tail;
};

// Loads Count neighbouring columns: up to 16 bytes per load where they are aligned.
template <int Count, class Column>
__device__ void load_columns(Column (&to)[Count], const Column* from) {
    constexpr int per_load = Count * sizeof(Column) < access_bytes ? Count : access_bytes / sizeof(Column);
    using Stored = cutlass::AlignedArray<Column, per_load>;
    if (per_load > 1 && reinterpret_cast<uintptr_t>(from) % alignof(Stored) == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; i += per_load) {
            const Stored stored = *reinterpret_cast<const Stored*>(from + i);
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < per_load; ++j) to[i + j] = stored[j];
        }
    } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; ++i) to[i] = from[i];
    }
}

// The columns of a lane's pairs, Step columns per pair. In interleaved pairing the pairs are two runs: LaneLayout.
template <int Step, class Real, class Column, class Layout, int Vector>
__device__ void load_pair_columns(Real (&to)[Vector], const Column* columns, Layout layout) {
    constexpr int run = Layout::crosses_vectors ? Vector : Vector / 2;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < Vector; first += run) {
        Column loaded[run * Step];
        load_columns(loaded, columns + layout.pair(first) * Step);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < run; ++j) to[first + j] = static_cast<Real>(loaded[j * Step]);
    }
}

template <class Column>
__device__ const Column* token_columns(const ColumnsView& view, int batch, int token) {
    return static_cast<const Column*>(view.data) + batch * view.batch_stride + token * view.token_stride;
}

// The rotary kernel with cosines and sines from memory: the same places, plans and vectors. Nothing is computed but the
// rotation, so the heads' latency hides that of the columns, which are issued first.
// Whole heads have one block fewer per SM, where they would spill.
template <class Element, class Column, int Vector, int HeadsPerThread, Pairing pairing, bool whole_heads,
          bool tokens_inside>
__global__ void __launch_bounds__(rotary_block_threads,
                                  rotary_min_blocks_per_sm(HeadsPerThread) - (whole_heads ? 1 : 0))
    rotary_cos_sin_kernel(const __grid_constant__ RotaryCosSinLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LayoutOf<pairing, Vector, whole_heads>;
    const RotaryArgs& args = launch.args.rotary;
    const int thread = blockIdx.x * rotary_block_threads + threadIdx.x;
    const auto [lane, group, batch, token] = launch.map.template place<tokens_inside>(thread);
    const HeadsOfTable all_heads{0, args.q.heads, args.k.heads};
    const HeadRange heads(group, HeadsPerThread, all_heads.count());
    const Layout layout{lane, args.rotary_dim / 2};
    const auto pointers_to = [&](int j) {
        return HeadPointers<Element>(args, all_heads, batch, token, heads.first + j);
    };
    const Column* cos_columns = token_columns<Column>(launch.args.cos, batch, token);
    const Column* sin_columns = token_columns<Column>(launch.args.sin, batch, token);
    const Element* in[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) in[j] = pointers_to(j).in;
    // Small launches are latency-bound, so all addresses are computed before the wait.
    const bool always_false = launch.threads < 0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        compute_before_wait(always_false, in[j] + layout.first());
        compute_before_wait(always_false, in[j] + layout.second());
    }
    compute_before_wait(always_false, cos_columns + layout.pair(0));
    compute_before_wait(always_false, sin_columns + layout.pair(0));
    pdl_wait();
    pdl_trigger();
    if (thread >= launch.threads) return;

    Real cos[Vector];
    Real sin[Vector];
    // In `halves` pairing a pair has one column: the second half of full-width columns repeats the first.
    if (pairing == Pairing::interleaved && launch.args.columns_per_pair == 2) {
        load_pair_columns<2>(cos, cos_columns, layout);
        load_pair_columns<2>(sin, sin_columns, layout);
    } else {
        load_pair_columns<1>(cos, cos_columns, layout);
        load_pair_columns<1>(sin, sin_columns, layout);
    }
    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (j < heads.count) fragments[j].load(in[j], layout);
    }
    const Real direction = args.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) by[j] = {cos[j], direction * sin[j]};

    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (j >= heads.count) break;
        if (layout.rotates()) fragments[j].template rotate<Layout::crosses_vectors>(by);
        fragments[j].store(pointers_to(j).out, layout);
    }

    if constexpr (!whole_heads) {
        for (int j = 0; launch.copies_tail && j < heads.count; ++j) {
            const HeadPointers<Element> head = pointers_to(j);
            copy_tail<Vector>(head.in, head.out, lane, launch.map.lanes.divisor, args);
        }
    }
}

template <class Element, class Column>
void launch_with_columns(const RotaryCosSinArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const RotaryArgs& rotary = args.rotary;
    const auto threads = static_cast<int>(rotary.batch * rotary.tokens * plan.threads_per_token());
    const RotaryCosSinLaunch launch{
        .args = args,
        .map = RotaryMap<cutlass::FastDivmod>::of(plan, rotary.tokens),
        .threads = threads,
        .copies_tail = copies_tail(rotary),
    };
    const int blocks = (threads + rotary_block_threads - 1) / rotary_block_threads;
    static constexpr RotaryKernels kernels = rotary_cos_sin_kernels(sizeof(Element));
    with_kernel<kernels>(plan, [&](auto kernel_of) {
        constexpr RotaryKernel kernel = kernel_of();
        launch_with_pdl(pdl_kernel<rotary_cos_sin_kernel<Element, Column, kernel.vector, kernel.heads_per_thread,
                                                         kernel.pairing, kernel.whole_heads, kernel.tokens_inside>>,
                        dim3(blocks), rotary_block_threads, stream, launch);
    });
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_rotary_cos_sin(const RotaryCosSinArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (args.columns_dtype == args.rotary.dtype) return launch_with_columns<Element, Element>(args, plan, stream);
    if constexpr (!std::is_same_v<Element, float>) {
        if (args.columns_dtype == DType::float32) return launch_with_columns<Element, float>(args, plan, stream);
    }
    throw std::logic_error("mrrope: no rotary kernel takes cosines of that dtype");
}

extern template void launch_rotary_cos_sin<double>(const RotaryCosSinArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_cos_sin<float>(const RotaryCosSinArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_cos_sin<cutlass::half_t>(const RotaryCosSinArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_cos_sin<cutlass::bfloat16_t>(const RotaryCosSinArgs&, const RotaryPlan&,
                                                                cudaStream_t);

}  // namespace mrrope
