#include "rotary_plan.h"

#include <cstdlib>

#include "launch_slices.h"

namespace mrrope {
namespace {

bool starts_aligned(const HeadsView& view, int element_size) {
    return view.heads == 0 || (starts_aligned(view.in, view.in_strides, element_size) &&
                               starts_aligned(view.out, view.out_strides, element_size));
}

bool tokens_are_adjacent(const HeadsView& view) {
    const auto adjacent = [](const HeadStrides& strides) { return std::abs(strides.token) < std::abs(strides.head); };
    return view.heads <= 1 || (adjacent(view.in_strides) && adjacent(view.out_strides));
}

// Work per thread, by the number of threads with one head and a full vector each. Small launches are latency-bound and
// finish sooner with less work per thread; large ones share cos/sin between heads. Microseconds on an H200, timed
// round-robin with a copy, by bytes per vector and heads per thread; with several tables and a speculated index in
// brackets:
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
// One head and 16 bytes were never faster. Four heads, no longer instantiated, were 4 % faster at 1024 x 40 and slower
// above.
constexpr int64_t threads_for_vectors = 1 << 11;

// With an even number of heads per head table, two per thread gain earlier: 1024 x 9/3, 64 wide, take 2.31 us, half
// vectors of one head 2.44 (512 x 9/3, 128 wide: 2.41 and 2.46).
constexpr int64_t threads_for_full_vectors_of_head_tables = 3 << 14;

bool takes_full_vectors(const RotaryShape& shape, int64_t threads) {
    const bool has_even_head_tables = shape.is_per_head() && shape.heads / shape.table_heads % 2 == 0;
    return threads >= (has_even_head_tables ? threads_for_full_vectors_of_head_tables : threads_for_full_vectors);
}

bool has_rows_and_head_tables(const RotaryShape& shape) {
    return shape.with_rows && shape.is_per_head();
}

int choose_vector(const RotaryShape& shape, int64_t threads, int full) {
    if (full == 1 || has_rows_and_head_tables(shape) || takes_full_vectors(shape, threads)) return full;
    return threads < threads_for_vectors ? 1 : full / 2;
}

// Heads of a head table, an odd number of them. Microseconds on an H200 for five, by heads per thread, full vectors:
//     tokens x heads      2       3       5    one table
//       256 x 32/8     3.04    2.87    2.89    2.75
//       384 x 32/8     3.62    3.73    3.52    3.44
//       512 x 32/8     4.30    4.32    4.14    4.06
//       768 x 32/8     5.95    5.40    6.05    5.23
//      1024 x 32/8     7.14    7.21    6.73    6.88
//      1280 x 32/8     8.53    8.43    8.77    8.13
//      2048 x 32/8    12.51   12.43   12.60   12.14
//      8192 x 32/8    43.78   43.46   44.15   42.85
// All five per thread gain where their blocks nearly fill one wave, or at most half of one; why not between is not
// known. Half vectors of one head take 2.78 at 256 tokens, but 3.24 in `mrrope bench`, where five take 3.03. Nine heads
// go three per thread: 8192 x 64/8 takes 76.0 us, with two per thread and a speculated index 80.9. Three heads go to
// one thread; this is not measured.
int choose_heads_per_thread_of_table(int heads, int64_t threads, const Device& device) {
    const int64_t one_wave =
        int64_t{device.sms} * rotary_min_blocks_per_sm(heads_of_whole_table) * rotary_block_threads;
    const int64_t with_all_heads = threads / heads;
    const bool fills_wave = with_all_heads <= one_wave && with_all_heads >= one_wave * 9 / 10;
    if (heads == heads_of_whole_table && (fills_wave || with_all_heads <= one_wave / 2)) return heads;
    return heads <= 5 || heads % 3 == 0 ? 3 : 2;
}

// Positions of their own make pairs more costly, which more heads share. Microseconds on an H200 with three positions
// per token, by heads per thread, and of a copy in the same run:
//                                    2       3    copy
//       256 x 32                  3.16    3.20    2.89
//      1024 x 32                  6.40    6.40    6.00
//      8192 x 32                  38.6    37.8    35.5
//    131072 x 32                   545     530     510
//      4608 x 48, interleaved     33.1    32.7    30.9
//     32760 x 80, interleaved      341     333     319
constexpr int64_t threads_for_three_heads_with_rows = 1 << 20;

int choose_heads_per_thread(const RotaryShape& shape, const Device& device, int64_t threads, int full) {
    if (has_rows_and_head_tables(shape)) return heads_per_thread_with_rows;
    const int heads = shape.heads / shape.table_heads;
    if (heads == 1 || !takes_full_vectors(shape, threads)) return 1;
    const bool takes_three = shape.with_rows && threads >= threads_for_three_heads_with_rows;
    if (full > 1 && heads > 2 && takes_three) return 3;
    if (full == 1 || heads % 2 == 0) return 2;
    if (shape.is_per_head()) return choose_heads_per_thread_of_table(heads, threads, device);
    return heads <= 5 ? 3 : 2;  // with five heads two per thread would leave every third thread with one
}

// Speculating on the table index hides the latency of loading it, but costs every thread a second load. Extra time with
// several tables over one table, in percent, on two H200s; the second prefetched positions where it did not speculate:
//     tokens x heads    threads    speculative     after the wait
//       256 x 40        2^15.3      2.9,  2.5      26.6
//      1024 x 40        2^17.3      0.1,  0.1       6.7,  6.4
//      8192 x 40        2^20.3      0.0, -0.2       1.9,  1.0
//    131072 x  5        2^21        1.9,  0.2       0.6,  0.2    three heads per thread
//      8192 x 72        2^21.2      2.3, -0.3       2.5,  0.8
//    131072 x 40        2^24.3      3.5,  1.8       2.0,  0.0
// Why the chips differ is not known; perhaps the index, which all threads read, sat in a nearer L2 slice on the second.
constexpr int64_t threads_without_speculation(int heads_per_thread) {
    return heads_per_thread <= 2 ? 1 << 22 : 1 << 21;
}

// Without PDL there is nothing to overlap with, and rotary_schedule is the same for `speculative` and `indexed`.
bool speculates_table(const RotaryShape& shape, const RotaryPlan& plan, const Device& device) {
    const int64_t threads = shape.batch * shape.tokens * plan.threads_per_token();
    return device.pdl && threads < threads_without_speculation(plan.heads_per_thread);
}

}  // namespace

bool copies_tail(const RotaryArgs& args) {
    return args.rotary_dim < args.head_dim && (args.q.in != args.q.out || args.k.in != args.k.out);
}

RotaryShape shape_of(const RotaryArgs& args) {
    const int element_size = size_of(args.dtype);
    return {.batch = args.batch,
            .tokens = args.tokens,
            .heads = args.q.heads + args.k.heads,
            .head_dim = args.head_dim,
            .rotary_dim = args.rotary_dim,
            .element_size = element_size,
            .aligned = args.positions.rows <= max_rows_with_vectors && starts_aligned(args.q, element_size) &&
                       starts_aligned(args.k, element_size),
            .with_rows = args.positions.row_of_pair != nullptr,
            .copies_tail = copies_tail(args),
            .tokens_adjacent = tokens_are_adjacent(args.q) && tokens_are_adjacent(args.k),
            .table_heads = args.choice.heads,
            .has_query_factors = args.choice.query_factors != nullptr};
}

RotaryPlan plan(const RotaryShape& shape, const Device& device) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int64_t threads = shape.batch * shape.tokens * shape.heads * split.lanes;
    RotaryPlan plan = shape.copies_tail && has_whole_head_plan(shape)
                          ? plan_whole_heads(shape, device)
                          : plan_with(shape, device, choose_vector(shape, threads, split.vector),
                                      choose_heads_per_thread(shape, device, threads, split.vector));
    // 8192 x 32/8 contiguous bhsd take 1.013 copies on an H200; with heads inside 1.05.
    plan.tokens_inside = shape.tokens_adjacent && threads >= threads_for_full_vectors &&
                         takes_tokens_inside(plan.vector * shape.element_size, plan.heads_per_thread, plan.whole_heads);
    return plan;
}

RotaryPlan plan_with(const RotaryShape& shape, const Device& device, int vector, int heads_per_thread) {
    RotaryPlan plan =
        plan_groups(shape, vector, heads_per_thread, groups_of(shape.heads, heads_per_thread, shape.table_heads));
    plan.table_heads = shape.table_heads;
    plan.speculates_table = speculates_table(shape, plan, device);
    return plan;
}

bool has_whole_head_plan(const RotaryShape& shape) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int tail = shape.head_dim - shape.rotary_dim;
    return split.vector > 1 && tail > 0 && tail % (2 * split.vector) == 0;
}

RotaryPlan plan_whole_heads(const RotaryShape& shape, const Device& device) {
    const int full = full_vector(shape.element_size);
    RotaryPlan plan = plan_with(shape, device, full, heads_per_thread_of_whole_heads);
    plan.whole_heads = true;
    plan.lanes = shape.head_dim / 2 / full;
    plan.tokens_per_launch =
        tokens_per_launch(shape.batch, shape.tokens, plan.threads_per_token(), rotary_block_threads);
    plan.speculates_table = speculates_table(shape, plan, device);
    return plan;
}

RotaryPlan plan_groups(const RotaryShape& shape, int vector, int heads_per_thread, int head_groups) {
    RotaryPlan plan;
    plan.vector = vector;
    plan.lanes = shape.rotary_dim / 2 / vector;
    plan.heads_per_thread = heads_per_thread;
    plan.head_groups = head_groups;
    plan.tokens_per_launch =
        tokens_per_launch(shape.batch, shape.tokens, plan.threads_per_token(), rotary_block_threads);
    return plan;
}

}  // namespace mrrope
