#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/float8_fragment.cuh"
#include "device/head_fragment.cuh"
#include "device/table_choice.cuh"
#include "mla_rotary_map.h"
#include "mla_rotary_plan.h"
#include "rotary_and_cache_map.h"
#include "rotary_schedule.h"
#include "vector_plans.h"

namespace mrrope {

// Passed to the kernel by value.
struct MlaRotaryLaunch {
    MlaRotaryArgs args;  // with a cache, the outputs of k and k_nope are the parts of its first row
    MlaRotaryMap<cutlass::FastDivmod> map;
    int threads;
    // Of a cache only.
    MlaLatentMap<cutlass::FastDivmod> latent;
    int latent_threads;
    int latent_blocks;
    CacheSlots slots;
    cutlass::FastDivmod block_size;
    uint32_t slot_count;
    StoredAs cached_as;
    const float* scale;

    __device__ bool has_slot(int64_t slot) const {
        return static_cast<uint64_t>(slot) < slot_count;  // unsigned: negative slots are out of range, too
    }

    // Where the row of a token of a sequence lies.
    __device__ CachePlace place_of(int64_t slot, int batch) const {
        CachePlace place{batch, static_cast<int>(slot)};
        if (slots.paged) block_size(place.outer, place.inner, static_cast<int>(slot));
        return place;
    }
};

// Copies two vectors of a token's latent part to its cache row.
template <class Element, KeyTarget target, int Vector>
__device__ __forceinline__ void copy_latent(const MlaRotaryLaunch& launch, int thread) {
    const CopiedPart& latent = launch.args.k_nope;
    int batch, token, lane;
    launch.latent.place(batch, token, lane, thread);
    const CopyLayout layout{lane, launch.latent.lanes.divisor, latent.dim, Vector};
    const HeadsView& view = latent.view;
    const Element* in = static_cast<const Element*>(view.in) + CachePlace{batch, token}.offset(view.in_strides);
    const void* token_slot = position_address(launch.slots.of_tokens, 0, batch, token);
    const bool always_false = launch.latent_threads < 0;
    compute_before_wait(always_false, in + layout.first());
    compute_before_wait(always_false, in + layout.second());
    compute_before_wait(always_false, token_slot);
    pdl_wait();
    if (thread >= launch.latent_threads) return;
    const int64_t slot = load_position(launch.slots.of_tokens, token_slot);
    HeadFragment<Element, Vector> fragment;
    fragment.load(in, layout);
    [[maybe_unused]] float scale = 1.0f;
    if constexpr (target == KeyTarget::float8_cache) {
        if (launch.scale != nullptr) scale = *launch.scale;
    }
    pdl_trigger();
    if (!launch.has_slot(slot)) return;
    const int64_t out = launch.place_of(slot, batch).offset(view.out_strides);
    if constexpr (target == KeyTarget::float8_cache) {
        Float8Fragment<Vector> rounded;
        rounded.narrow(fragment.widened(), scale, launch.cached_as);
        rounded.store(static_cast<uint8_t*>(view.out) + out, layout);
    } else {
        fragment.store(static_cast<Element*>(view.out) + out, layout);
    }
}

// Rotates and copies the two vectors of a thread, for HeadsPerThread neighbouring heads: see MlaRotaryPlan. Lanes that
// copy, of which a cache has none here, skip the cos/sin. The order of events is explained in rotary_schedule.h.
template <class Element, KeyTarget target, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup>
__device__ __forceinline__ void rotate_and_copy(const MlaRotaryLaunch& launch, int thread) {
    using Real = RealOf<Element>;
    using Layout =
        std::conditional_t<target == KeyTarget::tensor, MlaLaneLayout<pairing, Vector>, LaneLayout<pairing, Vector>>;
    using Trigger = RotarySchedule::Trigger;
    constexpr RotarySchedule schedule =
        rotary_schedule(lookup, HeadsPerThread, compiled_for_pdl, /*may_speculate=*/false);
    constexpr bool has_choice = lookup != TableLookup::single;
    constexpr bool to_cache = is_cache(target);
    constexpr bool to_float8 = target == KeyTarget::float8_cache;
    const MlaRotaryArgs& args = launch.args;
    const RotaryArgs& rotary = args.rotary;
    const MlaRotaryPlace place = launch.map.place(thread);
    const bool is_query = place.is_query;
    const CachePlace token{place.batch, place.token};

    const int half = rotary.rotary_dim / 2;
    const CopiedPart& copied = is_query ? args.q_nope : args.k_nope;
    const Layout layout = [&] {
        if constexpr (to_cache) {
            return Layout{place.lane, half};
        } else {
            const int lanes = is_query ? launch.map.q_lanes.divisor : launch.map.k_lanes.divisor;
            return Layout(place.lane, half, lanes, copied.dim);
        }
    }();
    const HeadsView& rotated = is_query ? rotary.q : rotary.k;
    const HeadsView& view = layout.rotates() ? rotated : copied.view;
    const int first_head = place.group * HeadsPerThread;
    const int heads = rotated.heads - first_head;
    const auto exists = [&](int j) { return j == 0 || j < heads; };
    const Element* in =
        static_cast<const Element*>(view.in) + token.offset(view.in_strides) + first_head * view.in_strides.head;
    const void* token_position = position_address(rotary.positions, 0, place.batch, place.token);
    const void* token_slot = position_address(launch.slots.of_tokens, 0, place.batch, place.token);
    const int32_t* token_index = nullptr;
    if constexpr (has_choice) token_index = index_address(rotary.choice, place.batch, place.token);
    // Small launches are latency-bound, so all addresses are computed before the wait.
    if constexpr (HeadsPerThread == 1) {
        const bool always_false = launch.threads < 0;
        compute_before_wait(always_false, in + layout.first());
        compute_before_wait(always_false, in + layout.second());
        compute_before_wait(always_false, token_position);
        if constexpr (to_cache) compute_before_wait(always_false, token_slot);
        if constexpr (has_choice) {
            compute_before_wait(always_false, token_index);
        } else {
            compute_before_wait(always_false, rotary.table + layout.pair(0));
        }
    }
    pdl_wait();
    if constexpr (schedule.trigger == Trigger::after_wait) pdl_trigger();
    if (thread >= launch.threads) return;

    // Lanes that copy load position and phase steps, too: a branch would let the compiler issue the heads first. It
    // moves no load across __syncwarp, where exited threads need not arrive.
    const int64_t position = load_position(rotary.positions, token_position);
    uint32_t index = 0;
    if constexpr (has_choice) index = load_index(rotary.choice, token_index, place.batch);
    int64_t slot = 0;
    if constexpr (to_cache) slot = load_position(launch.slots.of_tokens, token_slot);
    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    const auto load_heads = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (exists(j)) fragments[j].load(in + j * view.in_strides.head, layout);
        }
    };
    if constexpr (schedule.loads_heads_before_table) {
        load_heads();
        __syncwarp();
    }
    const uint64_t* table = rotary.table;
    if constexpr (has_choice) table += table_offset(rotary.choice, index);
    uint64_t steps[Vector];
    load_phase_steps(steps, table, layout);
    const uint64_t factor = table[half];
    if constexpr (!schedule.loads_heads_before_table) {
        __syncwarp();
        load_heads();
    }
    [[maybe_unused]] float scale = 1.0f;
    if constexpr (to_float8) {
        if (launch.scale != nullptr) scale = *launch.scale;
    }

    CosSin<Real> by[Vector];
    if (layout.rotates()) {
        const auto gain = static_cast<Real>(factor_of(factor));
        const Real direction = rotary.conjugate ? Real(-1) : Real(1);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) by[j] = cos_sin_at<Element>(position, steps[j], gain, direction);
    }
    pdl_trigger();

    CachePlace destination = token;
    if constexpr (to_cache) {
        if (!is_query) {
            if (!launch.has_slot(slot)) return;
            destination = launch.place_of(slot, place.batch);
        }
    }
    const int64_t out = destination.offset(view.out_strides) + first_head * view.out_strides.head;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (!exists(j)) break;
        const int64_t head = out + j * view.out_strides.head;
        if (!to_float8 || is_query) {
            HeadFragment<Element, Vector> result = fragments[j];
            if (layout.rotates()) result.template rotate<Layout::crosses_vectors>(by);
            result.store(static_cast<Element*>(view.out) + head, layout);
        } else if constexpr (to_float8) {
            auto wide = fragments[j].widened();
            if (layout.rotates()) wide.template rotate<Layout::crosses_vectors>(by);
            Float8Fragment<Vector> rounded;
            rounded.narrow(wide, scale, launch.cached_as);
            rounded.store(static_cast<uint8_t*>(view.out) + head, layout);
        }
    }
}

// With a cache, the first blocks copy the latent part.
template <class Element, KeyTarget target, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup>
__global__ void __launch_bounds__(mla_block_threads, mla_rotary_min_blocks_per_sm(target == KeyTarget::float8_cache))
    mla_rotary_kernel(const __grid_constant__ MlaRotaryLaunch launch) {
    int block = blockIdx.x;
    if constexpr (is_cache(target)) {
        if (block < launch.latent_blocks) {
            return copy_latent<Element, target, Vector>(launch, block * mla_block_threads + threadIdx.x);
        }
        block -= launch.latent_blocks;
    }
    rotate_and_copy<Element, target, Vector, HeadsPerThread, pairing, lookup>(launch,
                                                                              block * mla_block_threads + threadIdx.x);
}

struct MlaRotaryGradientLaunch {
    MlaRotaryLaunch queries;  // without the key
    HeadsView keys;
    MlaSumMap<cutlass::FastDivmod> sums;
    int sum_threads;
    int sum_blocks;
};

// Adds up the heads of a token's key gradient, and rotates the sum. The threads of a token are one warp, which adds up
// their partial sums by shuffles; or one thread per lane has all heads.
template <class Element, int Vector, Pairing pairing, TableLookup lookup>
__device__ __forceinline__ void rotate_sum_of_heads(const MlaRotaryGradientLaunch& launch, int thread) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    constexpr int loads_in_flight = 4;
    const RotaryArgs& rotary = launch.queries.args.rotary;
    const HeadsView& keys = launch.keys;
    const MlaSumPlace place = launch.sums.place(thread);
    const CachePlace token{place.batch, place.token};
    const int half = rotary.rotary_dim / 2;
    const Layout layout{place.lane, half};
    const int step = launch.sums.head_sums.divisor;
    const Element* in = static_cast<const Element*>(keys.in) + token.offset(keys.in_strides);
    pdl_wait();
    const bool has_token = thread < launch.sum_threads;

    WideFragment<Real, Vector> sum;
    sum.first.fill(Real(0));
    sum.second.fill(Real(0));
    const auto add = [&](const WideFragment<Real, Vector>& other) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            sum.first[j] += other.first[j];
            sum.second[j] += other.second[j];
        }
    };
    for (int head = place.first_head; has_token && head < keys.heads; head += loads_in_flight * step) {
        HeadFragment<Element, Vector> fragments[loads_in_flight];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < loads_in_flight; ++j) {
            const int number = head + j * step;
            if (number < keys.heads) fragments[j].load(in + number * keys.in_strides.head, layout);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < loads_in_flight; ++j) {
            if (head + j * step < keys.heads) add(fragments[j].widened());
        }
    }
    pdl_trigger();
    if (step > 1) {
        // All threads of a warp are of one token.
        for (int offset = launch.sums.lanes.divisor; offset < mla_warp_threads; offset *= 2) {
            WideFragment<Real, Vector> other;
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Vector; ++j) {
                other.first[j] = __shfl_xor_sync(0xffffffffu, sum.first[j], offset);
                other.second[j] = __shfl_xor_sync(0xffffffffu, sum.second[j], offset);
            }
            add(other);
        }
    }
    if (!has_token || place.first_head != 0) return;

    const int64_t position = load_position(rotary.positions, 0, place.batch, place.token);
    const uint64_t* table = rotary.table;
    if constexpr (lookup != TableLookup::single) {
        table += table_offset(rotary.choice, place.batch, place.token, 0);
    }
    uint64_t steps[Vector];
    load_phase_steps(steps, table, layout);
    const auto gain = static_cast<Real>(factor_of(table[half]));
    const Real direction = rotary.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) by[j] = cos_sin_at<Element>(position, steps[j], gain, direction);
    sum.template rotate<Layout::crosses_vectors>(by);
    HeadFragment<Element, Vector> rounded;
    rounded.narrow(sum);
    rounded.store(static_cast<Element*>(keys.out) + token.offset(keys.out_strides), layout);
}

// The first blocks add up the key's gradient, whose threads have the most to load; the others rotate q's.
template <class Element, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup>
__global__ void __launch_bounds__(mla_block_threads, mla_rotary_gradient_min_blocks_per_sm())
    mla_rotary_gradient_kernel(const __grid_constant__ MlaRotaryGradientLaunch launch) {
    const int block = blockIdx.x;
    if (block < launch.sum_blocks) {
        rotate_sum_of_heads<Element, Vector, pairing, lookup>(launch, block * mla_block_threads + threadIdx.x);
    } else {
        rotate_and_copy<Element, KeyTarget::tensor, Vector, HeadsPerThread, pairing, lookup>(
            launch.queries, (block - launch.sum_blocks) * mla_block_threads + threadIdx.x);
    }
}

inline int blocks_of(int threads) {
    return (threads + mla_block_threads - 1) / mla_block_threads;
}

inline MlaRotaryLaunch mla_rotary_launch(const MlaRotaryArgs& args, const MlaRotaryPlan& plan,
                                         const CacheSlots& slots = {}, StoredAs cached_as = StoredAs::heads_dtype,
                                         const float* scale = nullptr) {
    const RotaryArgs& rotary = args.rotary;
    const auto latent_threads = static_cast<int>(rotary.batch * rotary.tokens * plan.latent_lanes);
    return {
        .args = args,
        .map = MlaRotaryMap<cutlass::FastDivmod>::of(plan, rotary.tokens),
        .threads = static_cast<int>(rotary.batch * rotary.tokens * plan.threads_per_token()),
        .latent = MlaLatentMap<cutlass::FastDivmod>::of(plan, rotary.tokens),
        .latent_threads = latent_threads,
        .latent_blocks = blocks_of(latent_threads),
        .slots = slots,
        .block_size = cutlass::FastDivmod(static_cast<int>(std::max<int64_t>(1, slots.block_size))),
        .slot_count = static_cast<uint32_t>(slots.count()),
        .cached_as = cached_as,
        .scale = scale,
    };
}

template <class Element, KeyTarget target>
struct MlaKernels {
    static constexpr int element_size = sizeof(Element);

    static constexpr bool has(Pairing, int vector, int heads_per_thread, TableLookup lookup) {
        return has_mla_kernel(element_size, target, vector, heads_per_thread, lookup);
    }
};

template <class Element, KeyTarget target, class Launch>
void launch_mla_kernel(const MlaRotaryPlan& plan, const RotaryArgs& rotary, Launch&& launch) {
    launch_by_plan<MlaKernels<Element, target>>(rotary.pairing, {plan.vector, plan.heads_per_thread},
                                                rotary.choice.count == 1, launch);
}

template <class Element, KeyTarget target>
void launch_mla_rotary_to(const MlaRotaryLaunch& launch, const MlaRotaryPlan& plan, cudaStream_t stream) {
    const int blocks = launch.latent_blocks + blocks_of(launch.threads);
    launch_mla_kernel<Element, target>(
        plan, launch.args.rotary, [&]<Pairing pairing, int Vector, int HeadsPerThread, TableLookup lookup> {
            launch_with_pdl(pdl_kernel<mla_rotary_kernel<Element, target, Vector, HeadsPerThread, pairing, lookup>>,
                            dim3(blocks), mla_block_threads, stream, launch);
        });
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_mla_rotary(const MlaRotaryLaunch& launch, KeyTarget target, const MlaRotaryPlan& plan,
                       cudaStream_t stream) {
    switch (target) {
        case KeyTarget::tensor: return launch_mla_rotary_to<Element, KeyTarget::tensor>(launch, plan, stream);
        case KeyTarget::cache: return launch_mla_rotary_to<Element, KeyTarget::cache>(launch, plan, stream);
        case KeyTarget::float8_cache:
            return launch_mla_rotary_to<Element, KeyTarget::float8_cache>(launch, plan, stream);
        case KeyTarget::sum: throw std::logic_error("mrrope: sums of heads have a kernel of their own");
    }
}

template <class Element>
void launch_mla_rotary_gradient(const MlaRotaryGradientLaunch& launch, const MlaRotaryPlan& plan, cudaStream_t stream) {
    const int blocks = launch.sum_blocks + blocks_of(launch.queries.threads);
    launch_mla_kernel<Element, KeyTarget::sum>(
        plan, launch.queries.args.rotary, [&]<Pairing pairing, int Vector, int HeadsPerThread, TableLookup lookup> {
            launch_with_pdl(pdl_kernel<mla_rotary_gradient_kernel<Element, Vector, HeadsPerThread, pairing, lookup>>,
                            dim3(blocks), mla_block_threads, stream, launch);
        });
}

extern template void launch_mla_rotary<double>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&, cudaStream_t);
extern template void launch_mla_rotary<float>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&, cudaStream_t);
extern template void launch_mla_rotary<cutlass::half_t>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&,
                                                        cudaStream_t);
extern template void launch_mla_rotary<cutlass::bfloat16_t>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&,
                                                            cudaStream_t);
extern template void launch_mla_rotary_gradient<double>(const MlaRotaryGradientLaunch&, const MlaRotaryPlan&,
                                                        cudaStream_t);
extern template void launch_mla_rotary_gradient<float>(const MlaRotaryGradientLaunch&, const MlaRotaryPlan&,
                                                       cudaStream_t);
extern template void launch_mla_rotary_gradient<cutlass::half_t>(const MlaRotaryGradientLaunch&, const MlaRotaryPlan&,
                                                                 cudaStream_t);
extern template void launch_mla_rotary_gradient<cutlass::bfloat16_t>(const MlaRotaryGradientLaunch&,
                                                                     const MlaRotaryPlan&, cudaStream_t);

}  // namespace mrrope
