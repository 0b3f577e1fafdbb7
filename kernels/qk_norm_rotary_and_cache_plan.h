#pragma once

#include "device_properties.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "qk_norm_rotary_plan.h"
#include "rotary_and_cache_plan.h"

// Launch plan of the kernel that norms and rotates q and k and writes k and v to a cache: pure host functions of shape
// and device, tested without a GPU.

namespace mrrope {

struct QkNormRotaryAndCacheShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int q_heads = 0;
    int kv_heads = 0;
    int gate_heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    Pairing pairing = Pairing::halves;
    NormOver over = NormOver::head;
    bool aligned = false;           // every vector is aligned to its size; not with too many rows for vectors
    bool needs_lookup = false;      // several tables, or several positions per token
    bool computes_q_scale = false;  // a scale per token and head of q
    bool rounds_q = false;          // to float8
    bool rounds_cache = false;      // k and v, to float8
    int table_heads = 1;            // TableChoice::heads
    bool has_query_factors = false;

    bool is_per_head() const { return table_heads > 1 || has_query_factors; }
    bool has_float8() const { return rounds_q || rounds_cache; }
};

QkNormRotaryAndCacheShape shape_of(const QkNormRotaryAndCacheArgs& args);

// As has_norm_kernel. A kernel that rounds heads to float8 runs other calls, too, so interleaved heads have that one.
// They also have those of small launches: models rotate and cache interleaved heads without norms, and 64 tokens take
// 2.23 us on an H200, by rotary_and_cache_kernel 2.50. fixed_lanes: as in QkNormRotaryAndCachePlan.
constexpr bool has_norm_and_cache_kernel(int element_size, Pairing pairing, NormOver over, int heads_per_thread,
                                         bool needs_lookup, bool has_float8, int fixed_lanes = 0) {
    const bool over_head = over == NormOver::head;
    const bool is_common = element_size == 2 && pairing == Pairing::halves;
    if (fixed_lanes > 0) return fixed_lanes == 8 && is_common && over_head && heads_per_thread == 8 && !needs_lookup;
    if (!is_common) {
        const bool is_general = over_head && needs_lookup && heads_per_thread == norm_heads_per_thread_with_lookup;
        if (element_size == 4) return is_general && pairing == Pairing::halves && !has_float8;
        const bool is_small = over_head && !needs_lookup && heads_per_thread == 1;
        return element_size == 2 && (is_small || (is_general && has_float8));
    }
    if (over_head) return heads_per_thread == 1 || heads_per_thread == 2 || heads_per_thread == 8;
    return heads_per_thread == 2 || (!needs_lookup && (heads_per_thread == 1 || heads_per_thread == 4));
}

// Minimum blocks per SM for __launch_bounds__: as many as nothing spills with. The same code needs more registers
// before sm_90, where float8 is rounded by integer arithmetic.
constexpr int norm_and_cache_min_blocks_per_sm(NormOver over, int heads_per_thread, bool needs_lookup, bool has_float8,
                                               int fixed_lanes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    constexpr bool is_old = true;
#else
    constexpr bool is_old = false;
#endif
    if (over == NormOver::all_heads) {
        if (heads_per_thread == 1) return 1;
        if (heads_per_thread == 2 && !needs_lookup) return is_old ? 2 : 3;
        return is_old && has_float8 ? 1 : 2;
    }
    if (heads_per_thread == 8 && fixed_lanes > 0) return is_old && has_float8 ? 4 : 6;
    if (heads_per_thread == 8 && has_float8) return is_old ? 3 : 4;
    if (heads_per_thread == 8) return is_old && needs_lookup ? 4 : 5;
    if (heads_per_thread == 2) return is_old || needs_lookup ? 4 : 5;
    return 6;
}

// For __launch_bounds__, too. Over all heads, a block has a row.
constexpr int norm_and_cache_max_block_threads(NormOver over, int heads_per_thread) {
    if (over == NormOver::head) return norm_block_threads;
    return heads_per_thread == 1 ? 1024 : norm_max_block_threads;
}

// Components of a vector. A thread of a small launch, which is bound by latency, has one head, and half vectors: it
// computes half as many cos/sin. So has one of a head that is not made of full vectors.
constexpr int norm_and_cache_vector(int element_size, int heads_per_thread) {
    return (heads_per_thread == 1 ? 8 : 16) / element_size;
}

// As QkNormRotaryPlan, but by vectors of norm_and_cache_vector, for four kinds of heads: those of q, k, v and the gate.
// Those of v and the gate are neither normed nor rotated; a thread has heads of one kind.
struct QkNormRotaryAndCachePlan {
    bool in_registers = false;
    bool needs_lookup = false;  // of the kernel, as has_float8
    bool has_float8 = false;
    int vector = 1;  // components per load: norm_and_cache_vector
    int lanes = 1;
    int team = 1;  // threads that reduce a head: a power of two
    int heads_per_thread = 1;
    int fixed_lanes = 0;  // runs the kernel for heads of so many lanes that are rotated whole; 0: for all heads
    HeadGroups groups;    // of up to heads_per_thread heads; component by component: none
    // What a token is divided into: over a head, in registers, the groups; otherwise rows.
    HeadGroups units;
    int block_threads = norm_row_block_threads;
    int tokens_per_block = 1;  // over a head, in registers, as many as teams
    // Sharers: teams of a warp that have one token and a group each, 2 to this power.
    int q_sharers_log2 = 0;
    int k_sharers_log2 = 0;
    int64_t tokens_per_launch = 0;  // as in RotaryPlan
};

QkNormRotaryAndCachePlan plan(const QkNormRotaryAndCacheShape& shape, const Device& device);

// plan() with a given maximum of heads per thread. Component by component where no kernel has as many, as with 0, and
// heads that are not made of such vectors, or that no warp can hold.
QkNormRotaryAndCachePlan plan_with(const QkNormRotaryAndCacheShape& shape, const Device& device, int heads_per_thread);

// qk_norm_rotary_and_cache_cuda by a given plan.
void qk_norm_rotary_and_cache_cuda(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan,
                                   CUstream_st* stream);

// The number of blocks of a launch of `tokens` tokens.
int64_t blocks_of(const QkNormRotaryAndCachePlan& plan, int64_t tokens);

}  // namespace mrrope
