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
#include "qk_norm_rotary_and_cache_rotations.cuh"
#include "qk_norm_rotary_and_cache_row_kernel.cuh"
#include "with_constant.h"

namespace mrrope {

// The pointer to a thread's next head, `step` bytes on. Keeps the compiler from deriving addresses of later heads from
// the first one's, which takes multiplications.
template <class T>
__device__ T* next_head(T* pointer, int64_t step) {
    size_t address = __cvta_generic_to_global(pointer) + step;  // otherwise accesses would be generic
    asm("" : "+l"(address));
    return static_cast<T*>(__cvta_global_to_generic(address));
}

// Stores a vector at once; the compiler splits an assignment through a pointer of next_head.
template <class Vector>
__device__ void store_whole(void* address, const Vector& vector) {
    const size_t global = __cvta_generic_to_global(address);
    if constexpr (sizeof(Vector) == 16) {
        const auto x = reinterpret_cast<const uint4&>(vector);
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                     : "memory");
    } else if constexpr (sizeof(Vector) == 8) {
        const auto x = reinterpret_cast<const uint2&>(vector);
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(global), "r"(x.x), "r"(x.y) : "memory");
    } else {
        *static_cast<Vector*>(address) = vector;
    }
}

template <int Vector>
__device__ float largest_magnitude(const WideFragment<float, Vector>& wide) {
    float largest = fmaxf(fabsf(wide.first[0]), fabsf(wide.second[0]));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < Vector; ++i) largest = fmaxf(largest, fmaxf(fabsf(wide.first[i]), fabsf(wide.second[i])));
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

// qk_norm_rotary_kernel for heads of four kinds: all heads of a block are of q, of k, of v or of the gate, and those of
// k and v are stored to the tokens' cache slots.
// has_float8: some heads are rounded to float8, which takes as much code as all the rest.
// FixedLanes: lanes of a head, all of which rotate, or 0 for any head. Constants in place of arithmetic on shape and
// lane save a quarter of the instructions per head of float8 q.
template <class Element, int HeadsPerThread, Pairing pairing, NormOver over, bool needs_lookup, bool has_float8,
          int FixedLanes = 0>
__global__ void __launch_bounds__(norm_and_cache_max_block_threads(over, HeadsPerThread),
                                  norm_and_cache_min_blocks_per_sm(over, HeadsPerThread, needs_lookup, has_float8,
                                                                   FixedLanes))
    qk_norm_rotary_and_cache_kernel(const __grid_constant__ QkNormRotaryAndCacheLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = norm_and_cache_vector(sizeof(Element), HeadsPerThread);
    constexpr bool is_fixed = FixedLanes > 0;
    using Lane = std::conditional_t<is_fixed, LaneLayout<pairing, Vector>, WholeHeadLayout<pairing, Vector>>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    constexpr bool over_head = over == NormOver::head;
    constexpr bool may_have_head_tables = needs_lookup && HeadsPerThread == norm_heads_per_thread_with_lookup;
    const RotaryArgs& args = launch.args.rotary;
    const StorePlace place = launch.map.template place<over, (HeadsPerThread > 2)>(blockIdx.x, threadIdx.x);
    const Lane lane{place.lane, is_fixed ? FixedLanes * Vector : args.rotary_dim / 2};
    const int team = is_fixed ? FixedLanes : launch.map.plan.team;
    const HeadsOfKind<Real>& of = launch.heads(place.kind);
    const StridedHeads heads = launch.map.template heads_of<may_have_head_tables>(place, of.view.heads);
    const VectorsFromFirst vectors{lane.second() - lane.first()};
    const Element* in = static_cast<const Element*>(of.view.in) +
                        offset_of(of.view.in_strides, place.batch, place.token, heads.first) + lane.first();
    const int64_t in_step = heads.step * of.view.in_strides.head * int64_t{sizeof(Element)};
    const auto has_head = [&](int j) { return place.active && heads.exists(j); };
    const void* token_slot = position_address(launch.args.slots.of_tokens, 0, place.batch, place.token);
    // Small launches are latency-bound, so all addresses are computed before the wait.
    if constexpr (HeadsPerThread <= 2) {
        const bool always_false = launch.map.all_tokens < 0;
        compute_before_wait(always_false, in + vectors.first());
        compute_before_wait(always_false, in + vectors.second());
        compute_before_wait(always_false, position_address(args.positions, 0, place.batch, place.token));
        compute_before_wait(always_false, token_slot);
        compute_before_wait(always_false, args.table + lane.pair(0));
        if constexpr (needs_lookup) {
            compute_before_wait(always_false, index_address(args.choice, place.batch, place.token));
        }
    }
    pdl_wait();

    // Of eight heads three are in registers, and each is reduced alone: its loads are in flight during the arithmetic
    // of the two before it. A loop instead of unrolled code takes up to twice as long.
    constexpr bool has_eight = HeadsPerThread == 8;
    constexpr int held = has_eight ? 3 : HeadsPerThread;
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
        if (has_head(j)) fragment.load(in, vectors);
        in = next_head(in, in_step);
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

    // Calls results(j, wide) for every head, which replaces the loaded components and returns the factor that they are
    // still to be multiplied by. Before it, calls reduce(i) with the head's place in registers: eight heads are reduced
    // one by one, fewer at once, before the first.
    const auto store_heads_as = [&]<bool to_float8, class Results>(auto&& reduce, const Results& results) {
        // Threads of a warp may differ in their heads. Over all heads, all take part in the maximum of a head. Over a
        // head, those without another one exit; the shuffles of the others name them, which CUDA allows.
        constexpr bool takes_all = to_float8 && !over_head;
        const bool is_stored = !place.is_cached() || launch.has_slot(slot);
        using Stored = std::conditional_t<to_float8, uint8_t, Element>;
        Stored* out = static_cast<Stored*>(of.view.out) +
                      launch.out_offset(of, place.is_cached(), place.batch, place.token, slot) +
                      heads.first * of.view.out_strides.head + lane.first();
        const int64_t out_step = heads.step * of.view.out_strides.head * int64_t{sizeof(Stored)};
        const auto store = [&](const auto& fragment) {
            store_whole(out + vectors.first(), fragment.first);
            store_whole(out + vectors.second(), fragment.second);
        };
        const bool computes_scale = place.kind == HeadKind::query && launch.args.q_scale_out != nullptr;
        [[maybe_unused]] float* scale_out = launch.q_scale(place.batch, place.token, heads.first);
        [[maybe_unused]] const int64_t scale_step =
            heads.step * launch.args.q_scale_out_strides.head * int64_t{sizeof(float)};
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            const int i = j % held;
            if (!takes_all && !heads.exists(j)) return;
            if (has_eight || j == 0) reduce(i);
            const bool stores = is_stored && has_head(j);
            const Fragment loaded = fragments[i];
            Wide wide = loaded.widened();
            const Real factor = results(j, wide);
            if constexpr (to_float8) {
                Float8Fragment<Vector> rounded;
                const auto given_scale = [&] {
                    return !has_all_scales && of.scale_stride != 0 ? load_scale(j) : scales[has_all_scales ? i : 0];
                };
                if constexpr (Results::keeps_bits) {
                    rounded.narrow(wide, given_scale(), of.stored_as);
                } else {
                    float ratio;
                    if (computes_scale) {
                        const float largest = max_over_team(largest_magnitude(wide), team);
                        const float scale = launch.q_range.scale_of(factor * largest);
                        if (has_head(j) && place.lane == 0) *scale_out = scale;
                        scale_out = next_head(scale_out, scale_step);
                        ratio = ratio_to_computed_scale(factor, scale);
                    } else {
                        ratio = finite_ratio(factor, given_scale());
                    }
                    rounded.narrow_product(wide, ratio, of.stored_as);
                }
                if (j + held < HeadsPerThread) load_next_head(j + held, fragments[i]);
                if (stores) store(rounded);
            } else {
                Fragment narrowed = loaded;
                if constexpr (!Results::keeps_bits) {
                    wide.scale(factor);
                    narrowed.narrow(wide);
                }
                if (j + held < HeadsPerThread) load_next_head(j + held, fragments[i]);
                if (stores) store(narrowed);
            }
            out = next_head(out, out_step);
        }
    };
    const auto store_heads = [&]<class Results>(auto&& reduce, const Results& results) {
        if constexpr (has_float8 && Results::may_be_float8) {
            if (is_float8(of.stored_as)) return store_heads_as.template operator()<true>(reduce, results);
        }
        store_heads_as.template operator()<false>(reduce, results);
    };

    if (!place.rotates()) {
        load_first_heads();
        pdl_trigger();
        if (place.kind == HeadKind::value) return store_heads([](int) {}, Unchanged{});
        return store_heads([](int) {}, Sigmoid<Element>{});
    }

    const Real offset = launch.offset_of_weights(of);
    const auto sum_of_squares = [&](int i) {
        const Wide wide = fragments[i].widened();
        return sum_of_products(wide, wide);
    };
    const auto sum_over_lanes = [&](Real x) { return reduce_over_team(x, team, [](Real a, Real b) { return a + b; }); };
    if constexpr (has_eight) {
        static_assert(over_head);
        constexpr int warp = 32;
        __shared__ WarpRotations<Element, Vector> rotations_of_warps[norm_block_threads / warp];
        auto& rotations = rotations_of_warps[threadIdx.x / warp];
        const int column = rotation_column(threadIdx.x, team, place.sharers);
        rotations.template compute<needs_lookup>(args, lane, place, column, static_cast<const Element*>(of.weight),
                                                 offset, load_first_heads);
        pdl_trigger();
        Real sum;
        const auto reduce = [&](int i) { sum = sum_over_lanes(sum_of_squares(i)); };
        const bool has_tail = args.rotary_dim < args.head_dim;
        const auto norm_and_rotate = [&](int, Wide& wide) {
            wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
                const WeightedRotation<Real> by = rotations.of[i][column];
                const Pair<Real> rotated = !has_tail || lane.rotates() ? by(a, b) : by(a, b, {0, 0});
                a = rotated.first;
                b = rotated.second;
            });
            return launch.inverse_rms(sum, of);
        };
        store_heads(reduce, NormedAndRotated{norm_and_rotate});
    } else {
        // Over all heads every head has weights of its own. As in qk_norm_rotary_kernel: more than two sets would cost
        // too many registers during the reduction.
        constexpr int weights_held = over_head || HeadsPerThread == 1 ? 1 : 2;
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
        // Over all heads a block has one token, and one table unless there are several head tables: its threads share
        // cos/sin through shared memory. 64 tokens of 32/32 heads take 3.4 us on an H200, not 3.7.
        const bool shares_cos_sin = !over_head && (!needs_lookup || args.choice.heads == 1);
        __shared__ std::conditional_t<over_head, std::monostate, SharedCosSin<Element, Vector>> shared_cos_sin;
        CosSin<Real> by[Vector];
        if (shares_cos_sin) {
            if constexpr (!over_head) {
                typename SharedCosSin<Element, Vector>::template Share<needs_lookup> share;
                // First in small launches, which are bound by latency. A lookup would be waited for.
                constexpr bool loads_angles_first = HeadsPerThread <= 2 && !needs_lookup;
                if constexpr (loads_angles_first) share.load(args, place.batch, place.token);
                load_first_heads();
                load_first_weights();
                if constexpr (!loads_angles_first) share.load(args, place.batch, place.token);
                shared_cos_sin.compute(share, args, place.batch, place.token, Real(1));
            }
        } else {
            // Issued first, since loads return in issue order. With a lookup, after the heads: the compiler waits for
            // a token's table and positions as soon as it can, and would load the heads after that.
            LaneAngles<Element, Lane, Vector, needs_lookup> angles;
            const auto load_angles = [&] { angles.load(args, lane, place.batch, place.token, heads.table); };
            angles.load_index(args, place.batch, place.token);
            if constexpr (!needs_lookup) load_angles();
            load_first_heads();
            load_first_weights();
            if constexpr (needs_lookup) {
                __syncwarp();  // the compiler moves no load across it
                load_angles();
            }
            angles.compute(by, lane, Real(1));
        }
        QueryFactors<Real, HeadsPerThread> query_factors;
        const bool has_query_factors =
            may_have_head_tables && place.kind == HeadKind::query && args.choice.query_factors != nullptr;
        if (has_query_factors) {
            query_factors.load(args.choice, table_offset(args.choice, place.batch, place.token),
                               [&](int j) { return has_head(j) ? heads.head(j) : -1; });
        }
        const auto scale_query = [&](int j, Wide& wide) {
            if (has_query_factors && lane.rotates()) wide.scale(query_factors.of_head[j]);
        };
        pdl_trigger();

        if constexpr (over_head) {
            Real sums[held];
            const auto reduce = [&](int) {
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < held; ++j) sums[j] = sum_of_squares(j);
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < held; ++j) sums[j] = sum_over_lanes(sums[j]);
            };
            const auto norm_and_rotate = [&](int j, Wide& wide) {
                wide.multiply(with_offset(weights[0], offset));
                rotate_within(lane, wide, by);
                scale_query(j, wide);
                return launch.inverse_rms(sums[j], of);
            };
            store_heads(reduce, NormedAndRotated{norm_and_rotate});
        } else {
            const auto reduce = [&](int) {
                Real sum[1] = {0};
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < held; ++j) sum[0] += has_head(j) ? sum_of_squares(j) : Real(0);
                sum_over_block</*is_repeated=*/false>(sum);
                const Real scale = launch.inverse_rms(sum[0], of);
                CUTLASS_PRAGMA_UNROLL
                for (int i = 0; i < Vector; ++i) {
                    if (shares_cos_sin) by[i] = lane.rotates() ? shared_cos_sin[lane.pair(i)] : CosSin<Real>{1, 0};
                    by[i] = {by[i].cos * scale, by[i].sin * scale};
                }
            };
            const auto norm_and_rotate = [&](int j, Wide& wide) {
                const Wide weight = with_offset(weights[j % weights_held], offset);
                if (j + weights_held < HeadsPerThread) load_weights(j + weights_held);
                wide.multiply(weight);
                rotate_within(lane, wide, by);
                scale_query(j, wide);
                return Real(1);  // by[] has it
            };
            store_heads(reduce, NormedAndRotated{norm_and_rotate});
        }
    }
}

template <class Element>
auto store_kernel(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan) {
    using Kernel = PdlKernel<QkNormRotaryAndCacheLaunch<RealOf<Element>>>;
    if (!plan.in_registers) return Kernel{pdl_kernel<qk_norm_rotary_and_cache_row_kernel<Element>>};
    const auto kernel_of = [&]<Pairing pairing, NormOver over, int heads_per_thread, bool needs_lookup> {
        return with_constant<false, true>(plan.has_float8, [&]<bool has_float8> {
            return with_constant<0, 8>(plan.fixed_lanes, [&]<int fixed_lanes>() -> Kernel {
                if constexpr (has_norm_and_cache_kernel(sizeof(Element), pairing, over, heads_per_thread, needs_lookup,
                                                        has_float8, fixed_lanes)) {
                    return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, heads_per_thread, pairing, over,
                                                                      needs_lookup, has_float8, fixed_lanes>>;
                }
                throw std::logic_error("mrrope: no kernel norms and caches by this plan");
            });
        });
    };
    return with_constant<Pairing::halves, Pairing::interleaved>(args.rotary.pairing, [&]<Pairing pairing> {
        return with_constant<NormOver::head, NormOver::all_heads>(args.over, [&]<NormOver over> {
            return with_constant<1, 2, 4, 8>(plan.heads_per_thread, [&]<int heads_per_thread> {
                return with_constant<false, true>(plan.needs_lookup, [&]<bool needs_lookup> {
                    return kernel_of.template operator()<pairing, over, heads_per_thread, needs_lookup>();
                });
            });
        });
    });
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
    if (is_float8(args.q_stored_as)) launch.q_range = Float8Range::of(args.q_stored_as);
    fill_kinds(launch.kinds, args);
    launch_with_pdl(store_kernel<Element>(args, plan), dim3(blocks), plan.block_threads, stream, launch);
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
