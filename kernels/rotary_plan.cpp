#include "rotary_plan.h"

#include <limits>

namespace mrrope {
namespace {

bool starts_aligned(const HeadsView& view, int element_size) {
    return view.heads == 0 || (starts_aligned(view.in, view.in_strides, element_size) &&
                               starts_aligned(view.out, view.out_strides, element_size));
}

// What a thread takes, by how many threads there would be with one head and full vectors each. Few threads finish
// sooner with less to do; many have the phases to share. Microseconds on an H200 (plans_benchmark), by bytes of a
// vector and heads of a thread; a copy of as many bytes beside them:
//     tokens x heads    2, 1    8, 1   16, 1   16, 2     copy
//         1 x 40       0.950   1.002   1.182   1.204    0.878
//         4 x 40       1.200   1.228   1.412   1.366    1.164
//        16 x 40       1.952   1.730   1.835   1.808    1.829
//        64 x 40       3.245   1.943   2.243   1.945    2.048
//       128 x 40       4.818   2.265   2.623   2.299    2.360
//       256 x 40               3.297   3.167   2.804    3.035
//       512 x 40               5.317   4.675   3.877    4.365
//      1024 x 40               9.358   7.767   6.780    6.888
//      8192 x 40                       50.78   42.67    41.96
//        64 x  5       1.332   1.352   1.468   1.503    1.783
//      8192 x  5               9.395   7.738   6.831    6.884
//    131072 x  5                       99.63   84.90    81.60
// Four heads a thread were no better: 43.7 for 8192 x 40, 84.6 for the last; by a chosen table 89.4, two heads 87.4.
constexpr int64_t threads_for_vectors = 1 << 11;

int choose_vector(const RotaryShape& shape, int64_t threads, int full) {
    if (full == 1 || shape.with_rows || threads >= threads_for_full_vectors) return full;
    return threads < threads_for_vectors ? 1 : full / 2;
}

int choose_heads_per_thread(const RotaryShape& shape, int64_t threads, int full) {
    if (shape.with_rows) return heads_per_thread_with_rows;
    if (shape.heads == 1 || threads < threads_for_full_vectors) return 1;
    // Of five heads, two a thread leave every third thread with one.
    const bool divides_badly = shape.heads % 2 == 1 && shape.heads <= 5;
    return full > 1 && divides_badly ? 3 : 2;
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
    return plan_with(shape, choose_vector(shape, threads, split.vector),
                     choose_heads_per_thread(shape, threads, split.vector));
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
