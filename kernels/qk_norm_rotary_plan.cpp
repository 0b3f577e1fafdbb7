#include "qk_norm_rotary_plan.h"

#include <algorithm>
#include <bit>

#include "head_split.h"
#include "launch_slices.h"
#include "rotary_plan.h"

namespace mrrope {
namespace {

constexpr int warp = 32;

bool starts_aligned(const void* weights) {
    return reinterpret_cast<int64_t>(weights) % access_bytes == 0;
}

// Lanes per head where it is made of whole vectors, two per lane, and a warp can hold it; else 0.
int lanes_per_head(const QkNormRotaryShape& shape) {
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    if (split.vector == 1 || shape.head_dim % (2 * split.vector) != 0) return 0;
    const int lanes = shape.head_dim / (2 * split.vector);
    return lanes <= warp ? lanes : 0;
}

// Whether there is a kernel for the shape.
bool has_kernel(const QkNormRotaryShape& shape, int heads_per_thread, bool needs_lookup) {
    // Heads of one thread have one table.
    if (shape.is_per_head() && heads_per_thread != norm_heads_per_thread_with_lookup) return false;
    return has_norm_kernel(shape.element_size, shape.pairing, shape.over, heads_per_thread, needs_lookup);
}

int64_t threads_over_all_heads(const QkNormRotaryShape& shape, int lanes, int heads_per_thread) {
    const int64_t groups = groups_of(std::max(shape.q_heads, shape.k_heads), heads_per_thread, shape.table_heads);
    return ceil_div(lanes * groups, warp) * warp;
}

// Heads of one thread share cos/sin but wait for each other's loads. Microseconds on an H200 by heads per thread, and
// of a copy of as many bytes; bfloat16, head_dim 128, in place. Measured on successive versions of the kernels;
// plans_benchmark measures the present ones.
//     tokens x heads       1       2       8     copy
//         1 x 32 + 8    1.39    1.54    2.54     1.10
//        16 x 32 + 8    1.90    2.08    3.34     1.87
//        64 x 32 + 8    2.34    2.06    3.62     2.03
//       256 x 32 + 8    3.45    3.10    4.23     3.07
//      1024 x 32 + 8    9.80    7.31    7.58     6.89
//      4096 x 32 + 8    33.8    24.7    23.9     21.7
//      4096 x 32 + 32   53.0    38.5    36.2     33.8
//      8192 x 32 + 8    65.6    47.3    44.6     41.8
//     32768 x 32 + 8     253     181     166      159
// Over all heads, where the reduction makes all wait for each other anyway, with the three blocks of two heads per
// thread that sm_90 has room for. With two blocks, two heads took 7.27 at 512 tokens:
//     tokens x heads               2       4     copy
//       256 x 32 + 32           3.96    5.24     3.86
//       512 x 32 + 32           6.38    6.82     5.94
//      1024 x 32 + 32           10.8    12.4     9.99
//      2048 x 32 + 32           20.3    21.4     18.0
//      4096 x 32 + 32           39.3    38.4     34.3
//      8192 x 32 + 32           76.2    71.9     66.1
int choose_heads_per_thread(const QkNormRotaryShape& shape, const Device& device, int lanes) {
    constexpr int64_t threads_for_two = 1 << 12;
    constexpr int64_t threads_for_eight = 1 << 20;
    // Three positions per token, 32 + 8 heads: 1024 tokens take 9.96 us, with two heads per thread 11.1; 8192 tokens
    // 49.8 and 67.8; with one position 7.98 and 46.0.
    constexpr int64_t threads_for_eight_with_lookup = 1 << 18;
    const int64_t max_threads_for_two_over_all_heads = device.pdl ? 1 << 20 : 1 << 17;
    const int64_t threads = shape.batch * shape.tokens * (shape.q_heads + shape.k_heads) * lanes;
    const int max_heads = std::max(shape.q_heads, shape.k_heads);
    if (shape.needs_lookup || !has_kernel(shape, norm_heads_per_thread_with_lookup, /*needs_lookup=*/false)) {
        const bool has_eight = max_heads > 2 && has_kernel(shape, 8, /*needs_lookup=*/true);
        return has_eight && threads >= threads_for_eight_with_lookup ? 8 : norm_heads_per_thread_with_lookup;
    }
    if (shape.over == NormOver::all_heads) {
        const bool two_fit = threads_over_all_heads(shape, lanes, 2) <= norm_max_block_threads;
        return two_fit && (max_heads <= 2 || threads <= max_threads_for_two_over_all_heads) ? 2 : 4;
    }
    if (max_heads == 1 || threads < threads_for_two) return 1;
    return max_heads > 4 && threads >= threads_for_eight ? 8 : 2;
}

int rows_of(const QkNormRotaryShape& shape, int heads) {
    return shape.over == NormOver::head ? heads : heads > 0 ? 1 : 0;
}

int64_t threads_per_token(const QkNormRotaryPlan& plan, NormOver over) {
    if (plan.in_registers && over == NormOver::head) return static_cast<int64_t>(plan.team) * plan.groups();
    return blocks_of(plan, over, 1) * plan.block_threads;
}

}  // namespace

QkNormRotaryShape shape_of(const QkNormRotaryArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const RotaryShape shape = shape_of(rotary);
    return {
        .batch = shape.batch,
        .tokens = shape.tokens,
        .q_heads = rotary.q.heads,
        .k_heads = rotary.k.heads,
        .head_dim = shape.head_dim,
        .rotary_dim = shape.rotary_dim,
        .element_size = shape.element_size,
        .pairing = rotary.pairing,
        .over = args.over,
        .aligned = shape.alignment == access_bytes && starts_aligned(args.q_weight) && starts_aligned(args.k_weight),
        .needs_lookup = shape.lookup != TableLookup::single || shape.is_per_head(),
        .table_heads = shape.table_heads,
        .has_query_factors = shape.has_query_factors};
}

QkNormRotaryShape shape_of(const QkNormRotaryGradientArgs& args) {
    QkNormRotaryShape shape = shape_of(args.call);
    const auto aligned = [&](const HeadsView& view, const OutputGradient& gradient) {
        return view.heads == 0 || starts_aligned(gradient.data, gradient.strides, shape.element_size);
    };
    shape.aligned = shape.aligned && aligned(args.call.rotary.q, args.q) && aligned(args.call.rotary.k, args.k);
    return shape;
}

int64_t blocks_of(const QkNormRotaryPlan& plan, NormOver over, int64_t tokens) {
    if (!plan.in_registers) return tokens * plan.groups();
    if (over == NormOver::all_heads) return tokens * ((plan.q_groups > 0) + (plan.k_groups > 0));
    return ceil_div(tokens * plan.team * plan.groups(), plan.block_threads);
}

QkNormRotaryPlan plan(const QkNormRotaryShape& shape, const Device& device) {
    const int lanes = lanes_per_head(shape);
    return plan_with(shape, device, lanes == 0 ? 0 : choose_heads_per_thread(shape, device, lanes));
}

QkNormRotaryPlan plan_with(const QkNormRotaryShape& shape, const Device&, int heads_per_thread) {
    QkNormRotaryPlan plan;
    const int lanes = lanes_per_head(shape);
    const bool needs_lookup = shape.needs_lookup || !has_kernel(shape, heads_per_thread, /*needs_lookup=*/false);
    const auto fits = [&] {
        return shape.over == NormOver::head ||
               threads_over_all_heads(shape, lanes, heads_per_thread) <= norm_max_block_threads;
    };
    if (lanes > 0 && has_kernel(shape, heads_per_thread, needs_lookup) && fits()) {
        plan.in_registers = true;
        plan.needs_lookup = needs_lookup;
        plan.lanes = lanes;
        plan.team = static_cast<int>(std::bit_ceil(static_cast<unsigned>(lanes)));
        plan.heads_per_thread = heads_per_thread;
        plan.q_groups = groups_of(shape.q_heads, heads_per_thread, shape.table_heads);
        plan.k_groups = groups_of(shape.k_heads, heads_per_thread, shape.table_heads);
        plan.block_threads = norm_block_threads;
        if (shape.over == NormOver::all_heads) {
            // Blocks of q and of k have the same size; the smaller of the two spreads its heads over all threads.
            const int groups = std::max(plan.q_groups, plan.k_groups);
            plan.q_groups = std::min(shape.q_heads, groups);
            plan.k_groups = std::min(shape.k_heads, groups);
            plan.block_threads = static_cast<int>(threads_over_all_heads(shape, lanes, heads_per_thread));
        }
    } else {
        plan.q_groups = rows_of(shape, shape.q_heads);
        plan.k_groups = rows_of(shape, shape.k_heads);
    }
    plan.tokens_per_launch =
        tokens_per_launch(shape.batch, shape.tokens, threads_per_token(plan, shape.over), plan.block_threads);
    return plan;
}

QkNormRotaryGradientPlan plan_gradient(const QkNormRotaryShape& shape, const Device& device) {
    QkNormRotaryGradientPlan plan;
    constexpr int heads_per_thread = norm_heads_per_thread_with_lookup;
    const int lanes = lanes_per_head(shape);
    const bool fits = shape.over == NormOver::head ||
                      threads_over_all_heads(shape, lanes, heads_per_thread) <= norm_gradient_max_block_threads;
    const auto exists = [&](bool shares_cos_sin, bool needs_lookup) {
        return has_norm_gradient_kernel(shape.element_size, shape.pairing, shape.over, shares_cos_sin, needs_lookup);
    };
    const bool shares_cos_sin = !shape.is_per_head() && exists(true, true);
    const bool needs_lookup = shape.needs_lookup || !exists(false, false);
    int64_t rows_per_block = 1;
    if (lanes > 0 && fits && exists(shares_cos_sin, needs_lookup)) {
        plan.in_registers = true;
        plan.needs_lookup = needs_lookup;
        plan.shares_cos_sin = shares_cos_sin;
        plan.lanes = lanes;
        plan.team = static_cast<int>(std::bit_ceil(static_cast<unsigned>(lanes)));
        plan.q_groups = groups_of(shape.q_heads, heads_per_thread, shape.table_heads);
        plan.k_groups = groups_of(shape.k_heads, heads_per_thread, shape.table_heads);
        if (shape.over == NormOver::head) {
            plan.block_threads = norm_gradient_block_threads;
            rows_per_block = plan.block_threads / plan.team;
        } else {
            plan.block_threads = static_cast<int>(threads_over_all_heads(shape, lanes, heads_per_thread));
        }
    } else {
        plan.q_groups = rows_of(shape, shape.q_heads);
        plan.k_groups = rows_of(shape, shape.k_heads);
    }
    const int threads_per_sm = norm_gradient_threads_per_sm(shape.over, plan.shares_cos_sin);
    int blocks_per_sm = threads_per_sm / plan.block_threads;
    if (plan.in_registers && shape.over == NormOver::all_heads) {
        blocks_per_sm = std::min(blocks_per_sm, norm_gradient_max_blocks_over_all_heads);
    }
    const int64_t one_wave = int64_t{device.sms} * blocks_per_sm;
    const int64_t heads = shape.q_heads + shape.k_heads;
    const auto blocks = [&](int view_heads, int groups) {
        if (view_heads == 0) return 0;
        const int64_t rows = shape.batch * shape.tokens * (shape.over == NormOver::head ? groups : 1);
        const int64_t share = std::max<int64_t>(1, one_wave * view_heads / heads);
        return static_cast<int>(std::min(share, ceil_div(rows, rows_per_block)));
    };
    plan.q_blocks = blocks(shape.q_heads, plan.q_groups);
    plan.k_blocks = blocks(shape.k_heads, plan.k_groups);
    return plan;
}

}  // namespace mrrope
