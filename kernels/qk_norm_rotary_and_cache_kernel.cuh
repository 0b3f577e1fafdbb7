#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>
#include <variant>

#include "device/dependent_launch.cuh"
#include "device/float8_fragment.cuh"
#include "device/rms_norm.cuh"
#include "qk_norm_rotary_and_cache_launch.cuh"
#include "qk_norm_rotary_and_cache_map.h"
#include "qk_norm_rotary_and_cache_plan.h"
#include "qk_norm_rotary_and_cache_row_kernel.cuh"

namespace mrrope {

// Keeps the compiler from deriving addresses of later heads from the first one's, which takes multiplications.
template <class T>
__device__ T* opaque(T* pointer) {
    size_t address = __cvta_generic_to_global(pointer);  // without it, accesses would be generic
    asm("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
}

template <int Vector>
__device__ float largest_magnitude(const WideFragment<float, Vector>& wide) {
    float largest = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector; ++i) largest = fmaxf(largest, fmaxf(fabsf(wide.first[i]), fabsf(wide.second[i])));
    return largest;
}

// What becomes of the components of v.
struct Unchanged {
    static constexpr bool keeps_bits = true;  // unless they are rounded to float8
    static constexpr bool may_be_float8 = true;

    __device__ float operator()(int, const auto&) const { return 1.0f; }
};

// Of the gate.
template <class Element>
struct Sigmoid {
    static constexpr bool keeps_bits = false;
    static constexpr bool may_be_float8 = false;

    template <class Real, int Vector>
    __device__ Real operator()(int, WideFragment<Real, Vector>& wide) const {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Vector; ++i) {
            wide.first[i] = sigmoid<Element>(wide.first[i]);
            wide.second[i] = sigmoid<Element>(wide.second[i]);
        }
        return 1;
    }
};

// Of q and k.
template <class F>
struct NormedAndRotated : F {
    static constexpr bool keeps_bits = false;
    static constexpr bool may_be_float8 = true;
};
template <class F>
NormedAndRotated(F) -> NormedAndRotated<F>;

// Rotates the vectors of a lane, or scales those of the tail, which have no partner: the sum's other term would turn
// their infinity into NaN.
template <class Lane, class Real, int Vector>
__device__ void rotate_within(const Lane& lane, WideFragment<Real, Vector>& wide, const CosSin<Real> (&by)[Vector]) {
    wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
        const Pair<Real> rotated =
            lane.rotates() ? rotate<Real>({a, b}, by[i]) : Pair<Real>{a * by[i].cos, b * by[i].cos};
        a = rotated.first;
        b = rotated.second;
    });
}

// qk_norm_rotary_kernel for heads of four kinds: all heads of a block are of q, of k, of v or of the gate, and those of
// k and v are stored to the tokens' cache slots. Over a head, a block takes the same heads of each of its tokens.
// has_float8: some heads are rounded to float8, which takes as much code as all the rest.
template <class Element, int HeadsPerThread, Pairing pairing, NormOver over, bool needs_lookup, bool has_float8>
__global__ void __launch_bounds__(over == NormOver::head ? norm_block_threads : norm_max_block_threads,
                                  norm_and_cache_min_blocks_per_sm(over, HeadsPerThread, needs_lookup, has_float8))
    qk_norm_rotary_and_cache_kernel(const __grid_constant__ QkNormRotaryAndCacheLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = norm_and_cache_vector(sizeof(Element), HeadsPerThread);
    using Lane = WholeHeadLayout<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    constexpr bool over_head = over == NormOver::head;
    const RotaryArgs& args = launch.args.rotary;
    const StorePlace place = launch.map.template place<over>(blockIdx.x, threadIdx.x);
    const Lane lane(place.lane, args.rotary_dim / 2);
    const HeadsOfKind<Real>& of = launch.heads(place.kind);
    const StridedHeads heads = launch.map.template heads_of<needs_lookup>(place, of.view.heads);
    const Element* in =
        static_cast<const Element*>(of.view.in) + offset_of(of.view.in_strides, place.batch, place.token, heads.first);
    const int64_t in_step = heads.step * of.view.in_strides.head;
    const auto has_head = [&](int j) { return place.active && heads.exists(j); };
    const void* token_slot = position_address(launch.args.slots.of_tokens, 0, place.batch, place.token);
    // Small launches are latency-bound, so all addresses are computed before the wait.
    if constexpr (HeadsPerThread <= 2) {
        const bool always_false = launch.map.all_tokens < 0;
        compute_before_wait(always_false, in + lane.first());
        compute_before_wait(always_false, in + lane.second());
        compute_before_wait(always_false, position_address(args.positions, 0, place.batch, place.token));
        compute_before_wait(always_false, token_slot);
        compute_before_wait(always_false, args.table + lane.pair(0));
    }
    pdl_wait();

    // Of eight heads three are in registers, and each is reduced alone: its loads are in flight during the arithmetic
    // of the two before it, and five blocks fit on an SM. A loop instead of unrolled code takes a fifth longer with
    // float8 q.
    constexpr bool has_eight = HeadsPerThread == 8;
    constexpr int held = has_eight ? 3 : HeadsPerThread;
    constexpr int reduced_at_once = has_eight ? 1 : held;
    Fragment fragments[held];
    if constexpr (over_head) {
        // Zeros count for nothing where a thread has no head.
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) fragments[j] = Fragment{};
    }
    const auto load_scale = [&](int j) {
        return of.scale == nullptr || !has_head(j) ? 1.0f : of.scale[heads.head(j) * of.scale_stride];
    };
    // Loaded with the heads. Of eight heads, it is the first one's, which most calls have for all: registers are
    // scarce.
    constexpr bool has_all_scales = HeadsPerThread <= 2;
    float scales[has_float8 && has_all_scales ? held : 1];
    const auto load_next_head = [&](int j, Fragment& fragment) {
        if (has_head(j)) fragment.load(in, lane);
        in = opaque(in + in_step);
    };
    const auto load_first_heads = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) {
            load_next_head(j, fragments[j]);
            // With two heads a branch, not a predicate, which lets the compiler load scales before the position: 13 %
            // at 256 tokens.
            if (HeadsPerThread == 2 && !has_head(j)) continue;
            if (has_float8 && (has_all_scales || j == 0)) scales[has_all_scales ? j : 0] = load_scale(j);
        }
    };
    int64_t slot = 0;
    if (place.is_cached()) slot = load_position(launch.args.slots.of_tokens, token_slot);

    // Calls reduce(i) before the heads, in registers from i on, that are reduced at once, and results(j, wide) for each
    // of them, which replaces the loaded components, and returns the factor that they are still to be multiplied by.
    const auto store_heads_as = [&]<bool to_float8, class Results>(auto&& reduce, const Results& results) {
        // Over all heads, threads of a warp may differ in their heads, and all take part in the maximum of a head.
        constexpr bool takes_all = to_float8 && !over_head;
        const bool is_stored = !place.is_cached() || launch.has_slot(slot);
        using Stored = std::conditional_t<to_float8, uint8_t, Element>;
        Stored* out = static_cast<Stored*>(of.view.out) +
                      launch.out_offset(of, place.is_cached(), place.batch, place.token, slot) +
                      heads.first * of.view.out_strides.head;
        const int64_t out_step = heads.step * of.view.out_strides.head;
        const bool computes_scale = place.kind == HeadKind::query && launch.args.q_scale_out != nullptr;
        [[maybe_unused]] float* scale_out = launch.q_scale(place.batch, place.token, heads.first);
        [[maybe_unused]] const int64_t scale_step = heads.step * launch.args.q_scale_out_strides.head;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            const int i = j % held;
            if (!takes_all && !heads.exists(j)) return;
            if (i % reduced_at_once == 0) reduce(i);
            const bool stores = is_stored && has_head(j);
            const Fragment loaded = fragments[i];
            Wide wide = loaded.widened();
            const Real factor = results(j, wide);
            if constexpr (to_float8) {
                float scale = scales[has_all_scales ? i : 0];
                if (computes_scale) {
                    // Infinity times a factor of 0 is NaN, which no scale is.
                    const float largest = max_over_team(largest_magnitude(wide), launch.map.plan.team);
                    scale = float8_scale_of(fmaxf(factor * largest, 0.0f), of.stored_as);
                    if (has_head(j) && place.lane == 0) *scale_out = scale;
                    scale_out = opaque(scale_out + scale_step);
                } else if (!has_all_scales && of.scale_stride != 0) {
                    scale = load_scale(j);
                }
                Float8Fragment<Vector> rounded;
                if constexpr (Results::keeps_bits) {
                    rounded.narrow(wide, scale, of.stored_as);
                } else {
                    rounded.narrow_product(wide, finite_ratio(factor, scale), of.stored_as);
                }
                if (j + held < HeadsPerThread) load_next_head(j + held, fragments[i]);
                if (stores) rounded.store(out, lane);
            } else {
                Fragment narrowed = loaded;
                if constexpr (!Results::keeps_bits) {
                    wide.scale(factor);
                    narrowed.narrow(wide);
                }
                if (j + held < HeadsPerThread) load_next_head(j + held, fragments[i]);
                if (stores) narrowed.store(out, lane);
            }
            out = opaque(out + out_step);
        }
    };
    const auto store_heads = [&]<class Results>(auto&& reduce, const Results& results) {
        if constexpr (has_float8 && Results::may_be_float8) {
            if (is_float8(of.stored_as)) return store_heads_as.template operator()<true>(reduce, results);
        }
        store_heads_as.template operator()<false>(reduce, results);
    };

    if (place.kind == HeadKind::value) {
        load_first_heads();
        pdl_trigger();
        return store_heads([](int) {}, Unchanged{});
    }
    if (place.kind == HeadKind::gate) {
        load_first_heads();
        pdl_trigger();
        return store_heads([](int) {}, Sigmoid<Element>{});
    }

    // As in qk_norm_rotary_kernel: more than two sets would cost too many registers during the reduction.
    constexpr int weights_held = over_head ? 1 : 2;
    Fragment weights[weights_held];
    const auto load_weights = [&](int j) {
        weights[j % weights_held] = Fragment{};
        const int64_t head = over_head ? 0 : heads.head(j);
        if (of.weight != nullptr && has_head(j)) {
            weights[j % weights_held].load(static_cast<const Element*>(of.weight) + head * args.head_dim, lane);
        }
    };
    const auto load_first_weights = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < weights_held; ++j) load_weights(j);
    };
    // As in qk_norm_rotary_kernel: over all heads, for many tokens, threads share cos/sin through shared memory.
    constexpr bool shares_cos_sin = !over_head && HeadsPerThread == 4;
    __shared__ std::conditional_t<shares_cos_sin, SharedCosSin<Real, Vector>, std::monostate> shared_cos_sin;
    CosSin<Real> by[Vector];
    if constexpr (shares_cos_sin) {
        static_assert(!needs_lookup, "heads share cos/sin of one table only");
        load_first_heads();
        load_first_weights();
        shared_cos_sin.template compute<pairing>(args, place.batch, place.token, Real(1));
    } else {
        // Issued first, since loads return in issue order.
        LaneAngles<Vector, needs_lookup> angles;
        angles.load(args, lane, place.batch, place.token, heads.table);
        load_first_heads();
        load_first_weights();
        angles.compute(by, args, lane, place.batch, place.token, Real(1));
    }
    pdl_trigger();

    Real sums[reduced_at_once];
    const auto sums_of_squares = [&](int first) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = first; j < first + reduced_at_once; ++j) {
            const Wide wide = fragments[j].widened();
            sums[j % reduced_at_once] = over_head || has_head(j) ? sum_of_products(wide, wide) : Real(0);
        }
    };
    const Real offset = launch.offset_of_weights(of);
    if constexpr (over_head) {
        const auto reduce = [&](int first) {
            sums_of_squares(first);
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < reduced_at_once; ++j) {
                sums[j] = reduce_over_team(sums[j], launch.map.plan.team, [](Real a, Real b) { return a + b; });
            }
        };
        if constexpr (has_eight) {
            // As in qk_norm_rotary_kernel: folding the weights into cos/sin pays off with eight heads per thread.
            WeightedRotation<Real> weighted[Vector];
            with_offset(weights[0], offset).template for_each_pair<Lane::crosses_vectors>([&](int i, Real a, Real b) {
                weighted[i] = WeightedRotation<Real>(a, b, by[i]);
            });
            // The tail has no partner: the sum's other term would turn its infinity into NaN.
            const bool has_tail = args.rotary_dim < args.head_dim;
            const auto norm_and_rotate = [&](int j, Wide& wide) {
                wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
                    const bool rotates = !has_tail || lane.rotates();
                    const Pair<Real> rotated =
                        rotates ? weighted[i](a, b) : Pair<Real>{a * weighted[i].first.cos, b * weighted[i].second.cos};
                    a = rotated.first;
                    b = rotated.second;
                });
                return launch.inverse_rms(sums[j % reduced_at_once], of);
            };
            store_heads(reduce, NormedAndRotated{norm_and_rotate});
        } else {
            const auto norm_and_rotate = [&](int j, Wide& wide) {
                wide.multiply(with_offset(weights[0], offset));
                rotate_within(lane, wide, by);
                return launch.inverse_rms(sums[j % reduced_at_once], of);
            };
            store_heads(reduce, NormedAndRotated{norm_and_rotate});
        }
    } else {
        const auto reduce = [&](int first) {
            sums_of_squares(first);
            Real all[1] = {0};
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < reduced_at_once; ++j) all[0] += sums[j];
            sum_over_block(all);
            const Real scale = launch.inverse_rms(all[0], of);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                if constexpr (shares_cos_sin)
                    by[i] = lane.rotates() ? shared_cos_sin[lane.pair(i)] : CosSin<Real>{1, 0};
                by[i] = {by[i].cos * scale, by[i].sin * scale};
            }
        };
        const auto norm_and_rotate = [&](int j, Wide& wide) {
            const Wide weight = with_offset(weights[j % weights_held], offset);
            if (j + weights_held < HeadsPerThread) load_weights(j + weights_held);
            wide.multiply(weight);
            rotate_within(lane, wide, by);
            return Real(1);  // by[] has it
        };
        store_heads(reduce, NormedAndRotated{norm_and_rotate});
    }
}

template <class Element, Pairing pairing, bool has_float8>
auto store_kernel(const QkNormRotaryAndCachePlan& plan, NormOver over) {
    constexpr NormOver head = NormOver::head;
    constexpr NormOver all_heads = NormOver::all_heads;
    const auto plan_is = [&](NormOver plan_over, int heads_per_thread, bool finds_table) {
        return over == plan_over && plan.heads_per_thread == heads_per_thread && plan.finds_table == finds_table;
    };
    if (plan_is(head, 1, false)) {
        return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 1, pairing, head, false, has_float8>>;
    }
    if (plan_is(head, 2, false)) {
        return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 2, pairing, head, false, has_float8>>;
    }
    if (plan_is(head, 8, false)) {
        return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 8, pairing, head, false, has_float8>>;
    }
    if (plan_is(head, 2, true)) {
        return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 2, pairing, head, true, has_float8>>;
    }
    if (plan_is(all_heads, 4, false)) {
        return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 4, pairing, all_heads, false, has_float8>>;
    }
    if (plan_is(all_heads, 2, true)) {
        return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 2, pairing, all_heads, true, has_float8>>;
    }
    throw std::logic_error("mrrope: no kernel norms and caches that many heads a thread");
}

template <class Element, Pairing pairing>
auto store_kernel(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan) {
    if constexpr (sizeof(Element) <= 4) {
        if (plan.in_registers) {
            const bool has_float8 = is_float8(args.q_stored_as) || is_float8(args.cached_as);
            return has_float8 ? store_kernel<Element, pairing, true>(plan, args.over)
                              : store_kernel<Element, pairing, false>(plan, args.over);
        }
    }
    return pdl_kernel<qk_norm_rotary_and_cache_row_kernel<Element, pairing>>;
}

template <class Real>
void fill_kinds(HeadsOfKind<Real> (&kinds)[head_kinds], const QkNormRotaryAndCacheArgs& args) {
    const auto inverse_size = [&](const HeadsView& view) {
        const double heads = args.over == NormOver::head ? 1 : view.heads;
        return static_cast<Real>(1.0 / (heads * args.rotary.head_dim));
    };
    const HeadsView& q = args.rotary.q;
    kinds[static_cast<int>(HeadKind::query)] = {q,
                                                args.q_weight,
                                                inverse_size(q),
                                                args.q_stored_as,
                                                args.q_scale_out == nullptr ? args.q_scale : nullptr,
                                                args.q_scale_stride};
    kinds[static_cast<int>(HeadKind::key)] = {args.k.view,    args.k_weight, inverse_size(args.k.view),
                                              args.cached_as, args.k.scale,  args.k.scale_stride};
    kinds[static_cast<int>(HeadKind::value)] = {args.v.view,    nullptr,      0,
                                                args.cached_as, args.v.scale, args.v.scale_stride};
    kinds[static_cast<int>(HeadKind::gate)] = {.view = args.gate};
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_qk_norm_rotary_and_cache(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan,
                                     cudaStream_t stream) {
    using Real = RealOf<Element>;
    const auto blocks = static_cast<int>(blocks_of(plan, args.rotary.batch * args.rotary.tokens));
    QkNormRotaryAndCacheLaunch<Real> launch{
        .args = args,
        .kinds = {},
        .eps = static_cast<Real>(args.eps),
        .weight_offset = static_cast<Real>(args.weight_offset),
        .map = QkNormRotaryAndCacheMap<cutlass::FastDivmod>::of(plan, shape_of(args)),
        .block_size = cutlass::FastDivmod(static_cast<int>(std::max<int64_t>(1, args.slots.block_size))),
        .slots = static_cast<uint32_t>(args.slots.count()),
    };
    fill_kinds(launch.kinds, args);
    const auto kernel = args.rotary.pairing == Pairing::halves
                            ? store_kernel<Element, Pairing::halves>(args, plan)
                            : store_kernel<Element, Pairing::interleaved>(args, plan);
    launch_with_pdl(kernel, dim3(blocks), plan.block_threads, stream, launch);
}

extern template void launch_qk_norm_rotary_and_cache<double>(const QkNormRotaryAndCacheArgs&,
                                                             const QkNormRotaryAndCachePlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_and_cache<float>(const QkNormRotaryAndCacheArgs&,
                                                            const QkNormRotaryAndCachePlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_and_cache<cutlass::half_t>(const QkNormRotaryAndCacheArgs&,
                                                                      const QkNormRotaryAndCachePlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_and_cache<cutlass::bfloat16_t>(const QkNormRotaryAndCacheArgs&,
                                                                          const QkNormRotaryAndCachePlan&,
                                                                          cudaStream_t);

}  // namespace mrrope
