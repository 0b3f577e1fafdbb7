#pragma once

#include <cutlass/fast_math.h>

#include <stdexcept>
#include <type_traits>
#include <variant>

#include "device/dependent_launch.cuh"
#include "device/rms_norm.cuh"
#include "qk_norm_rotary_map.h"
#include "qk_norm_rotary_plan.h"
#include "with_constant.h"

namespace mrrope {

// Passed to the kernel by value.
template <class Real>
struct QkNormRotaryLaunch {
    QkNormRotaryArgs args;
    NormConstants<Real> constants;
    QkNormRotaryMap<cutlass::FastDivmod> map;
};

// A thread holds two vectors of HeadsPerThread heads, all of q or all of k: 16 bytes per load, all in flight while it
// computes the Vector cos/sin that those heads share. Of eight heads, four are in registers at a time, and the next are
// in flight while those are rotated. A team or the block reduces the sums of squares.
template <class Element, int HeadsPerThread, Pairing pairing, NormOver over, bool needs_lookup>
__global__ void __launch_bounds__(over == NormOver::head ? norm_block_threads : norm_max_block_threads,
                                  norm_min_blocks_per_sm(over, HeadsPerThread, needs_lookup, compiled_for_pdl))
    qk_norm_rotary_kernel(const __grid_constant__ QkNormRotaryLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = 16 / sizeof(Element);
    using Lane = WholeHeadLayout<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    constexpr bool over_head = over == NormOver::head;
    constexpr bool may_have_head_tables = needs_lookup && HeadsPerThread == norm_heads_per_thread_with_lookup;
    const RotaryArgs& args = launch.args.rotary;
    const NormPlace place = launch.map.template place<over>(blockIdx.x, threadIdx.x);
    const Lane lane(place.lane, args.rotary_dim / 2);
    const NormView<Element> view(launch.args, place.is_q);
    const StridedHeads heads = launch.map.template heads_of<may_have_head_tables>(place, view.heads);
    const Element* in = view.in + offset_of(view.in_strides, place.batch, place.token, heads.first);
    const int64_t in_step = heads.step * view.in_strides.head;
    const auto has_head = [&](int j) { return place.active && heads.exists(j); };
    // As in rotary_kernel: small launches are latency-bound, so all addresses are computed before the wait.
    if constexpr (HeadsPerThread <= 2) {
        const bool always_false = launch.map.threads < 0;
        compute_before_wait(always_false, in + lane.first());
        compute_before_wait(always_false, in + lane.second());
        compute_before_wait(always_false, position_address(args.positions, 0, place.batch, place.token));
        compute_before_wait(always_false, args.table + lane.pair(0));
    }
    pdl_wait();

    constexpr int held = HeadsPerThread < 4 ? HeadsPerThread : 4;  // heads in registers at a time
    // Over all heads every head has its own weights. More than two sets would cost too many registers during the
    // reduction.
    constexpr int weights_held = over_head ? 1 : 2;
    // Over all heads, for many tokens, threads share cos/sin through shared memory, computed after the head loads are
    // issued. Loading the angles first and zero-initializing the fragments, as the other instantiations do, takes 10 %
    // longer on an H200.
    constexpr bool shares_cos_sin = !over_head && HeadsPerThread == 4;
    Fragment fragments[held];
    Fragment weights[weights_held];
    const auto load_head = [&](int j) {
        if constexpr (!shares_cos_sin) fragments[j % held] = Fragment{};
        if (has_head(j)) fragments[j % held].load(in + j * in_step, lane);
    };
    const auto load_weights = [&](int j) {
        if constexpr (!shares_cos_sin) weights[j % weights_held] = Fragment{};
        const int64_t head = over_head ? 0 : heads.head(j);
        if (has_head(j)) weights[j % weights_held].load(view.weight + head * args.head_dim, lane);
    };
    const auto load_first = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) load_head(j);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < weights_held; ++j) load_weights(j);
    };

    const Real direction = args.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    __shared__ std::conditional_t<shares_cos_sin, SharedCosSin<Element, Vector>, std::monostate> shared_cos_sin;
    if constexpr (shares_cos_sin) {
        load_first();
        static_assert(!needs_lookup, "heads share cos/sin of one table only");
        shared_cos_sin.compute(args, place.batch, place.token, direction);
    } else {
        // In the order of qk_norm_rotary_and_cache_kernel.
        LaneAngles<Element, Lane, Vector, needs_lookup> angles;
        const auto load_angles = [&] { angles.load(args, lane, place.batch, place.token, heads.table); };
        angles.load_index(args, place.batch, place.token);
        if constexpr (!needs_lookup) load_angles();
        load_first();
        if constexpr (needs_lookup) {
            __syncwarp();  // the compiler moves no load across it
            load_angles();
        }
        angles.compute(by, lane, direction);
    }
    QueryFactors<Real, HeadsPerThread> query_factors;
    const bool has_query_factors = may_have_head_tables && place.is_q && args.choice.query_factors != nullptr;
    if (has_query_factors) {
        query_factors.load(args.choice, table_offset(args.choice, place.batch, place.token),
                           [&](int j) { return has_head(j) ? heads.head(j) : -1; });
    }
    pdl_trigger();
    // Folding the weights into cos/sin costs registers, which pays off with eight heads per thread.
    constexpr bool folds_weights = over_head && HeadsPerThread == 8;
    WeightedRotation<Real> weighted[folds_weights ? Vector : 1];
    if constexpr (folds_weights) {
        with_offset(weights[0], launch.constants.weight_offset)
            .template for_each_pair<Lane::crosses_vectors>(
                [&](int i, Real a, Real b) { weighted[i] = WeightedRotation<Real>(a, b, by[i]); });
    }

    Element* out = view.out + offset_of(view.out_strides, place.batch, place.token, heads.first);
    const int64_t out_step = heads.step * view.out_strides.head;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < HeadsPerThread; first += held) {
        Real sums[held];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) {
            const Wide wide = fragments[j].widened();
            sums[j] = !shares_cos_sin || has_head(first + j) ? sum_of_products(wide, wide) : Real(0);
        }
        if constexpr (over_head) {
            sum_over_team(sums, launch.map.plan.team);
        } else {
            Real all[1] = {0};
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < held; ++j) all[0] += sums[j];
            sum_over_block(all);
            const Real scale = launch.constants.inverse_rms(all[0], place.is_q);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                if constexpr (shares_cos_sin)
                    by[i] = lane.rotates() ? shared_cos_sin[lane.pair(i)] : CosSin<Real>{1, 0};
                by[i] = {by[i].cos * scale, by[i].sin * scale};
            }
        }

        CUTLASS_PRAGMA_UNROLL
        for (int j = first; j < first + held; ++j) {
            if (!has_head(j)) break;
            Wide wide = fragments[j % held].widened();
            const Real offset = launch.constants.weight_offset;
            if constexpr (folds_weights) {
                const Real scale = launch.constants.inverse_rms(sums[j % held], place.is_q);
                wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
                    const Pair<Real> rotated = lane.rotates() ? weighted[i](a, b) : weighted[i](a, b, {0, 0});
                    a = scale * rotated.first;
                    b = scale * rotated.second;
                });
            } else if constexpr (over_head) {
                const Real scale = launch.constants.inverse_rms(sums[j % held], place.is_q);
                wide.multiply(with_offset(weights[0], offset), scale);
                rotate_within(lane, wide, by);
            } else {
                const Wide weight = with_offset</*skips_zero=*/true>(weights[j % weights_held], offset);
                if (j + weights_held < HeadsPerThread) load_weights(j + weights_held);
                wide.multiply(weight);
                rotate_within</*selects=*/shares_cos_sin>(lane, wide, by);
            }
            if (has_query_factors && lane.rotates()) wide.scale(query_factors.of_head[j]);
            Fragment rotated;
            rotated.narrow(wide);
            if (j + held < HeadsPerThread) load_head(j + held);
            rotated.store(out + j * out_step, lane);
        }
    }
}

// Any shape and pairing, in two passes: a block reads one row component by component for its mean square, and again to
// write it.
template <class Element>
__global__ void __launch_bounds__(norm_row_block_threads, norm_row_min_blocks_per_sm)
    qk_norm_rotary_row_kernel(const __grid_constant__ QkNormRotaryLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    const RotaryArgs& args = launch.args.rotary;
    const bool over_head = launch.args.over == NormOver::head;
    const auto [batch, token, is_q, row] = launch.map.row(blockIdx.x);
    const NormView<Element> view(launch.args, is_q);
    const int first_head = over_head ? row : 0;
    const int heads = over_head ? 1 : view.heads;
    const Element* in = view.in + offset_of(view.in_strides, batch, token, first_head);
    Element* out = view.out + offset_of(view.out_strides, batch, token, first_head);
    pdl_wait();
    pdl_trigger();

    Real sums[1] = {0};
    for (int head = 0; head < heads; ++head) {
        for (int at = threadIdx.x; at < args.head_dim; at += norm_row_block_threads) {
            const auto x = static_cast<Real>(in[head * view.in_strides.head + at]);
            sums[0] += x * x;
        }
    }
    sum_over_block(sums);
    const Real scale = launch.constants.inverse_rms(sums[0], view.is_q);

    const int half = args.rotary_dim / 2;
    const Real direction = args.conjugate ? Real(-1) : Real(1);
    for_each_row_pair(threadIdx.x, heads, half, [&](int head, int pair) {
        const RowPair lane{args.pairing, pair, half};
        const Element* weight = view.weight + static_cast<int64_t>(head) * args.head_dim;
        const auto normed = [&](int at) {
            return static_cast<Real>(in[head * view.in_strides.head + at]) * scale *
                   (static_cast<Real>(weight[at]) + launch.constants.weight_offset);
        };
        const Pair<Real> rotated =
            rotated_pair<Element>(args, lane, {normed(lane.first()), normed(lane.second())}, view.is_q, view.heads,
                                  batch, token, first_head + head, direction);
        out[head * view.out_strides.head + lane.first()] = static_cast<Element>(rotated.first);
        out[head * view.out_strides.head + lane.second()] = static_cast<Element>(rotated.second);
    });
    const int tail = args.head_dim - args.rotary_dim;
    for_each_row_tail(threadIdx.x, heads, args.rotary_dim, tail, [&](int head, int at) {
        const auto weight = static_cast<Real>(view.weight[static_cast<int64_t>(head) * args.head_dim + at]);
        const Real normed =
            static_cast<Real>(in[head * view.in_strides.head + at]) * scale * (weight + launch.constants.weight_offset);
        out[head * view.out_strides.head + at] = static_cast<Element>(normed);
    });
}

template <class Element>
auto norm_kernel(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan) {
    using Kernel = PdlKernel<QkNormRotaryLaunch<RealOf<Element>>>;
    if (!plan.in_registers) return Kernel{pdl_kernel<qk_norm_rotary_row_kernel<Element>>};
    return with_constant<Pairing::halves, Pairing::interleaved>(args.rotary.pairing, [&]<Pairing pairing> {
        return with_constant<NormOver::head, NormOver::all_heads>(args.over, [&]<NormOver over> {
            return with_constant<1, 2, 4, 8>(plan.heads_per_thread, [&]<int heads_per_thread> {
                return with_constant<false, true>(plan.needs_lookup, [&]<bool needs_lookup>() -> Kernel {
                    if constexpr (has_norm_kernel(sizeof(Element), pairing, over, heads_per_thread, needs_lookup)) {
                        return pdl_kernel<
                            qk_norm_rotary_kernel<Element, heads_per_thread, pairing, over, needs_lookup>>;
                    }
                    throw std::logic_error("mrrope: no kernel norms by this plan");
                });
            });
        });
    });
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_qk_norm_rotary(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan, cudaStream_t stream) {
    const auto blocks = static_cast<int>(blocks_of(plan, args.over, args.rotary.batch * args.rotary.tokens));
    const QkNormRotaryLaunch<RealOf<Element>> launch{
        .args = args,
        .constants = NormConstants<RealOf<Element>>(args),
        .map = QkNormRotaryMap<cutlass::FastDivmod>::of(plan, shape_of(args)),
    };
    launch_with_pdl(norm_kernel<Element>(args, plan), dim3(blocks), plan.block_threads, stream, launch);
}

extern template void launch_qk_norm_rotary<double>(const QkNormRotaryArgs&, const QkNormRotaryPlan&, cudaStream_t);
extern template void launch_qk_norm_rotary<float>(const QkNormRotaryArgs&, const QkNormRotaryPlan&, cudaStream_t);
extern template void launch_qk_norm_rotary<cutlass::half_t>(const QkNormRotaryArgs&, const QkNormRotaryPlan&,
                                                            cudaStream_t);
extern template void launch_qk_norm_rotary<cutlass::bfloat16_t>(const QkNormRotaryArgs&, const QkNormRotaryPlan&,
                                                                cudaStream_t);

}  // namespace mrrope
