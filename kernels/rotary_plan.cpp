#include "rotary_plan.h"

#include <limits>

namespace mrrope {
namespace {

bool starts_aligned(const HeadsView& view, int element_size) {
    return view.heads == 0 || (starts_aligned(view.in, view.in_strides, element_size) &&
                               starts_aligned(view.out, view.out_strides, element_size));
}

// What a thread takes, by how many threads there would be with one head and full vectors each. Few threads finish
// sooner with less to do; many have the phases to share. Microseconds on an H200, bfloat16, head_dim 128, in place,
// blocks of 128 threads, by bytes of a vector and heads of a thread; a copy of as many bytes beside them:
//     tokens x heads    8, 1   16, 1   16, 2   16, 4     copy
//         1 x 40       0.982   1.124                    0.882
//        16 x 40       1.471   1.444                    1.464
//        64 x 40       1.708   1.761                    1.679
//       128 x 40       2.004   2.063                    2.035
//       256 x 40       2.963   2.869   3.359            2.745
//       512 x 40       5.005   4.675   4.657            4.074
//      1024 x 40               7.764   7.215            6.673
//      8192 x 40                       43.28   43.58    41.47
//      8192 x  5               7.781   7.161   7.454    6.671
//     32768 x  5                       23.05   23.34    21.88
//    131072 x  5                       83.44   83.69    80.29
// The last, by a chosen table: 87.5 with two heads a thread, 84.6 with four. Of the smallest, measured again after a
// graph that is thrown away, as mrrope bench does:
//     tokens x heads    one component    8, 1     copy
//         1 x 40                1.139   1.210    1.068
//         4 x 40                1.226   1.288    1.308
//        16 x 40                1.971   1.750    1.890
constexpr int64_t threads_for_vectors = 1 << 11;
constexpr int64_t threads_for_four_heads = 1 << 21;

int choose_vector(const RotaryShape& shape, int64_t threads, int full) {
    if (full == 1 || shape.with_rows || threads >= threads_for_full_vectors) return full;
    return threads < threads_for_vectors ? 1 : full / 2;
}

int choose_heads_per_thread(const RotaryShape& shape, int64_t threads) {
    if (shape.with_rows) return heads_per_thread_with_rows;
    if (shape.heads == 1 || threads < threads_for_two_heads) return 1;
    return shape.heads > 2 && shape.heads <= 8 && threads >= threads_for_four_heads ? 4 : 2;
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

RotaryPlan plan_rotary(const RotaryShape& shape) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int64_t threads = shape.batch * shape.tokens * shape.heads * split.lanes;
    return plan_with(shape, choose_vector(shape, threads, split.vector), choose_heads_per_thread(shape, threads));
}

RotaryPlan plan_with(const RotaryShape& shape, int vector, int heads_per_thread) {
    return plan_groups(shape, vector, heads_per_thread, static_cast<int>(ceil_div(shape.heads, heads_per_thread)));
}

RotaryPlan plan_groups(const RotaryShape& shape, int vector, int heads_per_thread, int head_groups) {
    RotaryPlan plan;
    plan.vector = vector;
    plan.lanes = shape.rotary_dim / 2 / vector;
    plan.heads_per_thread = heads_per_thread;
    plan.head_groups = head_groups;
    // The last block of a launch may count past its last thread.
    const int64_t most_threads = std::numeric_limits<int32_t>::max() - rotary_block_threads;
    const int64_t most_tokens = std::max<int64_t>(1, most_threads / plan.threads_per_token());
    const int64_t all_tokens = shape.batch * shape.tokens;
    plan.tokens_per_launch = all_tokens <= most_tokens ? all_tokens : std::min(most_tokens, shape.tokens);
    return plan;
}

}  // namespace mrrope
