#pragma once

#include <cutlass/float8.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "mrrope/float8.h"
#include "rotary_and_cache_plan.h"
#include "rotary_kernel.cuh"

namespace mrrope {

// Passed to the kernel by value. The divisors take a thread's number, and a slot, apart without dividing.
struct RotaryAndCacheLaunch {
    RotaryAndCacheArgs args;
    cutlass::FastDivmod lanes;
    cutlass::FastDivmod head_groups;
    cutlass::FastDivmod tokens;
    cutlass::FastDivmod block_size;
    HeadGroups groups;
    int threads;
    uint32_t slots;
    bool has_tail;
};

using Float8 = cutlass::float_e4m3_t;

template <int Vector>
__device__ cutlass::AlignedArray<Float8, Vector> to_float8(cutlass::Array<float, Vector> x, float scale) {
    cutlass::AlignedArray<Float8, Vector> rounded;
    const Float8Scale by{scale, __fdividef(1.0f, scale)};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) x[j] = by.divide(x[j]);
#if __CUDA_ARCH__ >= 890
    cutlass::NumericArrayConverter<Float8, float, Vector> narrow;
    static_cast<cutlass::Array<Float8, Vector>&>(rounded) = narrow(x);
#else
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) rounded[j] = Float8::bitcast(float8_e4m3_bits(x[j]));
#endif
    return rounded;
}

// A token of a sequence, or a slot of a block.
struct Place {
    int outer;
    int inner;

    __device__ int64_t offset(const HeadStrides& strides) const {
        return outer * strides.batch + inner * strides.token;
    }
};

// The heads of a thread: `first` and every `step`th after it of q, k or v.
struct HeadsOfThread {
    enum Kind { query, key, value };
    Kind kind;
    int first;
    int step;

    __device__ HeadsOfThread(const HeadGroups& groups, int group) {
        kind = group < groups.queries ? query : group < groups.queries + groups.keys ? key : value;
        step = kind == query ? groups.queries : groups.keys;
        first = group - (kind == query ? 0 : groups.queries) - (kind == value ? groups.keys : 0);
    }

    __device__ const CachedHeads& cached(const RotaryAndCacheArgs& args) const { return kind == key ? args.k : args.v; }

    __device__ const HeadsView& view(const RotaryAndCacheArgs& args) const {
        return kind == query ? args.rotary.q : cached(args).view;
    }
};

// What rotary_kernel does to q and k, and what becomes of k and v besides: a thread takes one vector from either half
// of HeadsPerThread heads of one token, all of q, all of k or all of v, and what is not q's goes to the token's slot.
// Values are not turned, and in a cache of their own dtype keep their bits.
template <class Element, class Cached, int Vector, int HeadsPerThread, Pairing pairing, Lookup lookup>
__global__ void __launch_bounds__(rotary_block_threads,
                                  rotary_and_cache_resident_blocks(!std::is_same_v<Element, Cached>))
    rotary_and_cache_kernel(const __grid_constant__ RotaryAndCacheLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    using Stored = cutlass::AlignedArray<Element, Vector>;
    using StoredInCache = cutlass::AlignedArray<Cached, Vector>;
    constexpr bool keeps_dtype = std::is_same_v<Element, Cached>;
    const RotaryAndCacheArgs& args = launch.args;
    const RotaryArgs& rotary = args.rotary;
    const int thread = blockIdx.x * rotary_block_threads + threadIdx.x;
    int item, lane, sequence_token, group;
    Place token;
    launch.lanes(item, lane, thread);
    launch.head_groups(sequence_token, group, item);
    launch.tokens(token.outer, token.inner, sequence_token);

    const HeadsOfThread heads(launch.groups, group);
    const HeadsView& view = heads.view(args);
    const bool is_query = heads.kind == HeadsOfThread::query;
    const int half = rotary.rotary_dim / 2;
    const Layout layout{lane, half};
    const auto exists = [&](int j) { return heads.first + j * heads.step < view.heads; };
    const Element* in =
        static_cast<const Element*>(view.in) + token.offset(view.in_strides) + heads.first * view.in_strides.head;
    const int64_t in_step = heads.step * view.in_strides.head;
    const void* position_address = address_of_position(rotary.positions, 0, token.outer, token.inner);
    const void* slot_address = address_of_position(args.slots.of_tokens, 0, token.outer, token.inner);
    // A call of few threads lasts little longer than the way to memory and back.
    if constexpr (HeadsPerThread == 1) {
        const bool never = launch.threads < 0;
        compute_before_wait(never, in + layout.first());
        compute_before_wait(never, in + layout.second());
        compute_before_wait(never, position_address);
        compute_before_wait(never, slot_address);
    }
    wait_for_previous_kernel();
    if (thread >= launch.threads) return;

    // What leads to the angles is asked for first: it takes two steps where the table is a chosen one.
    const int64_t position = position_at(rotary.positions, position_address);
    int64_t table_start = 0;
    if constexpr (lookup != Lookup::one_table) {
        table_start = first_word_of_choice(rotary.choice, token.outer, token.inner);
    }
    const int64_t slot = position_at(args.slots.of_tokens, slot_address);
    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (exists(j)) fragments[j].load(in + j * in_step, layout);
    }
    const CachedHeads& cached = heads.cached(args);
    const auto scale_of = [&](int j) {
        return cached.scale == nullptr ? 1.0f : cached.scale[(heads.first + j * heads.step) * cached.scale_stride];
    };
    float scales[HeadsPerThread];
    if (!keeps_dtype && !is_query) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (exists(j)) scales[j] = scale_of(j);
        }
    }

    const bool turns_heads = heads.kind != HeadsOfThread::value;
    CosSin<Real> by[Vector];
    if (turns_heads) {
        const uint64_t* table = rotary.table + table_start;
        uint64_t turns[Vector];
        load_turns(turns, table, layout);
        const auto gain = static_cast<Real>(attention_factor_of(table[half]));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) by[j] = scaled_cos_sin(phase_of(position, turns[j]), gain, Real(1));
    }
    let_next_kernel_start();

    // Unsigned, so that negative slots are out of range too.
    if (!is_query && static_cast<uint64_t>(slot) >= launch.slots) return;
    Place place = token;
    if (!is_query && args.slots.paged) {
        launch.block_size(place.outer, place.inner, static_cast<int>(slot));
    } else if (!is_query) {
        place.inner = static_cast<int>(slot);
    }
    const int64_t out = place.offset(view.out_strides) + heads.first * view.out_strides.head;
    const int64_t out_step = heads.step * view.out_strides.head;
    Element* out_of_own_dtype = static_cast<Element*>(view.out) + out;
    Cached* out_in_cache = static_cast<Cached*>(view.out) + out;

    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (!exists(j)) break;
        if (keeps_dtype || is_query) {
            if (turns_heads) fragments[j].template rotate<Layout::crosses_vectors>(by);
            fragments[j].store(out_of_own_dtype + j * out_step, layout);
        } else if constexpr (!keeps_dtype) {
            auto wide = fragments[j].widened();
            if (turns_heads) wide.template rotate<Layout::crosses_vectors>(by);
            Cached* head = out_in_cache + j * out_step;
            *reinterpret_cast<StoredInCache*>(head + layout.first()) = to_float8(wide.first, scales[j]);
            *reinterpret_cast<StoredInCache*>(head + layout.second()) = to_float8(wide.second, scales[j]);
        }
    }

    if (!launch.has_tail || (is_query && rotary.q.in == rotary.q.out)) return;
    for (int j = 0; exists(j); ++j) {
        for (int at = rotary.rotary_dim + lane * Vector; at < rotary.head_dim; at += launch.lanes.divisor * Vector) {
            const Stored x = *reinterpret_cast<const Stored*>(in + j * in_step + at);
            if (keeps_dtype || is_query) {
                *reinterpret_cast<Stored*>(out_of_own_dtype + j * out_step + at) = x;
            } else if constexpr (!keeps_dtype) {
                cutlass::NumericArrayConverter<Real, Element, Vector> widen;
                *reinterpret_cast<StoredInCache*>(out_in_cache + j * out_step + at) = to_float8(widen(x), scale_of(j));
            }
        }
    }
}

template <class Element, class Cached, int Vector, int HeadsPerThread, Pairing pairing, Lookup lookup>
void launch_cached_planned(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const auto threads = static_cast<int>(args.rotary.batch * args.rotary.tokens * plan.threads_per_token());
    const RotaryAndCacheLaunch launch{
        .args = args,
        .lanes = cutlass::FastDivmod(plan.lanes),
        .head_groups = cutlass::FastDivmod(plan.head_groups),
        .tokens = cutlass::FastDivmod(static_cast<int>(args.rotary.tokens)),
        .block_size = cutlass::FastDivmod(static_cast<int>(std::max<int64_t>(1, args.slots.block_size))),
        .groups = head_groups(args, plan.heads_per_thread),
        .threads = threads,
        .slots = static_cast<uint32_t>(args.slots.count()),
        .has_tail = args.rotary.rotary_dim < args.rotary.head_dim,
    };
    const int blocks = (threads + rotary_block_threads - 1) / rotary_block_threads;
    launch_overlapping(
        dependent_kernel<rotary_and_cache_kernel<Element, Cached, Vector, HeadsPerThread, pairing, lookup>>,
        dim3(blocks), rotary_block_threads, stream, launch);
}

template <class Element, class Cached, Pairing pairing, Lookup lookup>
void launch_cached_vectors(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    constexpr int full = access_bytes / sizeof(Element);
    const auto takes = [&](int vector, int heads) { return plan.vector == vector && plan.heads_per_thread == heads; };
    if (takes(full, 1)) return launch_cached_planned<Element, Cached, full, 1, pairing, lookup>(args, plan, stream);
    if (takes(full, 2)) return launch_cached_planned<Element, Cached, full, 2, pairing, lookup>(args, plan, stream);
    if (takes(full / 2, 1)) {
        return launch_cached_planned<Element, Cached, full / 2, 1, pairing, lookup>(args, plan, stream);
    }
    throw std::logic_error("mrrope: no kernel that writes a cache takes such vectors and heads a thread");
}

// Without vectors there is one kernel for all: it is slow anyway.
template <class Element, class Cached, Pairing pairing>
void launch_cached_lookup(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (plan.vector == 1) {
        return launch_cached_planned<Element, Cached, 1, 1, pairing, Lookup::chosen_table>(args, plan, stream);
    }
    if (args.rotary.choice.count > 1) {
        return launch_cached_vectors<Element, Cached, pairing, Lookup::chosen_table>(args, plan, stream);
    }
    return launch_cached_vectors<Element, Cached, pairing, Lookup::one_table>(args, plan, stream);
}

template <class Element, class Cached>
void launch_cached(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    switch (args.rotary.pairing) {
        case Pairing::halves: return launch_cached_lookup<Element, Cached, Pairing::halves>(args, plan, stream);
        case Pairing::interleaved:
            return launch_cached_lookup<Element, Cached, Pairing::interleaved>(args, plan, stream);
    }
}

// Instantiated in a file per element type, so that they compile side by side.
template <class Element>
void launch_rotary_and_cache(const RotaryAndCacheArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (!args.float8) return launch_cached<Element, Element>(args, plan, stream);
    if constexpr (std::is_same_v<Element, double>) {
        throw std::logic_error("mrrope: heads of float64 are not written to a cache of float8");
    } else {
        launch_cached<Element, Float8>(args, plan, stream);
    }
}

extern template void launch_rotary_and_cache<double>(const RotaryAndCacheArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_and_cache<float>(const RotaryAndCacheArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary_and_cache<cutlass::half_t>(const RotaryAndCacheArgs&, const RotaryPlan&,
                                                              cudaStream_t);
extern template void launch_rotary_and_cache<cutlass::bfloat16_t>(const RotaryAndCacheArgs&, const RotaryPlan&,
                                                                  cudaStream_t);

}  // namespace mrrope
