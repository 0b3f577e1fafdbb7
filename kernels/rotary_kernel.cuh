#pragma once

#include <cutlass/fast_math.h>

#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "device/dependent_launch.cuh"
#include "device/head_fragment.cuh"
#include "device/table_choice.cuh"
#include "rotary_map.h"
#include "rotary_plan.h"
#include "rotary_schedule.h"

namespace mrrope {

// Passed to the kernel by value.
struct RotaryLaunch {
    RotaryArgs args;
    RotaryMap<cutlass::FastDivmod> map;
    HeadGroupsMap<cutlass::FastDivmod> head_groups;
    int threads;
    bool copies_tail;
    bool keeps_strides;  // each output has its input's strides
    // Prefetch distance of positions.
    int tokens_ahead;
    int64_t bytes_ahead;
};

template <Pairing pairing, int Vector, bool whole_heads>
using LayoutOf = std::conditional_t<whole_heads, WholeHeadLayout<pairing, Vector>, LaneLayout<pairing, Vector>>;

// Where the head of q or k that starts at `in` goes, if outputs have the strides of inputs.
template <class Element>
__device__ Element* output_at_distance(const RotaryArgs& args, const Element* in, bool is_q) {
    const HeadsView& view = is_q ? args.q : args.k;
    const int64_t distance = static_cast<char*>(view.out) - static_cast<const char*>(view.in);
    return reinterpret_cast<Element*>(reinterpret_cast<int64_t>(in) + distance);
}

// A thread takes one vector from each half of HeadsPerThread neighbouring heads of one token: up to 16 bytes per
// load, all in flight while it computes the Vector cos/sin that those heads share. Heads further apart would cost 9 %
// at 512 tokens and 2 % at 8192 on an H200. Loads issued before griddepcontrol.wait are speculative; their values are
// re-read after it. The order of events is explained in rotary_schedule.h.
//
// tokens_inside: neighbouring threads take neighbouring tokens before other heads; a run-time choice would cost 256
// tokens 4 %.
//
// whole_heads: further lanes copy the tail, so that neighbouring threads access whole heads. Otherwise the lanes copy
// it in a loop after the rotation, one vector at a time.
//
// is_per_head: there are several head tables, and a thread's heads are all of one, or factors of query heads. A
// run-time choice costs 1 token 0.07 us and 8192 tokens 3 %.
//
// Single components: for every shape and lookup, position rows or not.
template <class Element, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup, bool is_per_head,
          bool whole_heads, bool tokens_inside>
__global__ void __launch_bounds__(rotary_block_threads,
                                  rotary_min_blocks_per_sm(HeadsPerThread, whole_heads, is_per_head,
                                                           lookup == TableLookup::position_rows))
    rotary_kernel(const __grid_constant__ RotaryLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LayoutOf<pairing, Vector, whole_heads>;
    using Trigger = RotarySchedule::Trigger;
    constexpr RotarySchedule schedule = rotary_schedule(lookup, HeadsPerThread, compiled_for_pdl);
    constexpr bool has_choice = lookup != TableLookup::single;
    constexpr bool has_rows = lookup == TableLookup::position_rows;
    // Threads of much work are bound by instructions, and save those of addresses: 8192 x 32/8 by head take 44.6 us on
    // an H200, not 45.7, with positions of their own 35.7, not 38.4. Others are not: 64 x 9/3 would take 1.44 us,
    // not 1.37.
    constexpr bool saves_instructions = HeadsPerThread >= 3 || has_rows;
    using Pointers = HeadPointers<Element, std::conditional_t<saves_instructions, uint32_t, int64_t>>;
    const RotaryArgs& args = launch.args;
    const int thread = blockIdx.x * rotary_block_threads + threadIdx.x;
    auto [lane, group, batch, token] = launch.map.template place<tokens_inside>(thread);

    HeadsOfTable heads_of_table{0, args.q.heads, args.k.heads};
    if constexpr (is_per_head) heads_of_table = launch.head_groups.table_of(group);
    const HeadRange heads(group, HeadsPerThread, heads_of_table.count());
    const int half = args.rotary_dim / 2;
    const Layout layout{lane, half};
    const PositionsView& positions = args.positions;
    const void* token_position = position_address(positions, 0, batch, token);
    const int32_t* token_index = nullptr;
    if constexpr (has_choice) token_index = index_address(args.choice, batch, token);
    uint32_t index = 0;
    if constexpr (schedule.speculates_index) {
        index = load_index_speculatively(args.choice, token_index, batch, thread < launch.threads);
    }
    const Element* in[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        in[j] = Pointers(args, heads_of_table, batch, token, heads.first + j).in;
    }
    const auto offset_of_table = [&](uint32_t index) {
        int64_t offset = table_offset(args.choice, index);
        if constexpr (is_per_head) offset += head_table_offset(args.choice, heads_of_table.table);
        return offset;
    };
    // Small launches are latency-bound, so all addresses are computed before the wait.
    const bool always_false = launch.threads < 0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        compute_before_wait(always_false, in[j] + layout.first());
        compute_before_wait(always_false, in[j] + layout.second());
    }
    compute_before_wait(always_false, token_position);
    if constexpr (has_choice && !schedule.speculates_index) {
        compute_before_wait(always_false, token_index);
    } else {
        compute_before_wait(always_false, args.table + offset_of_table(index) + layout.pair(0));
    }
    pdl_wait();
    if constexpr (schedule.trigger == Trigger::after_wait) {
        pdl_trigger();
    } else if constexpr (schedule.trigger == Trigger::after_wait_if_small) {
        if (launch.threads < RotarySchedule::small_launch_threads) pdl_trigger();
    }
    if (thread >= launch.threads) return;

    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    const auto load_heads = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (j < heads.count) fragments[j].load(in[j], layout);
        }
    };
    int64_t position = 0;
    if constexpr (!has_rows) position = load_position(positions, token_position);
    [[maybe_unused]] PositionRowsAhead positions_ahead;
    if constexpr (has_rows) positions_ahead.load(positions, token_position);
    if constexpr (has_choice && !schedule.speculates_index) index = load_index(args.choice, token_index, batch);
    if constexpr (schedule.loads_heads_before_table) {
        load_heads();
        __syncwarp();  // the compiler moves no load across it; exited threads need not arrive
    }
    const int64_t offset = offset_of_table(index);
    const uint64_t* table = args.table + offset;
    uint64_t steps[Vector];
    load_phase_steps(steps, table, layout);
    [[maybe_unused]] PairRows<Layout, Vector> rows;
    if constexpr (has_rows) {
        if (Vector > 1 || positions.row_of_pair != nullptr) {
            rows.load(positions.row_of_pair + offset, layout);
        } else {
            rows = {};
        }
    }
    uint64_t factor = table[half];
    [[maybe_unused]] QueryFactors<Real, HeadsPerThread> query_factors;
    const auto load_query_factors = [&](uint32_t index) {
        query_factors.load(args.choice, table_offset(args.choice, index), [&](int j) {
            const int head = heads.first + j;
            return heads_of_table.is_q(head) ? heads_of_table.index_of(head) : -1;
        });
    };
    if constexpr (is_per_head) load_query_factors(index);
    if constexpr (!schedule.loads_heads_before_table) load_heads();
    uint32_t verified_index = index;
    if constexpr (schedule.speculates_index) {
        if constexpr (schedule.orders_verification_last) __syncwarp();
        verified_index = load_index(args.choice, token_index, batch);
    }
    if constexpr (schedule.prefetches_positions) {
        if (threadIdx.x % (rotary_block_threads / RotarySchedule::prefetches_per_block) == 0 &&
            int64_t{token} + launch.tokens_ahead < args.tokens) {
            prefetch_l2(static_cast<const char*>(token_position) + launch.bytes_ahead);
        }
    }

    const Real direction = args.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    const auto compute_cos_sin = [&] {
        const auto gain = static_cast<Real>(factor_of(factor));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            if constexpr (has_rows) {
                position = Vector == 1 && positions.rows > max_rows_with_vectors
                               ? load_position(positions, min(int64_t{rows[j]}, positions.rows - 1), batch, token)
                               : positions_ahead[rows[j]];
            }
            by[j] = cos_sin_at<Element>(position, steps[j], gain, direction);
        }
    };
    if (layout.rotates()) compute_cos_sin();
    pdl_trigger();
    if (verified_index != index && layout.rotates()) {  // mispredict
        table = args.table + offset_of_table(verified_index);
        load_phase_steps(steps, table, layout);
        factor = table[half];
        compute_cos_sin();
        if constexpr (is_per_head) load_query_factors(verified_index);
    }

    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (j >= heads.count) break;
        if (layout.rotates()) {
            if constexpr (is_per_head) {
                fragments[j].template rotate<Layout::crosses_vectors>(
                    by, [&](auto& rotated) { rotated.scale(query_factors.of_head[j]); });
            } else {
                fragments[j].template rotate<Layout::crosses_vectors>(by);
            }
        }
        Element* out = saves_instructions && lookup == TableLookup::single && launch.keeps_strides
                           ? output_at_distance(args, in[j], heads_of_table.is_q(heads.first + j))
                           : Pointers(args, heads_of_table, batch, token, heads.first + j).out;
        fragments[j].store(out, layout);
    }

    if constexpr (!whole_heads) {
        if (!launch.copies_tail) return;
        for (int j = 0; j < heads.count; ++j) {
            const HeadPointers<Element> head(args, heads_of_table, batch, token, heads.first + j);
            copy_tail<Vector>(head.in, head.out, lane, launch.map.lanes.divisor, args);
        }
    }
}

template <class Element, int Vector, int HeadsPerThread, Pairing pairing, TableLookup lookup, bool is_per_head,
          bool whole_heads, bool tokens_inside>
void launch_rotary_kernel(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const auto threads = static_cast<int>(args.batch * args.tokens * plan.threads_per_token());
    // With tokens inside, the positions of all tokens are in L2 after the first group of heads.
    const auto tokens_ahead = tokens_inside
                                  ? std::numeric_limits<int>::max()
                                  : static_cast<int>(RotarySchedule::prefetch_threads_ahead / plan.threads_per_token());
    const RotaryLaunch launch{
        .args = args,
        .map = RotaryMap<cutlass::FastDivmod>::of(plan, args.tokens),
        .head_groups = HeadGroupsMap<cutlass::FastDivmod>::of(plan, args),
        .threads = threads,
        .copies_tail = copies_tail(args),
        .keeps_strides = args.q.in_strides == args.q.out_strides && args.k.in_strides == args.k.out_strides,
        .tokens_ahead = tokens_ahead,
        .bytes_ahead = tokens_ahead * args.positions.token_stride * (args.positions.is_int64 ? 8 : 4),
    };
    const int blocks = (threads + rotary_block_threads - 1) / rotary_block_threads;
    launch_with_pdl(
        pdl_kernel<
            rotary_kernel<Element, Vector, HeadsPerThread, pairing, lookup, is_per_head, whole_heads, tokens_inside>>,
        dim3(blocks), rotary_block_threads, stream, launch);
}

// Calls launch(kernel) with the plan's among kernels.of, as a constant expression.
template <const RotaryKernels& kernels, class Launch>
void with_kernel(const RotaryPlan& plan, Launch&& launch) {
    const auto try_kernel = [&](auto index) {
        const bool is_planned = kernels.of[index] == plan;
        if (is_planned) launch([index] { return kernels.of[index]; });
        return is_planned;
    };
    const bool is_launched = [&]<int... index>(std::integer_sequence<int, index...>) {
        return (try_kernel(std::integral_constant<int, index>{}) || ...);
    }(std::make_integer_sequence<int, kernels.count>{});
    if (!is_launched) throw std::logic_error("mrrope: there is no rotary kernel for that plan");
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_rotary(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    static constexpr RotaryKernels kernels = rotary_kernels(sizeof(Element));
    with_kernel<kernels>(plan, [&](auto kernel_of) {
        constexpr RotaryKernel kernel = kernel_of();
        launch_rotary_kernel<Element, kernel.vector, kernel.heads_per_thread, kernel.pairing, kernel.lookup,
                             kernel.is_per_head, kernel.whole_heads, kernel.tokens_inside>(args, plan, stream);
    });
}

extern template void launch_rotary<double>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<float>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<cutlass::half_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<cutlass::bfloat16_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);

}  // namespace mrrope
