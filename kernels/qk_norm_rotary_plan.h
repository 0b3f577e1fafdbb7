#pragma once

#include <cstdint>

#include "device_properties.h"
#include "mrrope/qk_norm_rotary.h"

// Launch plans of RMSNorm + rotation, forward and backward: pure host functions of shape and device, tested without a
// GPU.

namespace mrrope {

struct QkNormRotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int q_heads = 0;
    int k_heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    Pairing pairing = Pairing::halves;
    NormOver over = NormOver::head;
    bool aligned = false;       // as in RotaryShape, of the weights, too
    bool needs_lookup = false;  // several tables, or several positions per token
    int table_heads = 1;        // TableChoice::heads
    bool has_query_factors = false;

    bool is_per_head() const { return table_heads > 1 || has_query_factors; }
};

QkNormRotaryShape shape_of(const QkNormRotaryArgs& args);
QkNormRotaryShape shape_of(const QkNormRotaryGradientArgs& args);

// Small blocks where heads are independent, as in rotary_plan.h.
inline constexpr int norm_block_threads = 128;
// Over all heads, where a block reduces a row.
inline constexpr int norm_max_block_threads = 256;
// The two-pass kernels. Some blocks of qk_norm_rotary_and_cache have fewer.
inline constexpr int norm_row_block_threads = 128;
// Minimum blocks per SM for __launch_bounds__. Without it the compiler spills a few registers to reach occupancies that
// gain nothing.
inline constexpr int norm_row_min_blocks_per_sm = 4;
// `pdl`: compiled for sm_90 or later. Over all heads, 1024 tokens of 32 + 32 heads take 1.14 copies on an H200 with
// three blocks of two heads per thread, and took 1.23 with two; before sm_90 three would spill.
constexpr int norm_min_blocks_per_sm(NormOver over, int heads_per_thread, bool needs_lookup, bool pdl) {
    if (over == NormOver::all_heads) return heads_per_thread == 2 && pdl && !needs_lookup ? 3 : 2;
    if (heads_per_thread == 8 && needs_lookup && !pdl) return 3;  // four would spill
    if (heads_per_thread == 8 || needs_lookup) return 4;
    return heads_per_thread == 2 ? 5 : 7;
}

// Heads per thread with a lookup, and of the backward pass. With one head table, many tokens have eight over a head.
inline constexpr int norm_heads_per_thread_with_lookup = 2;

// Whether a kernel that holds heads in registers is instantiated. All combinations would be 238 kernels of the norm
// ops, these are 101. Models norm 16-bit heads whose pairs are halves; other heads have one kernel, with a lookup,
// which runs calls without one, too, and two passes where there is none.
constexpr bool has_norm_kernel(int element_size, Pairing pairing, NormOver over, int heads_per_thread,
                               bool needs_lookup) {
    const bool over_head = over == NormOver::head;
    const bool is_general = needs_lookup && heads_per_thread == norm_heads_per_thread_with_lookup;
    if (pairing == Pairing::interleaved) return element_size == 2 && over_head && is_general;
    const bool shares_lookup = needs_lookup && over_head && heads_per_thread == 8;
    if (element_size != 2) return element_size == 4 && (is_general || shares_lookup);
    if (needs_lookup) return is_general || shares_lookup;
    if (over_head) return heads_per_thread == 1 || heads_per_thread == 2 || heads_per_thread == 8;
    return heads_per_thread == 2 || heads_per_thread == 4;
}

// A row is the set of elements that share one mean square: a head, or all heads of q or of k of one token.
//
// in_registers: heads are made of whole 16-byte vectors and a warp can hold one. `lanes` threads hold a head, two
// vectors each: one from each half of the rotated part, or two neighbours from the tail. A thread has up to
// `heads_per_thread` heads of q or of k. Over a head, its lanes are the first of a team of 2^n threads of one warp,
// which reduces the row; over all heads, a block reduces it.
//
// Otherwise a block makes two passes over one row.
struct QkNormRotaryPlan {
    bool in_registers = false;
    bool needs_lookup = false;  // of the kernel
    int lanes = 1;
    int team = 1;  // threads that reduce a head: a power of two
    int heads_per_thread = 1;
    int q_groups = 0;  // of up to heads_per_thread heads of one head table; two passes: rows
    int k_groups = 0;
    int block_threads = norm_row_block_threads;
    int64_t tokens_per_launch = 0;  // as in RotaryPlan

    int groups() const { return q_groups + k_groups; }
};

QkNormRotaryPlan plan(const QkNormRotaryShape& shape, const Device& device);

// plan() with a given maximum of heads per thread; two passes where no kernel has as many, as with 0.
QkNormRotaryPlan plan_with(const QkNormRotaryShape& shape, const Device& device, int heads_per_thread);

// qk_norm_rotary_cuda by a given plan.
void qk_norm_rotary_cuda(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan, CUstream_st* stream);

// The number of blocks of a launch of `tokens` tokens.
int64_t blocks_of(const QkNormRotaryPlan& plan, NormOver over, int64_t tokens);

inline constexpr int norm_gradient_block_threads = 128;
inline constexpr int norm_gradient_max_block_threads = 256;
// Over all heads, a block has 38 KB of shared memory, and an SM of an H200 holds five.
inline constexpr int norm_gradient_max_blocks_over_all_heads = 5;
// Resident threads per SM, as limited by register use.
constexpr int norm_gradient_threads_per_sm(NormOver over, bool shares_cos_sin) {
    return over == NormOver::head || shares_cos_sin ? 384 : 256;
}

// As has_norm_kernel, for the backward pass. shares_cos_sin: as in QkNormRotaryGradientPlan.
constexpr bool has_norm_gradient_kernel(int element_size, Pairing pairing, NormOver over, bool shares_cos_sin,
                                        bool needs_lookup) {
    const bool over_head = over == NormOver::head;
    const bool is_general = needs_lookup && !shares_cos_sin;
    if (pairing == Pairing::interleaved) return element_size == 2 && over_head && is_general;
    if (element_size != 2) return element_size == 4 && is_general;
    return over_head ? !shares_cos_sin : needs_lookup;
}

// The backward pass: a persistent grid. Each block takes rows of q or rows of k, and writes one row of partial sums for
// the gradient of the weights.
struct QkNormRotaryGradientPlan {
    bool in_registers = false;
    bool needs_lookup = false;    // of the kernel
    bool shares_cos_sin = false;  // over all heads, by one table without query factors, which would spill
    int lanes = 1;
    int team = 1;
    int q_groups = 0;
    int k_groups = 0;
    int block_threads = norm_row_block_threads;
    int q_blocks = 0;
    int k_blocks = 0;
};

QkNormRotaryGradientPlan plan_gradient(const QkNormRotaryShape& shape, const Device& device);

// qk_norm_rotary_gradient_cuda by a given plan, each of whose blocks has a row of weight_sums.
void qk_norm_rotary_gradient_cuda(const QkNormRotaryGradientArgs& args, const QkNormRotaryGradientPlan& plan,
                                  CUstream_st* stream);

}  // namespace mrrope
