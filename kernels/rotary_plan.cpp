#include "rotary_plan.h"

#include <limits>

namespace mrrope {
namespace {

bool starts_aligned(const HeadsView& view, int element_size) {
    return view.heads == 0 || (starts_aligned(view.in, view.in_strides, element_size) &&
                               starts_aligned(view.out, view.out_strides, element_size));
}

// What a thread takes, by how many threads there would be with one head and full vectors each. Few threads finish
// sooner with less to do; many have the phases to share. Microseconds on an H200, in turns with a copy, by bytes of a
// vector and heads of a thread; by a chosen table, as it was guessed then, in brackets:
//     tokens x heads    2, 1    8, 1       16, 2           16, 3        copy
//         1 x 40        0.88    0.95                                    0.91
//        16 x 40                1.39        1.53                        1.49
//        64 x 40                1.59        1.71                        1.71
//       128 x 40                1.91        2.09                        2.01
//       256 x 40                2.91        2.75                        2.70
//      1024 x 40                        6.83 [6.96]    7.11 [7.06]      6.58
//      8192 x 40                       42.50 [43.02]  42.92 [43.03]    41.78
//    131072 x  5                       83.32 [90.19]  83.26 [84.18]    81.40
//     65536 x  9                       74.34 [77.24]  75.30 [75.26]    73.12
// One head and 16 bytes were no better anywhere; four heads, which no kernel takes any more, were 4 % faster for
// 1024 x 40, and slower for more.
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

// How much longer a chosen table takes than a given one, in percent, on two H200s; the second prefetched positions
// where it did not guess:
//     tokens x heads    threads      guessed       not guessed
//       256 x 40        2^15.3      2.9,  2.5      26.6
//      1024 x 40        2^17.3      0.1,  0.1       6.7,  6.4
//      8192 x 40        2^20.3      0.0, -0.2       1.9,  1.0
//    131072 x  5        2^21        1.9,  0.2       0.6,  0.2    three heads a thread
//      8192 x 72        2^21.2      2.3, -0.3       2.5,  0.8
//    131072 x 40        2^24.3      3.5,  1.8       2.0,  0.0
// The chips differ: perhaps the index, which all threads read, was in a better place of the second's cache.
RotaryPlan plan_with(const RotaryShape& shape, int vector, int heads_per_thread) {
    RotaryPlan plan =
        plan_groups(shape, vector, heads_per_thread, static_cast<int>(ceil_div(shape.heads, heads_per_thread)));
    plan.guesses_table = shape.batch * shape.tokens * plan.threads_per_token() < threads_for_no_guess(heads_per_thread);
    return plan;
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
