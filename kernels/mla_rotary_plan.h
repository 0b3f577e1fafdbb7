#pragma once

#include <cstdint>

#include "device_properties.h"
#include "head_split.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "rotary_schedule.h"

// Launch plan of the MLA kernels: pure host functions of shape and device, tested without a GPU. Which thread takes
// what is in mla_rotary_map.h.

namespace mrrope {

// Where the key goes: to a tensor, to the slots of a cache, or, as a gradient, the sum of its heads to a tensor. q
// always goes to a tensor.
enum class KeyTarget { tensor, cache, float8_cache, sum };

constexpr bool is_cache(KeyTarget target) {
    return target == KeyTarget::cache || target == KeyTarget::float8_cache;
}

struct MlaRotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int q_heads = 0;
    int k_heads = 0;  // of the assembled key; 1 for a cache row
    int rotary_dim = 0;
    int q_copied = 0;  // components before the rope part
    int k_copied = 0;
    int element_size = 0;
    KeyTarget target = KeyTarget::tensor;
    int aligned_vector = 1;  // components of the widest vector to which all loads and stores are aligned
};

MlaRotaryShape shape_of(const MlaRotaryArgs& args);
MlaRotaryShape shape_of(const MlaRotaryGradientArgs& args);
MlaRotaryShape shape_of(const MlaRotaryAndCacheArgs& args);

// Threads share nothing but the sums of the gradient, which stay within a warp.
inline constexpr int mla_block_threads = 128;
inline constexpr int mla_warp_threads = 32;

// Minimum blocks per SM for __launch_bounds__, so that nothing spills, as in rotary_and_cache_plan.h.
constexpr int mla_rotary_min_blocks_per_sm(bool float8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return float8 ? 5 : 7;
#else
    return float8 ? 6 : 8;
#endif
}

// Of the gradient, whose sums of heads need more registers.
constexpr int mla_rotary_gradient_min_blocks_per_sm() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return 6;
#else
    return 7;
#endif
}

// Which kernels there are, each for both pairings; no others are compiled. All take a table index; half vectors, of
// decode steps, also have kernels for one table, which load none. Gradients and float32, of training, have no half
// vectors. Heads of float32 have vectors only without a cache, heads of float64 never.
constexpr bool has_mla_kernel(int element_size, KeyTarget target, int vector, int heads_per_thread,
                              TableLookup lookup) {
    const int full = full_vector(element_size);
    const bool is_indexed = lookup == TableLookup::indexed;
    const bool to_float8 = target == KeyTarget::float8_cache;
    if (vector == 1) return heads_per_thread == 1 && is_indexed && !(element_size == 8 && to_float8);
    if (element_size != 2 && !(element_size == 4 && !is_cache(target))) return false;
    if (vector == full) return heads_per_thread == 2 && is_indexed;
    const bool has_half_vectors = element_size == 2 && target != KeyTarget::sum;
    return vector == full / 2 && heads_per_thread == 1 && has_half_vectors &&
           (is_indexed || lookup == TableLookup::single);
}

// A thread takes two vectors of `vector` components of each of `heads_per_thread` neighbouring heads of one token.
// `rotating_lanes` threads rotate the rope part of a head, one vector from each of its halves; the lanes after them
// copy the part before it. The latent part of a cache row is copied by blocks of their own: its threads would load
// phase steps for nothing, and a row has eight times as many of them as rotate.
struct MlaRotaryPlan {
    int vector = 1;
    int rotating_lanes = 1;
    int q_lanes = 1;  // rotating and copying
    int k_lanes = 1;
    int latent_lanes = 0;  // of a cache row
    int heads_per_thread = 1;
    int q_groups = 0;  // of heads_per_thread heads
    int k_groups = 0;
    // Gradient only: threads that add up the heads of a token's key, each every head_sums-th head.
    int head_sums = 0;
    int64_t tokens_per_launch = 0;  // of the whole batch if it fits in one launch, else of one sequence

    int64_t q_threads_per_token() const { return int64_t{q_groups} * q_lanes; }
    int64_t sum_threads_per_token() const { return int64_t{head_sums} * rotating_lanes; }
    // Without those that copy the latent part.
    int64_t threads_per_token() const { return q_threads_per_token() + int64_t{k_groups} * k_lanes; }
};

MlaRotaryPlan plan(const MlaRotaryShape& shape, const Device& device);

// plan() with a given vector and number of heads per thread, for which has_plan.
MlaRotaryPlan plan_with(const MlaRotaryShape& shape, int vector, int heads_per_thread);

// Whether heads are made of such vectors, and there is a kernel.
bool has_plan(const MlaRotaryShape& shape, int vector, int heads_per_thread);

// The ops by a given plan. They throw std::logic_error if there is no such kernel.
void mla_rotary_cuda(const MlaRotaryArgs& args, const MlaRotaryPlan& plan, CUstream_st* stream);
void mla_rotary_gradient_cuda(const MlaRotaryGradientArgs& args, const MlaRotaryPlan& plan, CUstream_st* stream);
void mla_rotary_and_cache_cuda(const MlaRotaryAndCacheArgs& args, const MlaRotaryPlan& plan, CUstream_st* stream);

}  // namespace mrrope
