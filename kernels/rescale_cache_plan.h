#pragma once

#include <algorithm>
#include <cstdint>

#include "mrrope/rescale_cache.h"

// How turning cached keys is laid over the GPU: pure functions of the arguments, tested without one.

namespace mrrope {

inline constexpr int rescale_cache_block_threads = 64;
// Before sm_90 the same code takes a few more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int rescale_cache_resident_blocks = 6;
#else
inline constexpr int rescale_cache_resident_blocks = 8;
#endif
inline constexpr int rescale_cache_heads_per_thread = 4;
// Their pointers travel as parameters of the kernel.
inline constexpr int most_layers_per_launch = 128;

// All blocks go through the layers together. A thread keeps its lane and its heads, and goes from token to token in
// steps of `token_step`. Threads that make up no whole token rest.
struct RescaleCachePlan {
    int vector = 1;
    int lanes = 1;        // threads a head
    int head_groups = 1;  // groups of rescale_cache_heads_per_thread heads
    int blocks = 1;       // few enough to return in no time where there is nothing to turn
    int token_step = 1;
};

RescaleCachePlan plan_rescale(const RescaleCacheArgs& args);

// Calls f with parts of as many layers as one launch takes.
template <class F>
void for_each_rescale_launch(const RescaleCacheArgs& args, F&& f) {
    for (size_t layer = 0; layer < args.keys.size(); layer += most_layers_per_launch) {
        RescaleCacheArgs part = args;
        part.keys = args.keys.subspan(layer, std::min<size_t>(most_layers_per_launch, args.keys.size() - layer));
        f(part);
    }
}

}  // namespace mrrope
