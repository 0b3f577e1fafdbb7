#pragma once

#include <algorithm>
#include <cstdint>

#include "head_split.h"
#include "mrrope/rotary.h"

// How a rotation is laid over the GPU: pure functions of the shape, tested without one.

namespace mrrope {

struct RotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int heads = 0;  // of q and k together
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    bool aligned = false;    // every head starts at a multiple of 16 bytes
    bool with_rows = false;  // tokens have several positions
};

RotaryShape shape_of(const RotaryArgs& args);

// Small blocks: threads share nothing, and a small grid spreads over more of the chip. Blocks of 64 are slower from 256
// tokens on, blocks of 256 below 16.
inline constexpr int rotary_block_threads = 128;
// What registers must leave room for: enough threads to hide the phases behind memory. Left to itself, the compiler
// spills a few registers to get below thresholds that do not matter.
// Three heads take more registers, and need fewer threads to keep as many bytes on their way.
constexpr int rotary_resident_blocks(int heads_per_thread) {
    return heads_per_thread <= 2 ? 8 : 6;
}
// Positions are brought near for blocks that start when so many threads more have: half as many again as an H200 holds,
// or with three heads twice as many.
inline constexpr int64_t rotary_threads_ahead = 3 << 16;
// So many threads of several heads let the next kernel start late.
inline constexpr int threads_for_late_start = 1 << 16;
// So many threads do not guess which of several tables they will turn by: measured in rotary_plan.cpp.
constexpr int64_t threads_for_no_guess(int heads_per_thread) {
    return heads_per_thread <= 2 ? 1 << 22 : 1 << 21;
}

// What a thread takes, by how many threads there would be with one head and full vectors each; measured in
// rotary_plan.cpp.
inline constexpr int64_t threads_for_full_vectors = 1 << 16;

// The one kernel there is for tokens with several positions.
inline constexpr int heads_per_thread_with_rows = 2;

// `lanes` threads rotate one head: each takes `vector` components (16 bytes of them, or 8, or one) from either half of
// the rotated part, for `heads_per_thread` heads of one token, which share the cosines and sines that the thread
// computes once.
struct RotaryPlan {
    int vector = 1;
    int lanes = 1;
    int heads_per_thread = 1;
    int head_groups = 1;            // groups of heads_per_thread heads
    bool guesses_table = true;      // reads which of several it is before the kernel before has ended, too
    int64_t tokens_per_launch = 0;  // through the batch where it all fits one launch, else of one sequence

    int64_t threads_per_token() const { return static_cast<int64_t>(lanes) * head_groups; }
};

RotaryPlan plan_rotary(const RotaryShape& shape);

// The same with what a thread takes given: a vector that the shape allows (full, half or one component), and 1 head, 2
// with full vectors or single components, or 3 with full vectors.
RotaryPlan plan_with(const RotaryShape& shape, int vector, int heads_per_thread);

// The same for any kernel that shares heads among threads in this way, in groups of its own making.
RotaryPlan plan_groups(const RotaryShape& shape, int vector, int heads_per_thread, int head_groups);

// rotary_cuda by a given plan.
void rotary_cuda(const RotaryArgs& args, const RotaryPlan& plan, CUstream_st* stream);

// Calls f(first_batch, batch, first_token, tokens) for parts that one launch each can take, so that kernels count
// threads and tokens in 32 bits.
template <class F>
void for_each_part(int64_t batch, int64_t tokens, const RotaryPlan& plan, F&& f) {
    if (plan.tokens_per_launch >= batch * tokens) return f(0, batch, 0, tokens);
    for (int64_t sequence = 0; sequence < batch; ++sequence) {
        for (int64_t token = 0; token < tokens; token += plan.tokens_per_launch) {
            f(sequence, 1, token, std::min(plan.tokens_per_launch, tokens - token));
        }
    }
}

template <class F>
void for_each_launch(const RotaryArgs& args, const RotaryPlan& plan, F&& f) {
    for_each_part(args.batch, args.tokens, plan, [&](auto... part) { f(slice(args, part...)); });
}

}  // namespace mrrope
