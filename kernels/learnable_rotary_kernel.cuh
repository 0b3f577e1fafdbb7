#pragma once

#include <cutlass/fast_math.h>

#include "device/column_sums.cuh"
#include "device/dependent_launch.cuh"
#include "device/head_fragment.cuh"
#include "device/phase_steps.cuh"
#include "device/staged_heads.cuh"
#include "head_split.h"
#include "learnable_rotary_map.h"
#include "learnable_rotary_plan.h"
#include "mrrope/learnable_rotary.h"

// The backward pass. y = a R(p f) x. With g the gradient of y and v = R(p f)^T g, for every pair:
//     dx = a v,    df = a * sum of p (v_2 x_1 - v_1 x_2),    da = sum of v . x.

namespace mrrope {

// Passed to the kernel by value.
struct LearnableRotaryLaunch {
    LearnableRotaryGradientArgs args;
    LearnableRotaryMap<cutlass::FastDivmod> map;
};

// Where one head of a token lies.
template <class Element>
struct LearnablePointers {
    const Element* in;
    const Element* gradient;
    Element* out;
    bool is_wanted;  // `out`

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
        is_wanted = view.out != nullptr;
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

// A thread's next item is loaded while this one is rotated.
template <class Element, int Vector, Pairing pairing>
__global__ void __launch_bounds__(learnable_block_threads, learnable_blocks_per_sm)
    learnable_gradient_kernel(const __grid_constant__ LearnableRotaryLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = typename Fragment::Wide;
    constexpr bool crosses_vectors = Layout::crosses_vectors;
    constexpr int HeadsPerThread = learnable_heads_per_thread;
    const LearnableRotaryArgs& call = launch.args.call;
    const RotaryArgs& args = call.rotary;
    const auto& map = launch.map;
    const LearnableRotaryPlan& plan = map.plan;
    const int half = args.rotary_dim / 2;
    const bool has_tail = args.rotary_dim < args.head_dim;
    // The same for all threads: in most calls the kind of a head decides nothing.
    const bool wants_all = (args.q.heads == 0 || args.q.out != nullptr) && (args.k.heads == 0 || args.k.out != nullptr);
    const LearnableBlock block = map.block(blockIdx.x);
    int slot, lane_of_pass;
    map.thread(slot, lane_of_pass, threadIdx.x);
    const Real direction = args.conjugate ? Real(-1) : Real(1);
    const uint64_t* table = call.packed_tables + int64_t{block.table} * (half + 1);
    // This block's row of partial sums.
    double* table_sums = launch.args.table_sums + (int64_t{block.number} * plan.tables + block.table) * (half + 1);
    LearnableSums<Real, Vector> sums;
    using Staged = StagedHeads<Fragment, 2 * HeadsPerThread, learnable_block_threads>;
    __shared__ Staged staged;  // heads, then their gradients
    // A thread's phase steps, and after the loop, in their place, its sums. No other thread has anything there.
    __shared__ union {
        PhaseStepsOfThreads<Vector, learnable_block_threads> phase_steps;
        double sums[Vector][learnable_block_threads];
    } of_threads;
    static_assert(sizeof of_threads.phase_steps == sizeof of_threads.sums);
    const auto pointers_to = [&](const LearnableItem& item, int j) {
        return LearnablePointers<Element>(launch.args, item, map.head(block.table, item.first_head + j));
    };

    CUTLASS_PRAGMA_NO_UNROLL
    for (int first_lane = 0; first_lane < plan.lanes; first_lane += plan.lanes_per_pass) {
        const Layout layout{first_lane + lane_of_pass, half};
        const int lanes = min(plan.lanes_per_pass, plan.lanes - first_lane);
        const bool active = slot < plan.slots && lane_of_pass < lanes;
        int64_t position = 0;
        const auto load_position_of = [&](const LearnableItem& item) {
            if (item.heads > 0) position = load_position(args.positions, 0, item.batch, item.token);
        };
        const auto stage = [&](const LearnableItem& item) {
            Staged::begin();
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < HeadsPerThread; ++j) {
                if (j >= item.heads) break;
                const LearnablePointers<Element> head = pointers_to(item, j);
                staged.copy(j, head.in, layout);
                staged.copy(HeadsPerThread + j, head.gradient, layout);
            }
        };
        uint32_t number = map.first_item(block, slot);
        LearnableItem item = active ? map.item_or_none(number) : LearnableItem{};
        pdl_wait();
        pdl_trigger();
        load_position_of(item);
        stage(item);
        sums.clear_frequencies();
        if (active) {
            of_threads.phase_steps.load(table, layout);
            const auto gain = static_cast<Real>(factor_of(table[half]));
            CUTLASS_PRAGMA_NO_UNROLL
            while (item.heads > 0) {
                number += map.item_step();
                const LearnableItem next = map.item_or_none(number);
                CosSin<Real> by[Vector];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < Vector; ++j) {
                    by[j] = scaled_cos_sin(phase_of(position, of_threads.phase_steps[j]), Real(1), -direction);
                }
                const double signed_position = static_cast<double>(direction) * static_cast<double>(position);
                load_position_of(next);
                Staged::wait();
                Fragment x[HeadsPerThread], rotated_gradient[HeadsPerThread];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < HeadsPerThread; ++j) {
                    if (j >= item.heads) break;
                    x[j] = staged.read(j);
                    rotated_gradient[j] = staged.read(HeadsPerThread + j);
                }
                stage(next);
                Real cross[Vector] = {};
                Real dot = 0;
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < HeadsPerThread; ++j) {
                    if (j >= item.heads) break;
                    Wide v = rotated_gradient[j].widened();
                    v.template rotate<crosses_vectors>(by);
                    Wide wide = x[j].widened();
                    Pair<Real> components[Vector];
                    wide.template for_each_pair<crosses_vectors>(
                        [&](int i, Real& a, Real& b) { components[i] = {a, b}; });
                    v.template for_each_pair<crosses_vectors>([&](int i, Real& a, Real& b) {
                        cross[i] += b * components[i].first - a * components[i].second;
                        dot += a * components[i].first + b * components[i].second;
                        a *= gain;
                        b *= gain;
                    });
                    x[j].narrow(v);
                    const LearnablePointers<Element> head = pointers_to(item, j);
                    if (wants_all || head.is_wanted) x[j].store(head.out, layout);
                }
                sums.add(signed_position, cross, dot);
                for (int j = 0; has_tail && j < item.heads; ++j) {
                    const LearnablePointers<Element> head = pointers_to(item, j);
                    if (wants_all || head.is_wanted)
                        copy_tail<Vector>(head.gradient, head.out, layout.lane, plan.lanes, args);
                }
                item = next;
            }
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Vector; ++j) sums.frequencies[j] *= static_cast<double>(gain);
        }
        // Summed over the slots in a fixed order: the result is deterministic.
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) of_threads.sums[j][threadIdx.x] = sums.frequencies[j];
        __syncthreads();
        for (int at = threadIdx.x; at < Vector * lanes; at += learnable_block_threads) {
            const int lane = at % lanes;
            double sum = 0;
            for (int i = 0; i < plan.slots; ++i) sum += of_threads.sums[at / lanes][i * plan.lanes_per_pass + lane];
            table_sums[Layout{first_lane + lane, half}.pair(at / lanes)] = sum;
        }
        __syncthreads();
    }
    constexpr int warps = learnable_block_threads / 32;
    double (&of_warps)[learnable_block_threads] = of_threads.sums[0];
    const double of_warp = sum_over_warp(sums.factor);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = of_warp;
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int i = 0; i < warps; ++i) sum += of_warps[i];
        table_sums[half] = sum;
    }
}

template <class Element, int Vector>
auto learnable_gradient_kernel_of(Pairing pairing) {
    return pairing == Pairing::halves ? pdl_kernel<learnable_gradient_kernel<Element, Vector, Pairing::halves>>
                                      : pdl_kernel<learnable_gradient_kernel<Element, Vector, Pairing::interleaved>>;
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_learnable_gradient(const LearnableRotaryLaunch& launch, cudaStream_t stream) {
    constexpr int full = full_vector(sizeof(Element));
    const LearnableRotaryPlan& plan = launch.map.plan;
    const Pairing pairing = launch.args.call.rotary.pairing;
    const auto kernel = plan.vector == full ? learnable_gradient_kernel_of<Element, full>(pairing)
                                            : learnable_gradient_kernel_of<Element, 1>(pairing);
    launch_with_pdl(kernel, dim3(plan.blocks()), learnable_block_threads, stream, launch);
}

extern template void launch_learnable_gradient<double>(const LearnableRotaryLaunch&, cudaStream_t);
extern template void launch_learnable_gradient<float>(const LearnableRotaryLaunch&, cudaStream_t);
extern template void launch_learnable_gradient<cutlass::half_t>(const LearnableRotaryLaunch&, cudaStream_t);
extern template void launch_learnable_gradient<cutlass::bfloat16_t>(const LearnableRotaryLaunch&, cudaStream_t);

}  // namespace mrrope
