#include "learnable_rotary_plan.h"

#include <algorithm>

#include "head_split.h"
#include "rotary_plan.h"

namespace mrrope {

LearnableRotaryShape shape_of(const LearnableRotaryArgs& args) {
    const RotaryShape shape = shape_of(args.rotary);
    return {.batch = shape.batch,
            .tokens = shape.tokens,
            .q_heads = args.rotary.q.heads,
            .k_heads = args.rotary.k.heads,
            .tables = args.tables,
            .head_dim = shape.head_dim,
            .rotary_dim = shape.rotary_dim,
            .element_size = shape.element_size,
            .aligned = shape.aligned};
}

LearnableRotaryShape shape_of(const LearnableRotaryGradientArgs& args) {
    LearnableRotaryShape shape = shape_of(args.call);
    const auto aligned = [&](int heads, const RotatedGradient& gradient) {
        return heads == 0 || starts_aligned(gradient.data, gradient.strides, shape.element_size);
    };
    shape.aligned = shape.aligned && aligned(shape.q_heads, args.q) && aligned(shape.k_heads, args.k);
    return shape;
}

LearnableRotaryPlan plan(const LearnableRotaryShape& shape, const Device& device, bool gradient) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    LearnableRotaryPlan plan;
    plan.vector = split.vector;
    plan.lanes = split.lanes;
    plan.lanes_per_pass = std::min(plan.lanes, learnable_block_threads);
    plan.slots = learnable_block_threads / plan.lanes_per_pass;
    plan.tables = shape.tables;
    const int heads = (shape.q_heads + shape.k_heads) / shape.tables;
    plan.head_groups = std::max(1, static_cast<int>(ceil_div(heads, learnable_heads_per_thread)));
    const int64_t one_wave = int64_t{device.sms} * learnable_blocks_per_sm(gradient, device.pdl);
    const int64_t items = shape.batch * shape.tokens * plan.head_groups;
    const int64_t useful = std::max<int64_t>(1, ceil_div(items, plan.slots));
    plan.blocks_per_table = static_cast<int>(std::clamp<int64_t>(one_wave / shape.tables, 1, useful));
    return plan;
}

}  // namespace mrrope
