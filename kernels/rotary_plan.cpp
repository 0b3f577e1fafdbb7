#include "rotary_plan.h"

#include <limits>

namespace mrrope {
namespace {

bool starts_aligned(const HeadsView& view, int element_size) {
    return view.heads == 0 || (starts_aligned(view.in, view.in_strides, element_size) &&
                               starts_aligned(view.out, view.out_strides, element_size));
}

// Heads that share a thread share its phases, but wait for each other. Microseconds on an H200, bfloat16, head_dim 128,
// in place, by heads a thread, in trials of one version of the kernel or another:
//     tokens x heads      1      2      4
//        64 x 40       2.17   2.18
//       256 x 40       3.37   3.48
//      8192 x 40       58.0   43.3   44.7
//    131072 x  5       99.8   88.7   86.2
int choose_heads_per_thread(const RotaryShape& shape, int lanes) {
    constexpr int64_t few_threads = 1 << 17;
    constexpr int64_t many_threads = 1 << 18;
    const int64_t threads = shape.batch * shape.tokens * shape.heads * lanes;
    if (shape.with_rows) return heads_per_thread_with_rows;
    if (shape.heads == 1 || threads < few_threads) return 1;
    return shape.heads > 2 && shape.heads <= 8 && threads >= many_threads ? 4 : 2;
}

}  // namespace

RotaryShape shape_of(const RotaryArgs& args) {
    const int element_size = size_of(args.dtype);
    return {.batch = args.batch,
            .tokens = args.tokens,
            .heads = args.q.heads + args.k.heads,
            .head_dim = args.head_dim,
            .rotary_dim = args.rotary_dim,
            .element_size = element_size,
            .aligned = starts_aligned(args.q, element_size) && starts_aligned(args.k, element_size),
            .with_rows = args.positions.row_of_pair != nullptr};
}

RotaryPlan plan_heads(const RotaryShape& shape, const HeadSplit& split, int heads_per_thread, int head_groups) {
    RotaryPlan plan;
    plan.vector = split.vector;
    plan.lanes = split.lanes;
    plan.heads_per_thread = heads_per_thread;
    plan.head_groups = head_groups;
    // The last block of a launch may count past its last thread.
    const int64_t most_threads = std::numeric_limits<int32_t>::max() - rotary_block_threads;
    const int64_t most_tokens = std::max<int64_t>(1, most_threads / plan.threads_per_token());
    const int64_t all_tokens = shape.batch * shape.tokens;
    plan.tokens_per_launch = all_tokens <= most_tokens ? all_tokens : std::min(most_tokens, shape.tokens);
    return plan;
}

RotaryPlan plan_rotary(const RotaryShape& shape) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int heads_per_thread = choose_heads_per_thread(shape, split.lanes);
    return plan_heads(shape, split, heads_per_thread, static_cast<int>(ceil_div(shape.heads, heads_per_thread)));
}

}  // namespace mrrope
