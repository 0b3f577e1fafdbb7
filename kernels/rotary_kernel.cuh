#pragma once

#include <cutlass/fast_math.h>

#include <stdexcept>

#include "device/dependent_launch.cuh"
#include "device/head_fragment.cuh"
#include "head_split.h"
#include "rotary_plan.h"

namespace mrrope {

// Passed to the kernel by value. The divisors take a thread's number apart without dividing.
struct RotaryLaunch {
    RotaryArgs args;
    cutlass::FastDivmod lanes;
    cutlass::FastDivmod head_groups;
    cutlass::FastDivmod tokens;
    int threads;
    bool copies_tail;
    // From a token's position to the one that a block a few microseconds later will ask for.
    int tokens_ahead;
    int64_t bytes_ahead;
};

// One head of q or k, in and out, seen from one token.
template <class Element>
struct HeadPointers {
    const Element* in;
    Element* out;

    __device__ HeadPointers(const RotaryArgs& args, int batch, int token, int head) {
        const bool is_q = head < args.q.heads;
        const HeadsView& view = is_q ? args.q : args.k;
        const int64_t index = is_q ? head : head - args.q.heads;
        const auto offset = [&](const HeadStrides& strides) {
            return batch * strides.batch + token * strides.token + index * strides.head;
        };
        in = static_cast<const Element*>(view.in) + offset(view.in_strides);
        out = static_cast<Element*>(view.out) + offset(view.out_strides);
    }
};

// What a thread has to look up before it knows its angles. Each is a kernel of its own: asking at run time which it is
// costs a decoding step a third of its time.
enum class Lookup {
    one_table,      // every token turns by the same table
    guessed_table,  // by the one that TableChoice names; few threads guess it first, where kernels overlap
    chosen_table,   // by the one that TableChoice names; many threads need no guess
    position_rows,  // every pair has a position of its own; one table or a chosen one
};

// Where a token's index lies, if there are any.
__device__ inline const int32_t* address_of_choice(const TableChoice& choice, int batch, int token) {
    return choice.index + int64_t{batch} * choice.batch_stride + int64_t{token} * choice.token_stride;
}

// Without indices, a token's sequence decides.
__device__ inline uint32_t chosen_index(const TableChoice& choice, const int32_t* address, int batch) {
    return choice.index == nullptr ? batch : *address;
}

// What chosen_index will most likely find: asked before the kernel before has ended, which may be about to write it.
// What is read after the wait is what that kernel wrote, whatever was read before.
__device__ inline uint32_t guessed_index(const TableChoice& choice, const int32_t* address, int batch, bool exists) {
    uint32_t index = batch;
    if (choice.index != nullptr && exists) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(index) : "l"(address));  // here, and not when it is needed
    }
    return index;
}

// Where a table begins. Unsigned, so that no index, however wrong, leads out of the tables.
__device__ inline int64_t first_word_of(const TableChoice& choice, uint32_t index) {
    const uint32_t number = min(index, static_cast<uint32_t>(choice.count - 1));
    return static_cast<int64_t>(uint64_t{number} * static_cast<uint32_t>(choice.stride));
}

// Where the table of a token begins, for kernels that know nothing of it before.
__device__ inline int64_t first_word_of_choice(const TableChoice& choice, int batch, int token) {
    return first_word_of(choice, chosen_index(choice, address_of_choice(choice, batch, token), batch));
}

// A thread takes one vector from either half of HeadsPerThread neighbouring heads of one token: 16 bytes a load, all of
// them in flight while it computes the Vector phases that those heads share. Neighbouring threads take neighbouring
// vectors, then heads, then tokens: heads far apart would cost 512 tokens 9 % on an H200, and 8192 tokens 2 %. Nothing
// that is read before the kernel before has ended counts.
//
// PDL trigger placement, tuned on back-to-back graph replays: right after the wait with one head a thread, and with a
// speculated table index where threads are few, else when the phases are known; a wrong placement costs up to a third
// at 1 to 256 tokens. Before the wait it would gain up to 0.07 us (0.16 us by table_index), and let a kernel two
// launches after a writer start while that writer runs (benchmarks/results/trigger_cuda.json, dependent_launch test).
template <class Element, int Vector, int HeadsPerThread, Pairing pairing, Lookup lookup>
__global__ void __launch_bounds__(rotary_block_threads, rotary_resident_blocks(HeadsPerThread))
    rotary_kernel(const __grid_constant__ RotaryLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    constexpr bool chooses = lookup != Lookup::one_table;
    constexpr bool guesses = lookup == Lookup::guessed_table && kernels_overlap;
    const RotaryArgs& args = launch.args;
    const int thread = blockIdx.x * rotary_block_threads + threadIdx.x;
    int item, lane, sequence_token, group, batch, token;
    launch.lanes(item, lane, thread);
    launch.head_groups(sequence_token, group, item);
    launch.tokens(batch, token, sequence_token);

    const int first_head = group * HeadsPerThread;
    const int heads = min(HeadsPerThread, args.q.heads + args.k.heads - first_head);
    const int half = args.rotary_dim / 2;
    const Layout layout{lane, half};
    const PositionsView& positions = args.positions;
    const void* position_address = address_of_position(positions, 0, batch, token);
    const int32_t* choice_address = nullptr;
    if constexpr (chooses) choice_address = address_of_choice(args.choice, batch, token);
    uint32_t index = 0;
    if constexpr (guesses) index = guessed_index(args.choice, choice_address, batch, thread < launch.threads);
    const Element* in[HeadsPerThread];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) in[j] = HeadPointers<Element>(args, batch, token, first_head + j).in;
    // A call of few threads lasts little longer than the way to memory and back.
    const bool never = launch.threads < 0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        compute_before_wait(never, in[j] + layout.first());
        compute_before_wait(never, in[j] + layout.second());
    }
    compute_before_wait(never, position_address);
    if constexpr (chooses && !guesses) {
        compute_before_wait(never, choice_address);
    } else {
        compute_before_wait(never, args.table + first_word_of(args.choice, index) + layout.pair(0));
    }
    wait_for_previous_kernel();
    if constexpr (HeadsPerThread == 1) {
        let_next_kernel_start();
    } else if constexpr (guesses) {
        if (launch.threads < threads_for_late_start) let_next_kernel_start();
    }
    if (thread >= launch.threads) return;

    HeadFragment<Element, Vector> fragments[HeadsPerThread];
    const auto load_heads = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            if (j < heads) fragments[j].load(in[j], layout);
        }
    };

    // What leads to the angles is asked for first, since loads are answered in their order: after the heads, it costs
    // 16 to 128 tokens 10 to 15 %. But by a table that was not guessed the turns come a way later than their index, and
    // the heads are asked for in between, so that they do not wait too. So they are before sm_90, where the compiler
    // would ask for heads that come last only when the angles are known.
    constexpr bool heads_come_first = !kernels_overlap || lookup == Lookup::chosen_table;
    const int64_t only_position = position_at(positions, position_address);
    if constexpr (chooses && !guesses) index = chosen_index(args.choice, choice_address, batch);
    if constexpr (heads_come_first) {
        load_heads();
        __syncwarp();  // the compiler moves no load past it; threads that have returned need not come
    }
    const int64_t first_word = first_word_of(args.choice, index);
    const uint64_t* table = args.table + first_word;
    uint64_t turns[Vector];
    load_turns(turns, table, layout);
    uint64_t factor = table[half];
    if constexpr (!heads_come_first) load_heads();
    uint32_t chosen = index;
    if constexpr (guesses) {
        // Whether the guess was right is asked last of all: 16 and 64 tokens take 0.1 us less. Of more tokens, with
        // more heads a thread, 1024 would take 1 % longer.
        if constexpr (HeadsPerThread == 1) __syncwarp();
        chosen = chosen_index(args.choice, choice_address, batch);
    }
    // A position that comes from as far as the heads keeps the angles waiting as long: of few heads, which share each,
    // that is 1 %. Twice a block, since a sector of memory has four of them. With two heads and a guessed table it
    // costs more than it gains.
    constexpr bool fetches_positions =
        HeadsPerThread == 3 || (HeadsPerThread == 2 && (lookup == Lookup::one_table || lookup == Lookup::chosen_table));
    if constexpr (kernels_overlap && fetches_positions) {
        if (threadIdx.x % (rotary_block_threads / 2) == 0 && int64_t{token} + launch.tokens_ahead < args.tokens) {
            prefetch(static_cast<const char*>(position_address) + launch.bytes_ahead);
        }
    }

    const Real direction = args.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    const auto find_angles = [&] {
        const auto gain = static_cast<Real>(attention_factor_of(factor));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            int64_t position = only_position;
            if constexpr (lookup == Lookup::position_rows) {
                const uint64_t* row_of_pair = positions.row_of_pair + first_word;
                const int64_t row = position_row_of(row_of_pair[layout.pair(j)], positions.rows);
                position = position_at(positions, row, batch, token);
            }
            by[j] = scaled_cos_sin(phase_of(position, turns[j]), gain, direction);
        }
    };
    find_angles();
    let_next_kernel_start();
    if (chosen != index) {  // guessed wrong
        table = args.table + first_word_of(args.choice, chosen);
        load_turns(turns, table, layout);
        factor = table[half];
        find_angles();
    }

    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < HeadsPerThread; ++j) {
        if (j >= heads) break;
        fragments[j].template rotate<Layout::crosses_vectors>(by);
        fragments[j].store(HeadPointers<Element>(args, batch, token, first_head + j).out, layout);
    }

    if (!launch.copies_tail) return;
    using Stored = cutlass::AlignedArray<Element, Vector>;
    for (int j = 0; j < heads; ++j) {
        const HeadPointers<Element> pointers(args, batch, token, first_head + j);
        for (int at = args.rotary_dim + lane * Vector; at < args.head_dim; at += launch.lanes.divisor * Vector) {
            *reinterpret_cast<Stored*>(pointers.out + at) = *reinterpret_cast<const Stored*>(pointers.in + at);
        }
    }
}

template <class Element, int Vector, int HeadsPerThread, Pairing pairing, Lookup lookup>
void launch_planned(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    const auto threads = static_cast<int>(args.batch * args.tokens * plan.threads_per_token());
    const auto tokens_ahead = static_cast<int>(rotary_threads_ahead / plan.threads_per_token());
    const RotaryLaunch launch{
        .args = args,
        .lanes = cutlass::FastDivmod(plan.lanes),
        .head_groups = cutlass::FastDivmod(plan.head_groups),
        .tokens = cutlass::FastDivmod(static_cast<int>(args.tokens)),
        .threads = threads,
        .copies_tail = args.rotary_dim < args.head_dim && (args.q.in != args.q.out || args.k.in != args.k.out),
        .tokens_ahead = tokens_ahead,
        .bytes_ahead = tokens_ahead * args.positions.token_stride * (args.positions.is_int64 ? 8 : 4),
    };
    const int blocks = (threads + rotary_block_threads - 1) / rotary_block_threads;
    launch_overlapping(dependent_kernel<rotary_kernel<Element, Vector, HeadsPerThread, pairing, lookup>>, dim3(blocks),
                       rotary_block_threads, stream, launch);
}

template <class Element, int Vector, Pairing pairing, Lookup lookup>
void launch_heads(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (plan.heads_per_thread == 1) return launch_planned<Element, Vector, 1, pairing, lookup>(args, plan, stream);
    if constexpr (Vector == 1 || Vector * sizeof(Element) == access_bytes) {
        if (plan.heads_per_thread == 2) return launch_planned<Element, Vector, 2, pairing, lookup>(args, plan, stream);
    }
    if constexpr (Vector > 1 && Vector * sizeof(Element) == access_bytes) {
        if (plan.heads_per_thread == 3) return launch_planned<Element, Vector, 3, pairing, lookup>(args, plan, stream);
    }
    throw std::logic_error("mrrope: no rotary kernel takes that many heads a thread");
}

template <class Element, int Vector, Pairing pairing>
void launch_lookup(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    if (args.positions.row_of_pair != nullptr) {
        if constexpr (Vector == 1 || Vector * sizeof(Element) == access_bytes) {
            return launch_planned<Element, Vector, heads_per_thread_with_rows, pairing, Lookup::position_rows>(
                args, plan, stream);
        }
        throw std::logic_error("mrrope: no rotary kernel takes positions with rows by short vectors");
    }
    if (args.choice.count > 1) {
        if (plan.guesses_table) {
            return launch_heads<Element, Vector, pairing, Lookup::guessed_table>(args, plan, stream);
        }
        return launch_heads<Element, Vector, pairing, Lookup::chosen_table>(args, plan, stream);
    }
    return launch_heads<Element, Vector, pairing, Lookup::one_table>(args, plan, stream);
}

template <class Element, int Vector>
void launch_pairing(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    switch (args.pairing) {
        case Pairing::halves: return launch_lookup<Element, Vector, Pairing::halves>(args, plan, stream);
        case Pairing::interleaved: return launch_lookup<Element, Vector, Pairing::interleaved>(args, plan, stream);
    }
}

// Instantiated in a file per element type, so that they compile side by side.
template <class Element>
void launch_rotary(const RotaryArgs& args, const RotaryPlan& plan, cudaStream_t stream) {
    constexpr int full_vector = access_bytes / sizeof(Element);
    if (plan.vector == full_vector) return launch_pairing<Element, full_vector>(args, plan, stream);
    if (plan.vector == full_vector / 2) return launch_pairing<Element, full_vector / 2>(args, plan, stream);
    return launch_pairing<Element, 1>(args, plan, stream);
}

extern template void launch_rotary<double>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<float>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<cutlass::half_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
extern template void launch_rotary<cutlass::bfloat16_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);

}  // namespace mrrope
