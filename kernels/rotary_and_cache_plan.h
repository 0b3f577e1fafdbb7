#pragma once

#include "device_properties.h"
#include "mrrope/rotary_and_cache.h"
#include "rotary_plan.h"
#include "rotary_schedule.h"

// Launch plan of the kernel that rotates q and k and writes k and v to a cache: pure host functions of shape and
// device, tested without a GPU.

namespace mrrope {

struct RotaryAndCacheShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int q_heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    Pairing pairing = Pairing::halves;
    bool float8 = false;     // the cache
    int aligned_vector = 1;  // components of the widest vector to which all loads and stores are aligned
    int table_heads = 1;     // TableChoice::heads
};

RotaryAndCacheShape shape_of(const RotaryAndCacheArgs& args);

// Minimum blocks per SM for __launch_bounds__, so that nothing spills. Rounding to float8 needs more registers, and so
// does the same code before sm_90.
constexpr int rotary_and_cache_min_blocks_per_sm(bool float8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    return float8 ? 4 : 7;
#else
    return float8 ? 6 : 8;
#endif
}

// Which kernels there are; no others are compiled. All take a table index; 16-bit halves, the pairing of most models,
// also have kernels for one table, which load none, and quarter vectors, for heads of 100. Heads of float32 have
// vectors only as halves with a cache of their dtype, heads of float64 never.
constexpr bool has_rotary_and_cache_kernel(int element_size, Pairing pairing, bool float8, int vector,
                                           int heads_per_thread, TableLookup lookup) {
    const int full = full_vector(element_size);
    const bool is_halves = pairing == Pairing::halves;
    const bool is_16_bit_halves = element_size == 2 && is_halves;
    const bool is_indexed = lookup == TableLookup::indexed;
    const bool has_lookup = is_indexed || (lookup == TableLookup::single && is_16_bit_halves);
    if (vector == 1) return heads_per_thread == 1 && is_indexed && !(element_size == 8 && float8);
    if (element_size != 2 && !(element_size == 4 && is_halves && !float8)) return false;
    if (vector == full) return heads_per_thread == 2 && has_lookup;
    if (vector == full / 2) return heads_per_thread == 1 && has_lookup;
    return vector == full / 4 && heads_per_thread == 1 && is_indexed && is_16_bit_halves;
}

// Groups of heads, one group per thread: those of q first, then those of k, of v, and of the gate where there is one.
// No group mixes them, and no group of q or k mixes head tables.
struct HeadGroups {
    int queries = 0;
    int keys = 0;
    int values = 0;
    int gates = 0;

    int count() const { return queries + keys + values + gates; }
};

HeadGroups head_groups(int q_heads, int kv_heads, int heads_per_thread, int table_heads = 1);

RotaryPlan plan(const RotaryAndCacheShape& shape, const Device& device);

// plan() with a given vector and number of heads per thread, for which has_plan.
RotaryPlan plan_with(const RotaryAndCacheShape& shape, int vector, int heads_per_thread);

// Whether heads are made of such vectors, and there is a kernel.
bool has_plan(const RotaryAndCacheShape& shape, int vector, int heads_per_thread);

// rotary_and_cache_cuda by a kernel of its own and a given plan. One position per token. Throws std::logic_error if
// there is no such kernel.
void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, const RotaryPlan& plan, CUstream_st* stream);

}  // namespace mrrope
