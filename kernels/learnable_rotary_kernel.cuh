#pragma once

#include <cutlass/fast_math.h>

#include "device/dependent_launch.cuh"
#include "device/head_fragment.cuh"
#include "head_split.h"
#include "learnable_rotary_map.h"
#include "learnable_rotary_plan.h"
#include "mrrope/learnable_rotary_phase.h"

// y = a R(p f) x. With g the gradient of y and v = R(p f)^T g, for every pair:
//     dx = a v,    df = a * sum of p (v_2 x_1 - v_1 x_2),    da = sum of v . x.

namespace mrrope {

// Passed to the kernel by value. The forward pass has args.call only.
struct LearnableRotaryLaunch {
    LearnableRotaryGradientArgs args;
    LearnableRotaryMap<cutlass::FastDivmod> map;
};

__device__ inline double load_real(const void* values, DType dtype, int64_t i) {
    return dtype == DType::float64 ? static_cast<const double*>(values)[i]
                                   : static_cast<double>(static_cast<const float*>(values)[i]);
}

__device__ inline void store_real(void* values, DType dtype, int64_t i, double value) {
    if (dtype == DType::float64) {
        static_cast<double*>(values)[i] = value;
    } else {
        static_cast<float*>(values)[i] = static_cast<float>(value);
    }
}

// Adds the values of a warp's threads, always in the same order; the sum is the first thread's.
__device__ inline double sum_over_warp(double value) {
    CUTLASS_PRAGMA_UNROLL
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    return value;
}

// Where one head of a token lies.
template <class Element>
struct LearnablePointers {
    const Element* in;
    const Element* gradient;
    Element* out;

    __device__ LearnablePointers(const LearnableRotaryGradientArgs& args, const LearnableItem& item,
                                 const LearnableHead& head) {
        const HeadsView& view = head.is_q ? args.call.rotary.q : args.call.rotary.k;
        const RotatedGradient& rotated = head.is_q ? args.q : args.k;
        const auto offset = [&](const HeadStrides& strides) {
            return item.batch * strides.batch + item.token * strides.token + head.head * strides.head;
        };
        in = static_cast<const Element*>(view.in) + offset(view.in_strides);
        gradient = static_cast<const Element*>(rotated.data) + offset(rotated.strides);
        out = static_cast<Element*>(view.out) + offset(view.out_strides);
    }
};

// A block's memory in one pass: first the phase steps, pair j of lane l at [j * lanes + l], then the sums of pair j of
// every thread.
template <int Vector>
union LearnableShared {
    uint64_t phase_steps[Vector * learnable_block_threads];
    double sums[Vector][learnable_block_threads];
};

// A thread's part of one table: the phase steps of its pairs, and the attention factor.
template <class Real, int Vector>
struct LearnablePairs {
    uint64_t phase_steps[Vector];
    Real gain;  // NaN where a frequency is none

    // Called by all threads. Each frequency is converted once per block: by every thread, the FP64 units of an SM would
    // be busy for 1000 cycles.
    template <class Layout>
    __device__ void load(LearnableShared<Vector>& shared, const LearnableRotaryArgs& args, int table, int first_lane,
                         int lanes, int lane) {
        const int half = args.rotary.rotary_dim / 2;
        const double factor = load_real(args.attention_factors, args.table_dtype, table);
        bool invalid = false;
        for (int at = threadIdx.x; at < Vector * lanes; at += learnable_block_threads) {
            const int pair = Layout{first_lane + at % lanes, half}.pair(at / lanes);
            const double frequency = load_real(args.frequencies, args.table_dtype, int64_t{table} * half + pair);
            const bool valid = is_frequency(frequency);
            shared.phase_steps[at] = valid ? phase_step_of(frequency) : 0;
            invalid = invalid || !valid;
        }
        gain = static_cast<Real>(__syncthreads_or(invalid) ? NAN : factor);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) phase_steps[j] = shared.phase_steps[j * lanes + min(lane, lanes - 1)];
        __syncthreads();
    }

    __device__ void cos_sin(CosSin<Real> (&by)[Vector], int64_t position, Real scale, Real direction) const {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) by[j] = scaled_cos_sin(phase_of(position, phase_steps[j]), scale, direction);
    }
};

// The gradients of a thread's pairs. A token's float sums are exact enough; sums over tokens are not.
template <class Real, int Vector>
struct LearnableSums {
    double frequencies[Vector];
    double factor = 0;

    __device__ void clear_frequencies() {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) frequencies[j] = 0;
    }

    __device__ void add(double position, const Real (&cross)[Vector], Real dot) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) frequencies[j] += position * static_cast<double>(cross[j]);
        factor += static_cast<double>(dot);
    }
};

template <int Vector, class Element>
__device__ void copy_tail(const Element* in, Element* out, int lane, int lanes, const RotaryArgs& args) {
    using Stored = cutlass::AlignedArray<Element, Vector>;
    for (int at = first_tail_component<Vector>(lane, args.rotary_dim); at < args.head_dim;
         at += tail_step<Vector>(lanes)) {
        *reinterpret_cast<Stored*>(out + at) = *reinterpret_cast<const Stored*>(in + at);
    }
}

template <class Element, int Vector, Pairing pairing, bool gradient>
__global__ void __launch_bounds__(learnable_block_threads, learnable_blocks_per_sm(gradient, compiled_for_pdl))
    learnable_rotary_kernel(const __grid_constant__ LearnableRotaryLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = typename Fragment::Wide;
    constexpr int HeadsPerThread = learnable_heads_per_thread;
    const LearnableRotaryArgs& call = launch.args.call;
    const RotaryArgs& args = call.rotary;
    const auto& map = launch.map;
    const LearnableRotaryPlan& plan = map.plan;
    const int half = args.rotary_dim / 2;
    const bool writes = (args.q.heads > 0 ? args.q : args.k).out != nullptr;
    const bool copies_tail = writes && args.rotary_dim < args.head_dim;
    const LearnableBlock block = map.block(blockIdx.x);
    int slot, lane_of_pass;
    map.thread(slot, lane_of_pass, threadIdx.x);
    const Real direction = args.conjugate ? Real(-1) : Real(1);
    // This block's row of partial sums.
    double* table_sums = launch.args.table_sums + (int64_t{block.number} * plan.tables + block.table) * (half + 1);
    LearnableSums<Real, Vector> sums;
    __shared__ LearnableShared<Vector> shared;
    const auto pointers_to = [&](const LearnableItem& item, int j) {
        return LearnablePointers<Element>(launch.args, item, map.head(block.table, item.first_head + j));
    };
    // The first item, while frequencies are converted.
    const auto prefetch = [&](const Layout& layout) {
        const uint32_t number = map.first_item(block, slot);
        if (number >= map.items) return;
        const LearnableItem item = map.item(number);
        for (int j = 0; j < item.heads; ++j) {
            const LearnablePointers<Element> head = pointers_to(item, j);
            prefetch_l2(head.in + layout.first());
            prefetch_l2(head.in + layout.second());
            if constexpr (gradient) {
                prefetch_l2(head.gradient + layout.first());
                prefetch_l2(head.gradient + layout.second());
            }
        }
    };
    pdl_wait();
    pdl_trigger();

    CUTLASS_PRAGMA_NO_UNROLL
    for (int first_lane = 0; first_lane < plan.lanes; first_lane += plan.lanes_per_pass) {
        const Layout layout{first_lane + lane_of_pass, half};
        const int lanes = min(plan.lanes_per_pass, plan.lanes - first_lane);
        const bool active = slot < plan.slots && lane_of_pass < lanes;
        if (active) prefetch(layout);
        LearnablePairs<Real, Vector> pairs;
        pairs.template load<Layout>(shared, call, block.table, first_lane, lanes, lane_of_pass);
        if constexpr (gradient) sums.clear_frequencies();
        if (active) {
            CUTLASS_PRAGMA_NO_UNROLL
            for (uint32_t number = map.first_item(block, slot); number < map.items; number += map.item_step()) {
                const LearnableItem item = map.item(number);
                const auto pointers = [&](int j) { return pointers_to(item, j); };
                const int64_t position = load_position(args.positions, 0, item.batch, item.token);
                Fragment x[HeadsPerThread];
                Fragment rotated_gradient[gradient ? HeadsPerThread : 1];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < HeadsPerThread; ++j) {
                    if (j >= item.heads) break;
                    x[j].load(pointers(j).in, layout);
                    if constexpr (gradient) rotated_gradient[j].load(pointers(j).gradient, layout);
                }
                CosSin<Real> by[Vector];
                if constexpr (gradient) {
                    pairs.cos_sin(by, position, Real(1), -direction);
                    Real cross[Vector] = {};
                    Real dot = 0;
                    CUTLASS_PRAGMA_UNROLL
                    for (int j = 0; j < HeadsPerThread; ++j) {
                        if (j >= item.heads) break;
                        Wide v = rotated_gradient[j].widened();
                        v.template rotate<Layout::crosses_vectors>(by);
                        Wide wide = x[j].widened();
                        Pair<Real> components[Vector];
                        wide.template for_each_pair<Layout::crosses_vectors>(
                            [&](int i, Real& a, Real& b) { components[i] = {a, b}; });
                        v.template for_each_pair<Layout::crosses_vectors>([&](int i, Real& a, Real& b) {
                            cross[i] += b * components[i].first - a * components[i].second;
                            dot += a * components[i].first + b * components[i].second;
                            a *= pairs.gain;
                            b *= pairs.gain;
                        });
                        x[j].narrow(v);
                        if (writes) x[j].store(pointers(j).out, layout);
                    }
                    sums.add(static_cast<double>(direction) * position, cross, dot);
                } else {
                    pairs.cos_sin(by, position, pairs.gain, direction);
                    CUTLASS_PRAGMA_UNROLL
                    for (int j = 0; j < HeadsPerThread; ++j) {
                        if (j >= item.heads) break;
                        x[j].template rotate<Layout::crosses_vectors>(by);
                        x[j].store(pointers(j).out, layout);
                    }
                }
                if (!copies_tail) continue;
                CUTLASS_PRAGMA_NO_UNROLL
                for (int j = 0; j < item.heads; ++j) {
                    copy_tail<Vector>(gradient ? pointers(j).gradient : pointers(j).in, pointers(j).out, layout.lane,
                                      plan.lanes, args);
                }
            }
            if constexpr (gradient) {
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < Vector; ++j) sums.frequencies[j] *= static_cast<double>(pairs.gain);
            }
        }
        if constexpr (gradient) {
            // Summed over the slots in a fixed order: the result is deterministic.
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Vector; ++j) shared.sums[j][threadIdx.x] = sums.frequencies[j];
            __syncthreads();
            for (int at = threadIdx.x; at < Vector * lanes; at += learnable_block_threads) {
                const int lane = at % lanes;
                double sum = 0;
                for (int i = 0; i < plan.slots; ++i) sum += shared.sums[at / lanes][i * plan.lanes_per_pass + lane];
                table_sums[Layout{first_lane + lane, half}.pair(at / lanes)] = sum;
            }
            __syncthreads();
        }
    }
    if constexpr (gradient) {
        constexpr int warps = learnable_block_threads / 32;
        __shared__ double of_warps[warps];
        const double of_warp = sum_over_warp(sums.factor);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
        __syncthreads();
        if (threadIdx.x == 0) {
            double sum = 0;
            for (int i = 0; i < warps; ++i) sum += of_warps[i];
            table_sums[half] = sum;
        }
    }
}

template <class Element, bool gradient>
auto learnable_kernel(int vector, Pairing pairing) {
    constexpr int full = access_bytes / sizeof(Element);
    const bool halves = pairing == Pairing::halves;
    if (vector == full) {
        return halves ? pdl_kernel<learnable_rotary_kernel<Element, full, Pairing::halves, gradient>>
                      : pdl_kernel<learnable_rotary_kernel<Element, full, Pairing::interleaved, gradient>>;
    }
    return halves ? pdl_kernel<learnable_rotary_kernel<Element, 1, Pairing::halves, gradient>>
                  : pdl_kernel<learnable_rotary_kernel<Element, 1, Pairing::interleaved, gradient>>;
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_learnable_rotary(const LearnableRotaryLaunch& launch, bool gradient, cudaStream_t stream) {
    const LearnableRotaryPlan& plan = launch.map.plan;
    const Pairing pairing = launch.args.call.rotary.pairing;
    const auto kernel = gradient ? learnable_kernel<Element, true>(plan.vector, pairing)
                                 : learnable_kernel<Element, false>(plan.vector, pairing);
    launch_with_pdl(kernel, dim3(plan.blocks()), learnable_block_threads, stream, launch);
}

extern template void launch_learnable_rotary<double>(const LearnableRotaryLaunch&, bool, cudaStream_t);
extern template void launch_learnable_rotary<float>(const LearnableRotaryLaunch&, bool, cudaStream_t);
extern template void launch_learnable_rotary<cutlass::half_t>(const LearnableRotaryLaunch&, bool, cudaStream_t);
extern template void launch_learnable_rotary<cutlass::bfloat16_t>(const LearnableRotaryLaunch&, bool, cudaStream_t);

}  // namespace mrrope
