#include "learnable_rotary_plan.h"

#include <algorithm>

#include "head_split.h"
#include "rotary_plan.h"

namespace mrrope {

LearnableRotaryShape shape_of(const LearnableRotaryGradientArgs& args) {
    const RotaryArgs& rotary = args.call.rotary;
    const RotaryShape shape = shape_of(rotary);
    const auto aligned = [&](int heads, const RotatedGradient& gradient) {
        return heads == 0 || starts_aligned(gradient.data, gradient.strides, shape.element_size);
    };
    return {.batch = shape.batch,
            .tokens = shape.tokens,
            .q_heads = rotary.q.heads,
            .k_heads = rotary.k.heads,
            .tables = args.call.tables,
            .head_dim = shape.head_dim,
            .rotary_dim = shape.rotary_dim,
            .element_size = shape.element_size,
            .aligned =
                shape.alignment == access_bytes && aligned(rotary.q.heads, args.q) && aligned(rotary.k.heads, args.k)};
}

LearnableRotaryPlan plan(const LearnableRotaryShape& shape, const Device& device) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    LearnableRotaryPlan plan;
    plan.vector = split.vector;
    plan.lanes = split.lanes;
    plan.lanes_per_pass = std::min(plan.lanes, learnable_block_threads);
    plan.slots = learnable_block_threads / plan.lanes_per_pass;
    plan.tables = shape.tables;
    const int heads = (shape.q_heads + shape.k_heads) / shape.tables;
    plan.head_groups = std::max(1, static_cast<int>(ceil_div(heads, learnable_heads_per_thread)));
    const int one_wave = device.sms * learnable_blocks_per_sm;
    const int64_t most_blocks = std::max(1, one_wave / shape.tables);
    // As few rounds as one wave allows, and as few blocks as those rounds need: the last round is nearly full.
    const int64_t items = shape.batch * shape.tokens * plan.head_groups;
    const int64_t block_rounds = std::max<int64_t>(1, ceil_div(items, plan.slots));
    plan.blocks_per_table = static_cast<int>(ceil_div(block_rounds, ceil_div(block_rounds, most_blocks)));
    return plan;
}

}  // namespace mrrope
