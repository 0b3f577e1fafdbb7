#include "qk_norm_rotary_and_cache_plan.h"

#include <algorithm>
#include <bit>

#include "head_split.h"
#include "launch_slices.h"

namespace mrrope {
namespace {

constexpr int warp = 32;

// A store has as many components as a load; as float8 they are fewer bytes.
bool starts_aligned(const HeadsView& view, int element_size, int stored_size) {
    return view.heads == 0 ||
           (starts_aligned(view.in, view.in_strides, element_size) &&
            starts_aligned(view.out, view.out_strides, stored_size, access_bytes / element_size * stored_size));
}

bool starts_aligned(const void* weights) {
    return reinterpret_cast<int64_t>(weights) % access_bytes == 0;
}

// Whether there is a kernel for the shape.
bool has_kernel(const QkNormRotaryAndCacheShape& shape, int heads_per_thread, bool needs_lookup, bool has_float8,
                int fixed_lanes = 0) {
    // Heads of one thread have one table.
    if (shape.is_per_head() && heads_per_thread != norm_heads_per_thread_with_lookup) return false;
    return has_norm_and_cache_kernel(shape.element_size, shape.pairing, shape.over, heads_per_thread, needs_lookup,
                                     has_float8, fixed_lanes);
}

// Lanes per head where it is made of whole vectors, two per lane, and a warp can hold it; else 0.
int lanes_per_head(const QkNormRotaryAndCacheShape& shape, int heads_per_thread) {
    const int vector = norm_and_cache_vector(shape.element_size, heads_per_thread);
    const bool fits = shape.aligned && shape.rotary_dim / 2 % vector == 0 && shape.head_dim % (2 * vector) == 0;
    const int lanes = shape.head_dim / (2 * vector);
    if (!fits || lanes > warp) return 0;
    // Over all heads, lanes of a head that are no power of two may lie in two warps, which share no maximum.
    const bool splits_heads = shape.over == NormOver::all_heads && !std::has_single_bit(static_cast<unsigned>(lanes));
    return shape.computes_q_scale && splits_heads ? 0 : lanes;
}

int max_heads(const QkNormRotaryAndCacheShape& shape) {
    return std::max({shape.q_heads, shape.kv_heads, shape.gate_heads});
}

int64_t threads_over_all_heads(const QkNormRotaryAndCacheShape& shape, int heads_per_thread) {
    const int64_t groups = groups_of(max_heads(shape), heads_per_thread, shape.table_heads);
    return ceil_div(lanes_per_head(shape, heads_per_thread) * groups, warp) * warp;
}

bool block_holds_row(const QkNormRotaryAndCacheShape& shape, int heads_per_thread) {
    const int64_t threads = threads_over_all_heads(shape, heads_per_thread);
    return threads > 0 && threads <= norm_and_cache_max_block_threads(NormOver::all_heads, heads_per_thread);
}

// Microseconds on an H200 by heads per thread, and of a copy of as many bytes; bfloat16, 32 heads of q, and 8 each of k
// and v, of 128. The thresholds count threads of one head with full vectors. Since then small launches have a simpler
// map and less code: 0.1 us less up to 64 tokens.
//     tokens           1       2       8     copy
//          1        1.37    1.66    3.05     0.89
//         16        1.62    1.89    4.11     1.50
//         64        2.01    2.11    4.36     1.79
//        256        4.65    3.50    4.91     2.95
//       1024        14.3    9.09    8.83     7.59
//       2048        27.2    16.1    15.2     13.6
//       8192         105    59.9    53.2     49.8
//      32768         412     231     203      191
// At 1024 tokens a float8 cache takes 9.5 us with two heads and 10.7 us with eight; with float8 q too, 10.0 and 9.8.
// Over all heads, 32 each of q, k and v; with a float8 cache in brackets:
//     tokens                1                2                4         copy
//         64      3.05 [3.02]      3.29 [3.37]      3.56 [5.00]         2.61
//        256      8.95 [8.75]      5.84 [6.10]      6.65 [7.06]         5.05
//       1024      30.9 [30.1]      16.8 [16.5]      17.2 [17.1]         14.8
//       8192                        109  [105]       108  [102]         98.5
int choose_heads_per_thread(const QkNormRotaryAndCacheShape& shape) {
    constexpr int64_t threads_for_two = 1 << 16;
    const bool rounds_cache_only = shape.rounds_cache && !shape.rounds_q;
    const int64_t threads_for_eight = rounds_cache_only ? 3 << 18 : 3 << 17;
    constexpr int64_t threads_for_four = 1 << 21;  // over all heads
    if (!has_kernel(shape, 1, shape.needs_lookup, shape.has_float8())) return norm_heads_per_thread_with_lookup;
    const int64_t heads = shape.q_heads + 2 * shape.kv_heads + shape.gate_heads;
    const int lanes = lanes_per_head(shape, 2);  // none where only half vectors fit, as in heads of 120
    const int64_t threads = shape.batch * shape.tokens * heads * lanes;
    if (shape.over == NormOver::all_heads) {
        if (threads < threads_for_two && block_holds_row(shape, 1)) return 1;
        return block_holds_row(shape, 2) && (max_heads(shape) <= 2 || threads < threads_for_four) ? 2 : 4;
    }
    if (threads < threads_for_two && lanes_per_head(shape, 1) > 0) return 1;
    const bool has_eight = max_heads(shape) > 2 && has_kernel(shape, 8, shape.needs_lookup, shape.has_float8());
    return has_eight && threads >= threads_for_eight ? 8 : 2;
}

// Threads of a block that takes one row component by component. That is latency-bound: in a large launch a head gets
// one warp, so that as many heads as possible are under way: 8192 tokens of 32/8 heads of 100, without norms, take 480
// us on an H200.
int row_block_threads(const QkNormRotaryAndCacheShape& shape, int rows_per_token) {
    constexpr int64_t rows_for_one_warp = 1 << 12;
    if (shape.over == NormOver::all_heads) return norm_row_block_threads;
    if (shape.batch * shape.tokens * rows_per_token >= rows_for_one_warp) return warp;
    return static_cast<int>(std::min<int64_t>(ceil_div(shape.head_dim / 2, warp) * warp, norm_row_block_threads));
}

// As many as the groups divide into. Every sharer computes two rotations or more.
int sharers_log2(int groups, const QkNormRotaryAndCachePlan& plan) {
    int log2 = 0;
    while (groups % (2 << log2) == 0 && (2 << log2) <= std::min(warp / plan.team, plan.vector / 2)) ++log2;
    return log2;
}

// One row for each kind that has heads, or one for each head.
HeadGroups rows_of(const QkNormRotaryAndCacheShape& shape, NormOver over) {
    const auto rows = [&](int heads) { return over == NormOver::head ? heads : std::min(heads, 1); };
    return {rows(shape.q_heads), rows(shape.kv_heads), rows(shape.kv_heads), rows(shape.gate_heads)};
}

}  // namespace

QkNormRotaryAndCacheShape shape_of(const QkNormRotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const int element_size = size_of(rotary.dtype);
    const int cached_size = size_of(args.cached_as, rotary.dtype);
    return {.batch = rotary.batch,
            .tokens = rotary.tokens,
            .q_heads = rotary.q.heads,
            .kv_heads = args.k.view.heads,
            .gate_heads = args.gate.heads,
            .head_dim = rotary.head_dim,
            .rotary_dim = rotary.rotary_dim,
            .element_size = element_size,
            .pairing = rotary.pairing,
            .over = args.over,
            .aligned = rotary.positions.rows <= max_rows_with_vectors &&
                       starts_aligned(rotary.q, element_size, size_of(args.q_stored_as, rotary.dtype)) &&
                       starts_aligned(args.k.view, element_size, cached_size) &&
                       starts_aligned(args.v.view, element_size, cached_size) &&
                       starts_aligned(args.gate, element_size, element_size) && starts_aligned(args.q_weight) &&
                       starts_aligned(args.k_weight),
            .needs_lookup =
                rotary.positions.row_of_pair != nullptr || rotary.choice.count > 1 || rotary.choice.is_per_head(),
            .computes_q_scale = args.q_scale_out != nullptr,
            .rounds_q = is_float8(args.q_stored_as),
            .rounds_cache = is_float8(args.cached_as),
            .table_heads = rotary.choice.heads,
            .has_query_factors = rotary.choice.query_factors != nullptr};
}

int64_t blocks_of(const QkNormRotaryAndCachePlan& plan, int64_t tokens) {
    return ceil_div(tokens, plan.tokens_per_block) * plan.units.count();
}

QkNormRotaryAndCachePlan plan(const QkNormRotaryAndCacheShape& shape, const Device& device) {
    return plan_with(shape, device, choose_heads_per_thread(shape));
}

// Independent of the device so far: the thresholds are those of an H200.
QkNormRotaryAndCachePlan plan_with(const QkNormRotaryAndCacheShape& shape, const Device&, int heads_per_thread) {
    QkNormRotaryAndCachePlan plan;
    const bool over_head = shape.over == NormOver::head;
    const auto fits = [&] {
        return over_head ? lanes_per_head(shape, heads_per_thread) > 0 : block_holds_row(shape, heads_per_thread);
    };
    const auto exists = [&](auto... options) { return has_kernel(shape, heads_per_thread, options...); };
    const bool needs_lookup = shape.needs_lookup || !exists(false, shape.has_float8());
    const bool has_float8 = shape.has_float8() || !exists(needs_lookup, false);
    if (exists(needs_lookup, has_float8) && fits()) {
        const int lanes = lanes_per_head(shape, heads_per_thread);
        plan.in_registers = true;
        plan.needs_lookup = needs_lookup;
        plan.has_float8 = has_float8;
        plan.vector = norm_and_cache_vector(shape.element_size, heads_per_thread);
        plan.lanes = lanes;
        plan.team = static_cast<int>(std::bit_ceil(static_cast<unsigned>(lanes)));
        plan.heads_per_thread = heads_per_thread;
        plan.groups = head_groups(shape.q_heads, shape.kv_heads, heads_per_thread, shape.table_heads);
        plan.groups.gates = groups_of(shape.gate_heads, heads_per_thread);
        plan.block_threads = norm_block_threads;
        plan.units = plan.groups;
        if (over_head) {
            const int64_t all_tokens = std::max<int64_t>(1, shape.batch * shape.tokens);
            const int64_t threads = ceil_div(all_tokens * plan.team, warp) * warp;
            plan.block_threads = static_cast<int>(std::min<int64_t>(threads, norm_block_threads));
            plan.tokens_per_block = plan.block_threads / plan.team;
            if (heads_per_thread == 8) {
                const bool is_fixed = shape.rotary_dim == shape.head_dim && exists(needs_lookup, has_float8, lanes);
                plan.fixed_lanes = is_fixed ? lanes : 0;
                plan.q_sharers_log2 = sharers_log2(plan.groups.queries, plan);
                plan.k_sharers_log2 = sharers_log2(plan.groups.keys, plan);
            }
        } else {
            // All blocks have the same size; kinds with fewer heads spread them over all threads.
            const int groups = groups_of(max_heads(shape), heads_per_thread, shape.table_heads);
            plan.groups = {std::min(shape.q_heads, groups), std::min(shape.kv_heads, groups),
                           std::min(shape.kv_heads, groups), std::min(shape.gate_heads, groups)};
            plan.block_threads = static_cast<int>(threads_over_all_heads(shape, heads_per_thread));
            plan.units = rows_of(shape, shape.over);
        }
    } else {
        plan.units = rows_of(shape, shape.over);
        plan.block_threads = row_block_threads(shape, plan.units.count());
    }
    const int64_t threads_of_units = int64_t{plan.units.count()} * plan.block_threads;
    // The last block of each unit may have idle threads.
    plan.tokens_per_launch =
        tokens_per_launch(shape.batch, shape.tokens, ceil_div(threads_of_units, plan.tokens_per_block),
                          static_cast<int>(threads_of_units));
    return plan;
}

}  // namespace mrrope
