#pragma once

#include "device_properties.h"
#include "mrrope/rotary_and_cache.h"
#include "rotary_plan.h"

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
    bool aligned = false;  // every vector that is loaded or stored is aligned to its size
    int table_heads = 1;   // TableChoice::heads
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

// rotary_and_cache_cuda by a kernel of its own and a given plan. One position per token.
void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, const RotaryPlan& plan, CUstream_st* stream);

}  // namespace mrrope
