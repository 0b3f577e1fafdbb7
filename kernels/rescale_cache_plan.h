#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device_properties.h"
#include "mrrope/rescale_cache.h"

// Launch plan of the kernel that re-rotates cached keys: pure host functions of shape and device, tested without a GPU.

namespace mrrope {

struct RescaleCacheShape {
    int64_t tokens = 0;
    int heads = 0;
    int rotary_dim = 0;
    int element_size = 0;
    bool aligned = false;  // every head of every layer starts at a multiple of 16 bytes
    int table_heads = 1;
};

RescaleCacheShape shape_of(const RescaleCacheArgs& args);

inline constexpr int rescale_cache_block_threads = 64;
// Minimum blocks per SM for __launch_bounds__. Before sm_90 the same code needs a few more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int rescale_cache_min_blocks_per_sm = 6;
#else
inline constexpr int rescale_cache_min_blocks_per_sm = 8;
#endif
inline constexpr int rescale_cache_heads_per_thread = 4;
// The layers' pointers and table numbers are kernel parameters: 1.5 KiB of 4 KiB.
inline constexpr int max_layers_per_launch = 128;

// A persistent grid that goes through the layers. A thread keeps its lane and its heads, and steps through the tokens
// by `token_step`. Threads past the last whole token idle.
struct RescaleCachePlan {
    int vector = 1;
    int lanes = 1;        // threads per head
    int head_groups = 1;  // of up to rescale_cache_heads_per_thread heads of one head table
    int table_heads = 1;
    // At most one wave, so that a call that changes nothing returns at once; more only if one token needs more.
    int blocks = 1;
    int token_step = 1;
};

RescaleCachePlan plan(const RescaleCacheShape& shape, const Device& device);

// Calls f with the arguments of every launch: at most max_layers_per_launch layers each.
template <class F>
void for_each_rescale_launch(const RescaleCacheArgs& args, F&& f) {
    for (size_t layer = 0; layer < args.keys.size(); layer += max_layers_per_launch) {
        RescaleCacheArgs part = args;
        const size_t layers = std::min<size_t>(max_layers_per_launch, args.keys.size() - layer);
        part.keys = args.keys.subspan(layer, layers);
        if (!args.layer_of_keys.empty()) part.layer_of_keys = args.layer_of_keys.subspan(layer, layers);
        f(part);
    }
}

}  // namespace mrrope
