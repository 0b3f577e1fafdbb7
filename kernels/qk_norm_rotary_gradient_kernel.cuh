#pragma once

#include <cutlass/fast_math.h>

#include <type_traits>
#include <variant>

#include "device/column_sums.cuh"
#include "device/dependent_launch.cuh"
#include "device/phase_steps.cuh"
#include "device/rms_norm.cuh"
#include "device/staged_heads.cuh"
#include "head_split.h"
#include "qk_norm_rotary_map.h"
#include "qk_norm_rotary_plan.h"
#include "with_constant.h"

// With r the inverse root mean square of x, w the weights and v the gradient rotated back:
//     dx = r * (v * w) - x * r^3 * mean(v * w * x)    and    dw = x * r * v, summed.

namespace mrrope {

// Passed to the kernel by value.
template <class Real>
struct QkNormRotaryGradientLaunch {
    QkNormRotaryGradientArgs args;
    NormConstants<Real> constants;
    QkNormRotaryGradientMap<cutlass::FastDivmod> map;
};

// What a block of q or of k reads and writes.
template <class Element>
struct GradientView {
    NormView<Element> view;
    const Element* gradient;
    HeadStrides gradient_strides;
    RealOf<Element>* weight_sums;  // this block's row of partial sums; nullptr: not wanted
    NormGradientBlock block;

    template <class Launch>
    __device__ explicit GradientView(const Launch& launch) : view(launch.args.call, launch.map.block(blockIdx.x).is_q) {
        const OutputGradient& output_gradient = view.is_q ? launch.args.q : launch.args.k;
        block = launch.map.block(blockIdx.x);
        gradient = static_cast<const Element*>(output_gradient.data);
        gradient_strides = output_gradient.strides;
        weight_sums = static_cast<RealOf<Element>*>(output_gradient.weight_sums);
        if (weight_sums != nullptr) weight_sums += block.block * launch.args.call.weight_count(view.is_q);
    }
};

// The scalars of a row's gradient, from its two sums.
template <class Real>
struct RowGradient {
    Real scale;    // r
    Real along_x;  // r^3 * mean(v * w * x)

    __device__ RowGradient(const NormConstants<Real>& constants, Real squares, Real products, bool is_q) {
        scale = constants.inverse_rms(squares, is_q);
        // Multiplied in this order, so that no intermediate of a very large or small row leaves float32's range.
        along_x = scale * products * scale * (is_q ? constants.q_inverse_size : constants.k_inverse_size) * scale;
    }
};

// 16 bytes at a time. Single components, 32 bytes apart in a warp's store, cost 12 us per backward pass over 32 + 32
// heads on an H200.
template <class Real, int Vector>
__device__ void store_vectors(Real* to, const cutlass::Array<Real, Vector>& values) {
    using Stored = cutlass::AlignedArray<Real, 16 / sizeof(Real)>;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < Vector; first += Stored::kElements) {
        Stored part;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Stored::kElements; ++i) part[i] = values[first + i];
        *reinterpret_cast<Stored*>(to + first) = part;
    }
}

// A thread holds two vectors of two heads and of their gradients, all of q or all of k. Over a head, each team of a
// block takes one group of heads at a time; over all heads, the block takes one token at a time, whose cos/sin its
// threads share unless there are head tables.
//
// needs_lookup: tokens may differ in their tables, and pairs in their positions. Otherwise a lane over a head has the
// same phase steps in every row, and keeps them: the loop has a third of its instructions less. 8192 tokens of 32/8
// heads took 120 us forward and backward on an H200 with that alone, not 124. Over all heads it gains nothing, and is
// not instantiated.
template <class Element, Pairing pairing, NormOver over, bool shares_cos_sin, bool needs_lookup>
__global__ void __launch_bounds__(norm_gradient_threads_per_sm(over, shares_cos_sin))
    qk_norm_rotary_gradient_kernel(const __grid_constant__ QkNormRotaryGradientLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = 16 / sizeof(Element);
    constexpr int HeadsPerThread = norm_heads_per_thread_with_lookup;
    constexpr bool over_head = over == NormOver::head;
    static_assert(over_head || needs_lookup);
    constexpr int weight_sets = over_head ? 1 : HeadsPerThread;
    using Lane = WholeHeadLayout<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    const RotaryArgs& args = launch.args.call.rotary;
    const GradientView<Element> mine(launch);
    const NormView<Element>& view = mine.view;
    const NormGradientThread thread = launch.map.template thread<over>(mine.block, threadIdx.x);
    const Lane lane(thread.lane, args.rotary_dim / 2);
    const Real direction = args.conjugate ? Real(1) : Real(-1);
    pdl_wait();
    pdl_trigger();

    // The row that this thread works on. Its next one is rows_per_step further.
    const int64_t rows_per_step = static_cast<int64_t>(mine.block.blocks) * thread.slots;
    int64_t first_row = static_cast<int64_t>(mine.block.block) * thread.slots;
    NormGradientRow row = launch.map.template row<over>(mine.block, thread, first_row);
    StridedHeads heads = launch.map.heads_of(mine.block, row.group);
    // The next row is loaded while this one is rotated, reduced and written. Loaded to registers instead, as they
    // become free, 8192 tokens of 32/8 heads take 121 us forward and backward on an H200, not 110.
    constexpr int max_threads = over_head ? norm_gradient_block_threads : norm_gradient_max_block_threads;
    using Staged = StagedHeads<Fragment, 2 * HeadsPerThread, max_threads>;  // heads, then their gradients
    __shared__ Staged staged;
    const auto has_head = [&](int j) { return row.active && heads.exists(j); };
    const auto stage_row = [&] {
        Staged::begin();
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (!has_head(j)) continue;
            const int64_t head = offset_of(view.in_strides, row.batch, row.token, heads.head(j));
            const int64_t gradient = offset_of(mine.gradient_strides, row.batch, row.token, heads.head(j));
            staged.copy(j, view.in + head, lane);
            staged.copy(HeadsPerThread + j, mine.gradient + gradient, lane);
        }
    };
    stage_row();

    // Over a head, the angles of the next row are loaded ahead, too: all but the positions of a lookup.
    constexpr bool keeps_steps = over_head && !needs_lookup;
    __shared__ std::conditional_t<keeps_steps, PhaseStepsOfThreads<Vector, max_threads>, std::monostate> steps;
    int64_t position = 0;
    Real gain = 1;
    if constexpr (keeps_steps) {
        steps.load(args.table, lane);
        if (lane.rotates()) gain = static_cast<Real>(factor_of(args.table[args.rotary_dim / 2]));
    }
    LaneAngles<Element, Lane, Vector, true> angles;
    const auto load_angles = [&] {
        if constexpr (keeps_steps) {
            if (row.active && lane.rotates()) position = load_position(args.positions, 0, row.batch, row.token);
        } else if constexpr (!shares_cos_sin) {
            angles.load_index(args, row.batch, row.token);
            angles.load_steps(args, lane, heads.table);
        }
    };
    if (over_head && first_row < thread.rows) load_angles();
    // Shared cos/sin: the next row's are computed while this row's are in use.
    __shared__ std::conditional_t<shares_cos_sin, SharedCosSin<Element, Vector>, std::monostate> shared_cos_sin[2];
    [[maybe_unused]] int current = 0;
    const auto share_cos_sin = [&](int number) {
        if constexpr (shares_cos_sin) {
            shared_cos_sin[number].template compute<needs_lookup>(args, row.batch, row.token, direction);
        }
    };
    if constexpr (shares_cos_sin) {
        if (first_row < thread.rows) share_cos_sin(current);
        __syncthreads();
    }

    const auto load_weights = [&](Fragment& weights, int64_t head) {
        weights.load(view.weight + head * args.head_dim, lane);
    };
    // With a lookup, one set of weights that is kept would spill, too.
    constexpr bool keeps_weights = over_head && !needs_lookup;
    Fragment weights[weight_sets];
    if constexpr (keeps_weights) load_weights(weights[0], 0);
    const auto weight_of = [&](int j) {
        if constexpr (over_head && !keeps_weights) load_weights(weights[0], 0);
        return with_offset</*skips_zero=*/!over_head>(weights[over_head ? 0 : j], launch.constants.weight_offset);
    };
    Wide weight_gradients[weight_sets];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < weight_sets; ++j) weight_gradients[j] = Wide{};

    CUTLASS_PRAGMA_NO_UNROLL
    while (first_row < thread.rows) {
        if constexpr (!over_head) {
            load_angles();
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < weight_sets; ++j) {
                weights[j] = Fragment{};
                if (has_head(j)) load_weights(weights[j], heads.head(j));
            }
        }
        CosSin<Real> by[Vector];
        if constexpr (shares_cos_sin) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                by[i] = lane.rotates() ? shared_cos_sin[current][lane.pair(i)] : CosSin<Real>{1, 0};
            }
        } else if constexpr (keeps_steps) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) by[i] = cos_sin_at<Element>(position, steps[i], gain, direction);
        } else {
            angles.load_positions(args, lane, row.batch, row.token, heads.table);  // ahead, they would spill
            angles.compute(by, lane, direction);
        }
        QueryFactors<Real, HeadsPerThread> query_factors;
        const bool has_query_factors =
            needs_lookup && !shares_cos_sin && view.is_q && args.choice.query_factors != nullptr;
        if (has_query_factors) {
            query_factors.load(args.choice, table_offset(args.choice, row.batch, row.token),
                               [&](int j) { return has_head(j) ? heads.head(j) : -1; });
        }
        Element* out = view.out + offset_of(view.out_strides, row.batch, row.token, heads.first);
        const int heads_left = row.active ? heads.end - heads.first : 0;  // heads.step is the same in every row
        Staged::wait();
        Fragment x[HeadsPerThread], output_gradient[HeadsPerThread];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            x[j] = has_head(j) ? staged.read(j) : Fragment{};
            output_gradient[j] = has_head(j) ? staged.read(HeadsPerThread + j) : Fragment{};
        }
        first_row += rows_per_step;
        row = launch.map.template row<over>(mine.block, thread, first_row);
        heads = launch.map.heads_of(mine.block, row.group);
        stage_row();
        if (over_head && first_row < thread.rows) load_angles();

        Real sums[2 * HeadsPerThread];  // of squares, and of products
        Wide rotated[HeadsPerThread];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            rotated[j] = output_gradient[j].widened();
            rotated[j].template rotate<Lane::crosses_vectors>(by);
            if (has_query_factors && lane.rotates()) rotated[j].scale(query_factors.of_head[j]);
            const Wide wide = x[j].widened();
            const Wide weight = weight_of(j);
            Wide weighted;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                weighted.first[i] = rotated[j].first[i] * weight.first[i];
                weighted.second[i] = rotated[j].second[i] * weight.second[i];
            }
            sums[2 * j] = sum_of_products(wide, wide);
            sums[2 * j + 1] = sum_of_products(weighted, wide);
        }
        if (shares_cos_sin && first_row < thread.rows) {
            current = 1 - current;
            share_cos_sin(current);  // seen by all after the sum over the block
        }
        if constexpr (over_head) {
            sum_over_team(sums, launch.map.plan.team);
        } else {
            Real all[2] = {sums[0] + sums[2], sums[1] + sums[3]};
            sum_over_block(all);
            sums[0] = sums[2] = all[0];
            sums[1] = sums[3] = all[1];
        }

        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (j * heads.step >= heads_left) break;
            const RowGradient<Real> of_row(launch.constants, sums[2 * j], sums[2 * j + 1], view.is_q);
            const Wide wide = x[j].widened();
            const Wide weight = weight_of(j);
            Wide& weight_gradient = weight_gradients[over_head ? 0 : j];
            Wide result;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                const Real first = of_row.scale * rotated[j].first[i];
                const Real second = of_row.scale * rotated[j].second[i];
                weight_gradient.first[i] += first * wide.first[i];
                weight_gradient.second[i] += second * wide.second[i];
                result.first[i] = first * weight.first[i] - of_row.along_x * wide.first[i];
                result.second[i] = second * weight.second[i] - of_row.along_x * wide.second[i];
            }
            Fragment narrow;
            narrow.narrow(result);
            narrow.store(out + j * heads.step * view.out_strides.head, lane);
        }
    }

    if (mine.weight_sums == nullptr) return;
    if constexpr (over_head) {
        // Summed in a fixed order: the result is deterministic.
        __shared__ Real of_slots[norm_gradient_block_threads * 2 * Vector];
        if (thread.has_lane) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                of_slots[thread.slot * args.head_dim + lane.first() + i] = weight_gradients[0].first[i];
                of_slots[thread.slot * args.head_dim + lane.second() + i] = weight_gradients[0].second[i];
            }
        }
        __syncthreads();
        for (int at = threadIdx.x; at < args.head_dim; at += norm_gradient_block_threads) {
            Real sum = 0;
            for (int other = 0; other < thread.slots; ++other) sum += of_slots[other * args.head_dim + at];
            mine.weight_sums[at] = sum;
        }
    } else {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (!thread.has_lane || !heads.exists(j)) break;
            Real* of_head = mine.weight_sums + int64_t{heads.head(j)} * args.head_dim;
            store_vectors(of_head + lane.first(), weight_gradients[j].first);
            store_vectors(of_head + lane.second(), weight_gradients[j].second);
        }
    }
}

// Any shape and pairing, in two passes over each of a block's rows. A component always belongs to the same thread, so
// the weight sums need no atomics.
template <class Element>
__global__ void __launch_bounds__(norm_row_block_threads, norm_row_min_blocks_per_sm)
    qk_norm_rotary_gradient_row_kernel(const __grid_constant__ QkNormRotaryGradientLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    const RotaryArgs& args = launch.args.call.rotary;
    const GradientView<Element> mine(launch);
    const NormView<Element>& view = mine.view;
    const bool over_head = launch.args.call.over == NormOver::head;
    const int heads = over_head ? 1 : view.heads;
    const int64_t rows = static_cast<int64_t>(launch.map.all_tokens) * (over_head ? view.heads : 1);
    const int half = args.rotary_dim / 2;
    const int tail = args.head_dim - args.rotary_dim;
    const Real direction = args.conjugate ? Real(1) : Real(-1);
    pdl_wait();
    pdl_trigger();

    if (mine.weight_sums != nullptr) {
        for (int at = threadIdx.x; at < heads * args.head_dim; at += norm_row_block_threads) mine.weight_sums[at] = 0;
        __syncthreads();
    }
    for (int64_t row = mine.block.block; row < rows; row += mine.block.blocks) {
        const auto [batch, token, is_q, first_head] = launch.map.row(mine.block, row);
        const Element* in = view.in + offset_of(view.in_strides, batch, token, first_head);
        const Element* output_gradient = mine.gradient + offset_of(mine.gradient_strides, batch, token, first_head);
        Element* out = view.out + offset_of(view.out_strides, batch, token, first_head);

        // Calls f(head, component, v) for every component of this thread.
        const auto for_each_component = [&](auto&& f) {
            const auto gradient_at = [&](int head, int at) {
                return static_cast<Real>(output_gradient[head * mine.gradient_strides.head + at]);
            };
            for_each_row_pair(threadIdx.x, heads, half, [&](int head, int pair) {
                const RowPair lane{args.pairing, pair, half};
                const Pair<Real> v = rotated_pair<Element>(
                    args, lane, {gradient_at(head, lane.first()), gradient_at(head, lane.second())}, view.is_q,
                    view.heads, batch, token, first_head + head, direction);
                f(head, lane.first(), v.first);
                f(head, lane.second(), v.second);
            });
            for_each_row_tail(threadIdx.x, heads, args.rotary_dim, tail,
                              [&](int head, int at) { f(head, at, gradient_at(head, at)); });
        };
        const auto x_at = [&](int head, int at) { return static_cast<Real>(in[head * view.in_strides.head + at]); };
        const auto weight_at = [&](int head, int at) {
            return static_cast<Real>(view.weight[static_cast<int64_t>(head) * args.head_dim + at]) +
                   launch.constants.weight_offset;
        };
        Real sums[2] = {0, 0};
        for_each_component([&](int head, int at, Real v) {
            const Real x = x_at(head, at);
            sums[0] += x * x;
            sums[1] += v * weight_at(head, at) * x;
        });
        sum_over_block(sums);
        const RowGradient<Real> of_row(launch.constants, sums[0], sums[1], view.is_q);
        for_each_component([&](int head, int at, Real v) {
            const Real x = x_at(head, at);
            if (mine.weight_sums != nullptr) mine.weight_sums[head * args.head_dim + at] += of_row.scale * v * x;
            out[head * view.out_strides.head + at] =
                static_cast<Element>(of_row.scale * v * weight_at(head, at) - of_row.along_x * x);
        });
    }
}

// Passed to the kernel by value.
struct WeightSumLaunch {
    struct Part {
        const void* sums;
        void* weights;  // nullptr: not wanted
        int64_t count;
        int rows;
    };
    Part q;
    Part k;
    int q_blocks;
};

template <class Element>
inline constexpr int weights_per_block = columns_per_block<RealOf<Element>>;

// Adds the rows of partial sums of q and of k.
template <class Element, int block_threads>
__global__ void __launch_bounds__(block_threads) weight_sum_kernel(const __grid_constant__ WeightSumLaunch launch) {
    const bool is_q = static_cast<int>(blockIdx.x) < launch.q_blocks;
    const WeightSumLaunch::Part& part = is_q ? launch.q : launch.k;
    const int64_t first = int64_t{weights_per_block<Element>} * (is_q ? blockIdx.x : blockIdx.x - launch.q_blocks);
    const auto columns = static_cast<int>(min(int64_t{weights_per_block<Element>}, part.count - first));
    pdl_wait();
    pdl_trigger();
    const double sum = sum_of_column<block_threads>(static_cast<const RealOf<Element>*>(part.sums) + first, columns,
                                                    part.rows, part.count);
    const auto column = static_cast<int>(threadIdx.x);
    if (column >= columns) return;
    static_cast<Element*>(part.weights)[first + column] = static_cast<Element>(static_cast<RealOf<Element>>(sum));
}

// No rows add up to 0.
template <class Element>
void launch_weight_sums(const QkNormRotaryGradientArgs& args, const WeightSumRows& rows, cudaStream_t stream) {
    const auto part_of = [&](bool is_q) {
        const OutputGradient& gradient = is_q ? args.q : args.k;
        return WeightSumLaunch::Part{gradient.weight_sums, gradient.weights, args.call.weight_count(is_q),
                                     static_cast<int>(is_q ? rows.q : rows.k)};
    };
    const auto blocks_of = [](const WeightSumLaunch::Part& part) {
        return part.weights == nullptr ? 0 : static_cast<int>(ceil_div(part.count, weights_per_block<Element>));
    };
    WeightSumLaunch launch{part_of(true), part_of(false), 0};
    launch.q_blocks = blocks_of(launch.q);
    const int blocks = launch.q_blocks + blocks_of(launch.k);
    if (blocks == 0) return;
    const auto launch_in_blocks_of = [&]<int block_threads> {
        launch_with_pdl(pdl_kernel<weight_sum_kernel<Element, block_threads>>, dim3(blocks), block_threads, stream,
                        launch);
    };
    if (args.call.over == NormOver::head) {
        launch_in_blocks_of.template operator()<column_sum_block_threads>();
    } else {
        constexpr bool is_16_bit = sizeof(Element) == 2;  // others have one kernel
        launch_in_blocks_of.template operator()<is_16_bit ? many_column_sum_block_threads : column_sum_block_threads>();
    }
}

template <class Element>
auto norm_gradient_kernel(const QkNormRotaryArgs& args, const QkNormRotaryGradientPlan& plan) {
    using Kernel = PdlKernel<QkNormRotaryGradientLaunch<RealOf<Element>>>;
    if (!plan.in_registers) return Kernel{pdl_kernel<qk_norm_rotary_gradient_row_kernel<Element>>};
    return with_constant<Pairing::halves, Pairing::interleaved>(args.rotary.pairing, [&]<Pairing pairing> {
        return with_constant<NormOver::head, NormOver::all_heads>(args.over, [&]<NormOver over> {
            return with_constant<false, true>(plan.shares_cos_sin, [&]<bool shares_cos_sin> {
                return with_constant<false, true>(plan.needs_lookup, [&]<bool needs_lookup>() -> Kernel {
                    if constexpr (has_norm_gradient_kernel(sizeof(Element), pairing, over, shares_cos_sin,
                                                           needs_lookup)) {
                        return pdl_kernel<
                            qk_norm_rotary_gradient_kernel<Element, pairing, over, shares_cos_sin, needs_lookup>>;
                    }
                    throw std::logic_error("mrrope: no kernel differentiates norms by this plan");
                });
            });
        });
    });
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_qk_norm_rotary_gradient(const QkNormRotaryGradientArgs& args, const QkNormRotaryGradientPlan& plan,
                                    cudaStream_t stream) {
    const RotaryArgs& rotary = args.call.rotary;
    if (rotary.batch == 0 || rotary.tokens == 0 || rotary.q.heads + rotary.k.heads == 0) {
        return launch_weight_sums<Element>(args, {}, stream);
    }
    const QkNormRotaryGradientLaunch<RealOf<Element>> launch{
        .args = args,
        .constants = NormConstants<RealOf<Element>>(args.call),
        .map = QkNormRotaryGradientMap<cutlass::FastDivmod>::of(plan, shape_of(args)),
    };
    launch_with_pdl(norm_gradient_kernel<Element>(args.call, plan), dim3(plan.q_blocks + plan.k_blocks),
                    plan.block_threads, stream, launch);
    launch_weight_sums<Element>(args, {plan.q_blocks, plan.k_blocks}, stream);
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
