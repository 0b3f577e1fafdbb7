#include "rescale_cache_plan.h"

#include "head_split.h"

namespace mrrope {

RescaleCacheShape shape_of(const RescaleCacheArgs& args) {
    const int element_size = size_of(args.dtype);
    return {.tokens = args.tokens,
            .heads = args.heads,
            .rotary_dim = args.rotary_dim,
            .element_size = element_size,
            .aligned = std::all_of(args.keys.begin(), args.keys.end(),
                                   [&](const void* keys) { return starts_aligned(keys, args.strides, element_size); }),
            .table_heads = args.table_heads};
}

RescaleCachePlan plan(const RescaleCacheShape& shape, const Device& device) {
    const HeadSplit split = split_head(shape.rotary_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int head_groups = groups_of(shape.heads, rescale_cache_heads_per_thread, shape.table_heads);
    const int64_t threads_per_token = static_cast<int64_t>(split.lanes) * head_groups;
    const int64_t one_wave = int64_t{device.sms} * rescale_cache_min_blocks_per_sm;
    const int64_t for_all_tokens = ceil_div(shape.tokens * threads_per_token, rescale_cache_block_threads);
    const int64_t for_one_token = ceil_div(threads_per_token, rescale_cache_block_threads);
    const int64_t blocks = std::max(for_one_token, std::min(for_all_tokens, one_wave));
    return {.vector = split.vector,
            .lanes = split.lanes,
            .head_groups = head_groups,
            .table_heads = shape.table_heads,
            .blocks = static_cast<int>(blocks),
            .token_step = static_cast<int>(blocks * rescale_cache_block_threads / threads_per_token)};
}

}  // namespace mrrope
