#pragma once

#include "device/dependent_launch.cuh"
#include "device/norm_row.cuh"
#include "qk_norm_rotary_plan.h"

// With r the inverse root mean square of x, w the weights and v the gradient turned back:
//     dx = r * (v * w) - x * r^3 * mean(v * w * x)    and    dw = x * r * v, summed.

namespace mrrope {

// Passed to the kernel by value.
template <class Real>
struct QkNormRotaryGradientLaunch {
    QkNormRotaryGradientArgs args;
    NormNumbers<Real> numbers;
    QkNormRotaryGradientPlan plan;
    cutlass::FastDivmod lanes;
    cutlass::FastDivmod q_groups;  // over all heads: 1
    cutlass::FastDivmod k_groups;
    cutlass::FastDivmod tokens;
    int all_tokens;
};

// What a block has to do with: q or k, its number among the blocks of that, and the gradient.
template <class Element>
struct GradientBlock {
    NormView<Element> view;
    const Element* gradient;
    HeadStrides gradient_strides;
    RealOf<Element>* weight_sums;  // this block's; nullptr: not wanted
    int block;
    int blocks;

    template <class Launch>
    __device__ GradientBlock(const Launch& launch, int weights_of_a_head)
        : view(launch.args.call, static_cast<int>(blockIdx.x) < launch.plan.q_blocks) {
        const OutputGradient& given = view.is_q ? launch.args.q : launch.args.k;
        block = view.is_q ? blockIdx.x : blockIdx.x - launch.plan.q_blocks;
        blocks = view.is_q ? launch.plan.q_blocks : launch.plan.k_blocks;
        gradient = static_cast<const Element*>(given.data);
        gradient_strides = given.strides;
        weight_sums = static_cast<RealOf<Element>*>(given.weight_sums);
        const int64_t weights =
            static_cast<int64_t>(launch.args.call.over == NormOver::head ? 1 : view.heads) * weights_of_a_head;
        if (weight_sums != nullptr) weight_sums += block * weights;
    }
};

// What a row's two sums make of it.
template <class Real>
struct RowGradient {
    Real scale;    // r
    Real along_x;  // r^3 * mean(v * w * x)

    __device__ RowGradient(const NormNumbers<Real>& numbers, Real squares, Real products, bool is_q) {
        scale = numbers.inverse_rms(squares, is_q);
        // In turns, so that no power of a very large or small row leaves float32.
        along_x = scale * products * scale * (is_q ? numbers.q_inverse_size : numbers.k_inverse_size) * scale;
    }
};

// A thread holds two vectors of two heads, and of their gradients, all of q or all of k. Over a head, the block's teams
// go through groups of heads, token after token; over all heads, the block goes from token to token with its heads.
template <class Element, Pairing pairing, NormOver over>
__global__ void __launch_bounds__(over == NormOver::head ? norm_gradient_block_threads
                                                         : norm_gradient_most_block_threads,
                                  norm_gradient_resident_threads(over) / (over == NormOver::head
                                                                              ? norm_gradient_block_threads
                                                                              : norm_gradient_most_block_threads))
    qk_norm_rotary_gradient_kernel(const __grid_constant__ QkNormRotaryGradientLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = 16 / sizeof(Element);
    constexpr int HeadsPerThread = norm_heads_per_thread_with_lookup;
    constexpr bool over_head = over == NormOver::head;
    constexpr int weight_sets = over_head ? 1 : HeadsPerThread;
    using Lane = NormLane<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    const RotaryArgs& args = launch.args.call.rotary;
    const GradientBlock<Element> mine(launch, args.head_dim);
    const NormView<Element>& view = mine.view;
    int slot, member;
    launch.lanes(slot, member, threadIdx.x);
    const Lane lane(min(member, launch.plan.lanes - 1), args.rotary_dim / 2);
    const int groups = view.is_q ? launch.plan.q_groups : launch.plan.k_groups;
    const bool has_lane = member < launch.plan.lanes && (over_head || slot < groups);
    const int slots = over_head ? norm_gradient_block_threads / launch.plan.team : 1;
    const int rows = over_head ? launch.all_tokens * groups : launch.all_tokens;
    const Real direction = args.conjugate ? Real(1) : Real(-1);
    wait_for_previous_kernel();
    let_next_kernel_start();

    Wide weight_gradients[weight_sets];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < weight_sets; ++j) weight_gradients[j] = Wide{};
    for (int64_t first_row = static_cast<int64_t>(mine.block) * slots; first_row < rows;
         first_row += static_cast<int64_t>(mine.blocks) * slots) {
        const int64_t row = first_row + (over_head ? slot : 0);
        const bool works = has_lane && row < rows;
        int sequence_token, group, batch, token;
        (view.is_q ? launch.q_groups : launch.k_groups)(sequence_token, group,
                                                        static_cast<int>(works ? row : first_row));
        if constexpr (!over_head) group = has_lane ? slot : 0;
        launch.tokens(batch, token, sequence_token);
        const auto holds = [&](int j) { return works && group + j * groups < view.heads; };

        LaneTurns<Vector, true> turns;
        turns.ask(args, lane, batch, token);
        Fragment x[HeadsPerThread], given[HeadsPerThread];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            const int64_t head = group + j * groups;
            x[j] = given[j] = Fragment{};
            if (!holds(j)) continue;
            x[j].load(view.in + offset_of(view.in_strides, batch, token, head), lane);
            given[j].load(mine.gradient + offset_of(mine.gradient_strides, batch, token, head), lane);
        }
        Fragment weights[weight_sets];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < weight_sets; ++j) {
            const int64_t head = over_head ? 0 : group + j * groups;
            weights[j] = Fragment{};
            if (holds(j)) weights[j].load(view.weight + head * args.head_dim, lane);
        }
        CosSin<Real> by[Vector];
        turns.compute(by, args, lane, batch, token, direction);

        Real sums[2 * HeadsPerThread];  // of squares, and of products
        Wide turned[HeadsPerThread];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            turned[j] = given[j].widened();
            turned[j].template rotate<Lane::crosses_vectors>(by);
            const Wide wide = x[j].widened();
            const Wide weight = with_offset(weights[over_head ? 0 : j], launch.numbers.weight_offset);
            Wide weighted;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                weighted.first[i] = turned[j].first[i] * weight.first[i];
                weighted.second[i] = turned[j].second[i] * weight.second[i];
            }
            sums[2 * j] = sum_of_products(wide, wide);
            sums[2 * j + 1] = sum_of_products(weighted, wide);
        }
        if constexpr (over_head) {
            sum_over_team(sums, launch.plan.team);
        } else {
            Real all[2] = {sums[0] + sums[2], sums[1] + sums[3]};
            sum_over_block(all);
            sums[0] = sums[2] = all[0];
            sums[1] = sums[3] = all[1];
        }

        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (!holds(j)) break;
            const RowGradient<Real> of_row(launch.numbers, sums[2 * j], sums[2 * j + 1], view.is_q);
            const Wide wide = x[j].widened();
            const Wide weight = with_offset(weights[over_head ? 0 : j], launch.numbers.weight_offset);
            Wide& weight_gradient = weight_gradients[over_head ? 0 : j];
            Wide result;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                const Real first = of_row.scale * turned[j].first[i];
                const Real second = of_row.scale * turned[j].second[i];
                weight_gradient.first[i] += first * wide.first[i];
                weight_gradient.second[i] += second * wide.second[i];
                result.first[i] = first * weight.first[i] - of_row.along_x * wide.first[i];
                result.second[i] = second * weight.second[i] - of_row.along_x * wide.second[i];
            }
            Fragment narrow;
            narrow.narrow(result);
            narrow.store(view.out + offset_of(view.out_strides, batch, token, group + j * groups), lane);
        }
    }

    if (mine.weight_sums == nullptr) return;
    if constexpr (over_head) {
        // Always in the same order: what comes out does not depend on which team was first.
        __shared__ Real of_slots[norm_gradient_block_threads * 2 * Vector];
        if (has_lane) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                of_slots[slot * args.head_dim + lane.first() + i] = weight_gradients[0].first[i];
                of_slots[slot * args.head_dim + lane.second() + i] = weight_gradients[0].second[i];
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < args.head_dim; at += norm_gradient_block_threads) {
            Real sum = 0;
            for (int other = 0; other < slots; ++other) sum += of_slots[other * args.head_dim + at];
            mine.weight_sums[at] = sum;
        }
    } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            const int64_t head = slot + j * groups;
            if (!has_lane || head >= view.heads) break;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                mine.weight_sums[head * args.head_dim + lane.first() + i] = weight_gradients[j].first[i];
                mine.weight_sums[head * args.head_dim + lane.second() + i] = weight_gradients[j].second[i];
            }
        }
    }
}

// Any shape: a block goes from row to row, and through each of them twice. A component is always the same thread's.
template <class Element, Pairing pairing>
__global__ void __launch_bounds__(norm_row_block_threads, norm_row_resident_blocks)
    qk_norm_rotary_gradient_row_kernel(const __grid_constant__ QkNormRotaryGradientLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    const RotaryArgs& args = launch.args.call.rotary;
    const GradientBlock<Element> mine(launch, args.head_dim);
    const NormView<Element>& view = mine.view;
    const bool over_head = launch.args.call.over == NormOver::head;
    const int heads = over_head ? 1 : view.heads;
    const int64_t rows = static_cast<int64_t>(launch.all_tokens) * (over_head ? view.heads : 1);
    const int half = args.rotary_dim / 2;
    const int rest = args.head_dim - args.rotary_dim;
    const Real direction = args.conjugate ? Real(1) : Real(-1);
    wait_for_previous_kernel();
    let_next_kernel_start();

    if (mine.weight_sums != nullptr) {
        for (int at = threadIdx.x; at < heads * args.head_dim; at += norm_row_block_threads) mine.weight_sums[at] = 0;
        __syncthreads();
    }
    for (int64_t row = mine.block; row < rows; row += mine.blocks) {
        int sequence_token, first_head, batch, token;
        (view.is_q ? launch.q_groups : launch.k_groups)(sequence_token, first_head, static_cast<int>(row));
        launch.tokens(batch, token, sequence_token);
        const Element* in = view.in + offset_of(view.in_strides, batch, token, first_head);
        const Element* given = mine.gradient + offset_of(mine.gradient_strides, batch, token, first_head);
        Element* out = view.out + offset_of(view.out_strides, batch, token, first_head);

        // Calls f(head, component, v) for every component that is this thread's.
        const auto for_each_component = [&](auto&& f) {
            const auto gradient_at = [&](int head, int at) {
                return static_cast<Real>(given[head * mine.gradient_strides.head + at]);
            };
            for (int item = threadIdx.x; item < heads * half; item += norm_row_block_threads) {
                const int head = item / half;
                const NormLane<pairing, 1> lane(item % half, half);
                LaneTurns<1, true> turns;
                turns.ask(args, lane, batch, token);
                CosSin<Real> by[1];
                turns.compute(by, args, lane, batch, token, direction);
                const Pair<Real> v =
                    rotate<Real>({gradient_at(head, lane.first()), gradient_at(head, lane.second())}, by[0]);
                f(head, lane.first(), v.first);
                f(head, lane.second(), v.second);
            }
            for (int item = threadIdx.x; item < heads * rest; item += norm_row_block_threads) {
                const int head = item / rest;
                const int at = args.rotary_dim + item % rest;
                f(head, at, gradient_at(head, at));
            }
        };
        const auto x_at = [&](int head, int at) { return static_cast<Real>(in[head * view.in_strides.head + at]); };
        const auto weight_at = [&](int head, int at) {
            return static_cast<Real>(view.weight[static_cast<int64_t>(head) * args.head_dim + at]) +
                   launch.numbers.weight_offset;
        };
        Real sums[2] = {0, 0};
        for_each_component([&](int head, int at, Real v) {
            const Real x = x_at(head, at);
            sums[0] += x * x;
            sums[1] += v * weight_at(head, at) * x;
        });
        sum_over_block(sums);
        const RowGradient<Real> of_row(launch.numbers, sums[0], sums[1], view.is_q);
        for_each_component([&](int head, int at, Real v) {
            const Real x = x_at(head, at);
            if (mine.weight_sums != nullptr) mine.weight_sums[head * args.head_dim + at] += of_row.scale * v * x;
            out[head * view.out_strides.head + at] =
                static_cast<Element>(of_row.scale * v * weight_at(head, at) - of_row.along_x * x);
        });
    }
}

template <class Element, Pairing pairing>
auto norm_gradient_kernel(const QkNormRotaryGradientPlan& plan, NormOver over) {
    if constexpr (sizeof(Element) <= 4) {
        if (plan.holds && over == NormOver::head) {
            return dependent_kernel<qk_norm_rotary_gradient_kernel<Element, pairing, NormOver::head>>;
        }
        if (plan.holds) return dependent_kernel<qk_norm_rotary_gradient_kernel<Element, pairing, NormOver::all_heads>>;
    }
    return dependent_kernel<qk_norm_rotary_gradient_row_kernel<Element, pairing>>;
}

// Instantiated in a file per element type, so that they compile side by side.
template <class Element>
void launch_qk_norm_rotary_gradient(const QkNormRotaryGradientArgs& args, const QkNormRotaryGradientPlan& plan,
                                    cudaStream_t stream) {
    const RotaryArgs& rotary = args.call.rotary;
    const bool over_head = args.call.over == NormOver::head;
    const auto divisor = [&](int groups) { return cutlass::FastDivmod(over_head && groups > 0 ? groups : 1); };
    const QkNormRotaryGradientLaunch<RealOf<Element>> launch{
        .args = args,
        .numbers = NormNumbers<RealOf<Element>>(args.call),
        .plan = plan,
        .lanes = cutlass::FastDivmod(over_head ? plan.team : plan.lanes),
        .q_groups = divisor(plan.q_groups),
        .k_groups = divisor(plan.k_groups),
        .tokens = cutlass::FastDivmod(static_cast<int>(rotary.tokens)),
        .all_tokens = static_cast<int>(rotary.batch * rotary.tokens),
    };
    const auto kernel = rotary.pairing == Pairing::halves
                            ? norm_gradient_kernel<Element, Pairing::halves>(plan, args.call.over)
                            : norm_gradient_kernel<Element, Pairing::interleaved>(plan, args.call.over);
    launch_overlapping(kernel, dim3(plan.q_blocks + plan.k_blocks), plan.block_threads, stream, launch);
}

extern template void launch_qk_norm_rotary_gradient<double>(const QkNormRotaryGradientArgs&,
                                                            const QkNormRotaryGradientPlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_gradient<float>(const QkNormRotaryGradientArgs&,
                                                           const QkNormRotaryGradientPlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_gradient<cutlass::half_t>(const QkNormRotaryGradientArgs&,
                                                                     const QkNormRotaryGradientPlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_gradient<cutlass::bfloat16_t>(const QkNormRotaryGradientArgs&,
                                                                         const QkNormRotaryGradientPlan&, cudaStream_t);

}  // namespace mrrope
