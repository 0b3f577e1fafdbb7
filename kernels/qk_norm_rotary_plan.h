#pragma once

#include <cstdint>

#include "mrrope/qk_norm_rotary.h"

// How norm and rotation are laid over the GPU: pure functions of the shape, tested without one.

namespace mrrope {

struct QkNormRotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int q_heads = 0;
    int k_heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    NormOver over = NormOver::head;
    bool aligned = false;   // every head, and the weights, start at a multiple of 16 bytes
    bool looks_up = false;  // tables are chosen, or tokens have several positions
};

QkNormRotaryShape shape_of(const QkNormRotaryArgs& args);
QkNormRotaryShape shape_of(const QkNormRotaryGradientArgs& args);

// Small blocks where every head is a matter of its own, as in rotary_plan.h.
inline constexpr int norm_block_threads = 128;
inline constexpr int norm_most_block_threads = 256;
// The blocks that go through a row twice.
inline constexpr int norm_row_block_threads = 128;
// Left to itself, the compiler spills a few registers to get below thresholds that do not matter.
inline constexpr int norm_row_resident_blocks = 4;
// What registers must leave room for.
constexpr int norm_resident_blocks(NormOver over, int heads_per_thread, bool looks_up) {
    if (over == NormOver::all_heads) return 2;
    if (heads_per_thread >= 4 || looks_up) return 4;
    return heads_per_thread == 2 ? 5 : 7;
}

// How many of a thread's heads are in registers at a time.
constexpr int norm_heads_held(int heads_per_thread) {
    return heads_per_thread < 4 ? heads_per_thread : 4;
}

// The one number of heads a thread where something has to be looked up, and in the backward pass.
inline constexpr int norm_heads_per_thread_with_lookup = 2;

// A row is what one mean is taken of: a head, or all heads of q or of k of one token. Where heads are made of whole
// vectors, `lanes` threads hold one head: a thread has two vectors, one from either half of the rotated part or two
// neighbours from the rest, of up to `heads_per_thread` heads of q or of k. Over a head, the lanes are the first of a
// `team` within a warp; over all heads, a row is a block's. Where threads hold nothing, a block goes through one row
// twice.
struct QkNormRotaryPlan {
    bool holds = false;
    int lanes = 1;
    int team = 1;  // a power of two
    int heads_per_thread = 1;
    int q_groups = 0;  // of up to heads_per_thread heads; where nothing is held, rows
    int k_groups = 0;
    int block_threads = norm_row_block_threads;
    int64_t tokens_per_launch = 0;  // as in RotaryPlan

    int groups() const { return q_groups + k_groups; }
};

QkNormRotaryPlan plan_qk_norm_rotary(const QkNormRotaryShape& shape);

// The same with the most heads of a thread given: 1, 2, 4 or 8, over all heads 2 or 4, with lookup 2.
QkNormRotaryPlan plan_with(const QkNormRotaryShape& shape, int heads_per_thread);

// qk_norm_rotary_cuda by a given plan.
void qk_norm_rotary_cuda(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan, CUstream_st* stream);

// The blocks of one launch: rows are shared out, teams or blocks.
int64_t blocks_of(const QkNormRotaryPlan& plan, NormOver over, int64_t tokens);

inline constexpr int norm_gradient_block_threads = 128;
inline constexpr int norm_gradient_most_block_threads = 256;
// What registers leave room for, on one processor.
constexpr int norm_gradient_resident_threads(NormOver over) {
    return over == NormOver::head ? 384 : 256;
}

// The backward pass: as many blocks as an H200 holds at a time, each of q or of k, go through the tokens and keep sums
// for the gradient of the weights, a row of sums a block.
struct QkNormRotaryGradientPlan {
    bool holds = false;
    int lanes = 1;
    int team = 1;
    int q_groups = 0;
    int k_groups = 0;
    int block_threads = norm_row_block_threads;
    int q_blocks = 0;
    int k_blocks = 0;
};

QkNormRotaryGradientPlan plan_qk_norm_rotary_gradient(const QkNormRotaryShape& shape);

}  // namespace mrrope
