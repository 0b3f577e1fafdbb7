#include "rescale_cache_plan.h"

#include "head_split.h"

namespace mrrope {

// As many as an H200 holds at a time, on 132 processors.
constexpr int64_t most_blocks = 132 * rescale_cache_resident_blocks;

RescaleCachePlan plan_rescale(const RescaleCacheArgs& args) {
    const int element_size = size_of(args.dtype);
    const bool aligned = std::all_of(args.keys.begin(), args.keys.end(), [&](const void* keys) {
        return starts_aligned(keys, args.strides, element_size);
    });
    const HeadSplit split = split_head(args.rotary_dim, args.rotary_dim, element_size, aligned);
    const auto head_groups = static_cast<int>(ceil_div(args.heads, rescale_cache_heads_per_thread));
    const int64_t threads_per_token = static_cast<int64_t>(split.lanes) * head_groups;
    const int64_t wanted = ceil_div(args.tokens * threads_per_token, rescale_cache_block_threads);
    const int64_t least = ceil_div(threads_per_token, rescale_cache_block_threads);
    const int64_t blocks = std::max(least, std::min(wanted, most_blocks));
    return {.vector = split.vector,
            .lanes = split.lanes,
            .head_groups = head_groups,
            .blocks = static_cast<int>(blocks),
            .token_step = static_cast<int>(blocks * rescale_cache_block_threads / threads_per_token)};
}

}  // namespace mrrope
