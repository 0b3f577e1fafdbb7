#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/float8_fragment.cuh"
#include "device/head_fragment.cuh"
#include "device/table_choice.cuh"
#include "rotary_and_cache_map.h"
#include "rotary_and_cache_plan.h"
#include "rotary_schedule.h"
#include "vector_plans.h"

namespace mrrope {

// Passed to the kernel by value.
struct RotaryAndCacheLaunch {
    RotaryAndCacheArgs args;
    RotaryMap<cutlass::FastDivmod> map;
    cutlass::FastDivmod block_size;
    HeadGroupsOfCacheMap<cutlass::FastDivmod> groups;
    int threads;
    uint32_t slots;
    bool has_tail;
};

// rotary_kernel with k and v stored to the token's cache slot: a thread takes one vector from each half of
// HeadsPerThread heads of one token, all of q, all of k or all of v. Values are not rotated, and keep their bits in a
// cache of their own dtype. Cached is Element, or uint8_t for float8.
template <class Element, class Cached, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup>
__global__ void __launch_bounds__(rotary_block_threads,
                                  rotary_and_cache_min_blocks_per_sm(!std::is_same_v<Element, Cached>))
    rotary_and_cache_kernel(const __grid_constant__ RotaryAndCacheLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    using Stored = cutlass::AlignedArray<Element, Vector>;
    constexpr bool keeps_dtype = std::is_same_v<Element, Cached>;
    const RotaryAndCacheArgs& args = launch.args;
    const RotaryArgs& rotary = args.rotary;
    const int thread = blockIdx.x * rotary_block_threads + threadIdx.x;
    const RotaryPlace place = launch.map.place(thread);
    const int lane = place.lane;
    const CachePlace token{place.batch, place.token};

    constexpr bool has_tables = lookup != TableLookup::single;
    const HeadsOfThread heads =
        launch.groups.template heads_of<has_tables>(place.group, rotary.q.heads, args.k.view.heads);
    const HeadsView& view = heads.view(args);
    const bool is_query = heads.kind == HeadsOfThread::query;
    const int half = rotary.rotary_dim / 2;
    const Layout layout{lane, half};
    const auto exists = [&](int j) { return heads.exists(j); };
    const Element* in =
        static_cast<const Element*>(view.in) + token.offset(view.in_strides) + heads.first * view.in_strides.head;
    const int64_t in_step = heads.step * view.in_strides.head;
    const void* token_position = position_address(rotary.positions, 0, token.outer, token.inner);
    const void* token_slot = position_address(args.slots.of_tokens, 0, token.outer, token.inner);
    // Small launches are latency-bound, so all addresses are computed before the wait.
    if constexpr (HeadsPerThread == 1) {
        const bool always_false = launch.threads < 0;
        compute_before_wait(always_false, in + layout.first());
        compute_before_wait(always_false, in + layout.second());
        compute_before_wait(always_false, token_position);
        compute_before_wait(always_false, token_slot);
    }
    pdl_wait();
    if (thread >= launch.threads) return;

    // Loads that lead to the angles are issued first: with a table index they are two dependent round trips.
    const int64_t position = load_position(rotary.positions, token_position);
    int64_t offset = 0;
    if constexpr (has_tables) offset = table_offset(rotary.choice, token.outer, token.inner, heads.table);
    [[maybe_unused]] QueryFactors<Real, HeadsPerThread> query_factors;
    if constexpr (has_tables) {
        query_factors.load(rotary.choice, table_offset(rotary.choice, token.outer, token.inner),
                           [&](int j) { return is_query && exists(j) ? heads.head(j) : -1; });
    }
    const int64_t slot = load_position(args.slots.of_tokens, token_slot);
    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (exists(j)) fragments[j].load(in + j * in_step, layout);
    }
    const CachedHeads& cached = heads.cached(args);
    const auto scale_of = [&](int j) {
        return cached.scale == nullptr ? 1.0f : cached.scale[heads.head(j) * cached.scale_stride];
    };
    float scales[HeadsPerThread];
    if (!keeps_dtype && !is_query) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (exists(j)) scales[j] = scale_of(j);
        }
    }

    const bool rotates = heads.kind != HeadsOfThread::value;
    CosSin<Real> by[Vector];
    if (rotates) {
        const uint64_t* table = rotary.table + offset;
        uint64_t steps[Vector];
        load_phase_steps(steps, table, layout);
        const auto gain = static_cast<Real>(factor_of(table[half]));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) by[j] = cos_sin_at<Element>(position, steps[j], gain, Real(1));
    }
    pdl_trigger();

    // Unsigned: negative slots are out of range, too.
    if (!is_query && static_cast<uint64_t>(slot) >= launch.slots) return;
    CachePlace target = token;
    if (!is_query && args.slots.paged) {
        launch.block_size(target.outer, target.inner, static_cast<int>(slot));
    } else if (!is_query) {
        target.inner = static_cast<int>(slot);
    }
    const int64_t out = target.offset(view.out_strides) + heads.first * view.out_strides.head;
    const int64_t out_step = heads.step * view.out_strides.head;
    Element* out_same_dtype = static_cast<Element*>(view.out) + out;
    Cached* out_in_cache = static_cast<Cached*>(view.out) + out;

    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (!exists(j)) break;
        if (keeps_dtype || is_query) {
            if (rotates) {
                if constexpr (has_tables) {
                    fragments[j].template rotate<Layout::crosses_vectors>(
                        by, [&](auto& rotated) { rotated.scale(query_factors.of_head[j]); });
                } else {
                    fragments[j].template rotate<Layout::crosses_vectors>(by);
                }
            }
            fragments[j].store(out_same_dtype + j * out_step, layout);
        } else if constexpr (!keeps_dtype) {
            auto wide = fragments[j].widened();
            if (rotates) wide.template rotate<Layout::crosses_vectors>(by);
            Float8Fragment<Vector> narrowed;
            narrowed.narrow(wide, scales[j], args.cached_as);
            narrowed.store(out_in_cache + j * out_step, layout);
        }
    }

    if (!launch.has_tail || (is_query && rotary.q.in == rotary.q.out)) return;
    for (int j = 0; exists(j); ++j) {
        for (int at = first_tail_component<Vector>(lane, rotary.rotary_dim); at < rotary.head_dim;
             at += tail_step<Vector>(launch.map.lanes.divisor)) {
            const Stored x = *reinterpret_cast<const Stored*>(in + j * in_step + at);
            if (keeps_dtype || is_query) {
                *reinterpret_cast<Stored*>(out_same_dtype + j * out_step + at) = x;
            } else if constexpr (!keeps_dtype) {
                cutlass::NumericArrayConverter<Real, Element, Vector> widen;
                *reinterpret_cast<Float8Vector<Vector>*>(out_in_cache + j * out_step + at) =
                    to_float8(widen(x), scale_of(j), args.cached_as);
            }
        }
    }
}

template <class Element, class Cached, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup>
void launch_cached_planned(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const auto threads = static_cast<int>(args.rotary.batch * args.rotary.tokens * plan.threads_per_token());
    const RotaryAndCacheLaunch launch{
        .args = args,
        .map = RotaryMap<cutlass::FastDivmod>::of(plan, args.rotary.tokens),
        .block_size = cutlass::FastDivmod(static_cast<int>(std::max<int64_t>(1, args.slots.block_size))),
        .groups = HeadGroupsOfCacheMap<cutlass::FastDivmod>::of(plan, args.rotary.q.heads, args.k.view.heads),
        .threads = threads,
        .slots = static_cast<uint32_t>(args.slots.count()),
        .has_tail = args.rotary.rotary_dim < args.rotary.head_dim,
    };
    const int blocks = (threads + rotary_block_threads - 1) / rotary_block_threads;
    launch_with_pdl(pdl_kernel<rotary_and_cache_kernel<Element, Cached, Vector, HeadsPerThread, pairing, lookup>>,
                    dim3(blocks), rotary_block_threads, stream, launch);
}

template <class Element, class Cached>
struct RotaryAndCacheKernels {
    static constexpr int element_size = sizeof(Element);

    static constexpr bool has(Pairing pairing, int vector, int heads_per_thread, TableLookup lookup) {
        constexpr bool float8 = !std::is_same_v<Element, Cached>;
        return has_rotary_and_cache_kernel(element_size, pairing, float8, vector, heads_per_thread, lookup);
    }
};

template <class Element, class Cached>
void launch_cached(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const bool has_one_table = args.rotary.choice.count == 1 && !args.rotary.choice.is_per_head();
    launch_by_plan<RotaryAndCacheKernels<Element, Cached>>(
        args.rotary.pairing, {plan.vector, plan.heads_per_thread}, has_one_table,
        [&]<Pairing pairing, int Vector, int HeadsPerThread, TableLookup lookup> {
            launch_cached_planned<Element, Cached, Vector, HeadsPerThread, pairing, lookup>(args, plan, stream);
        });
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_rotary_and_cache(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (is_float8(args.cached_as)) return launch_cached<Element, uint8_t>(args, plan, stream);
    launch_cached<Element, Element>(args, plan, stream);
}

extern template void launch_rotary_and_cache<double>(const RotaryAndCacheArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_and_cache<float>(const RotaryAndCacheArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_and_cache<cutlass::half_t>(const RotaryAndCacheArgs&, const RotaryPlan&,
                                                              cudaStream_t);
extern template void launch_rotary_and_cache<cutlass::bfloat16_t>(const RotaryAndCacheArgs&, const RotaryPlan&,
                                                                  cudaStream_t);

}  // namespace mrrope
