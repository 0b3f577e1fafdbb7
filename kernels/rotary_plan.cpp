#include "rotary_plan.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <optional>
#include <tuple>

#include "launch_slices.h"

namespace mrrope {
namespace {

int alignment_of(const HeadsView& view, int element_size) {
    if (view.heads == 0) return access_bytes;
    return std::min(alignment_of(view.in, view.in_strides, element_size),
                    alignment_of(view.out, view.out_strides, element_size));
}

bool tokens_are_adjacent(const HeadsView& view) {
    const auto adjacent = [](const HeadStrides& strides) { return std::abs(strides.token) < std::abs(strides.head); };
    return view.heads <= 1 || (adjacent(view.in_strides) && adjacent(view.out_strides));
}

// Thresholds and choices below are measured on an H200: `plans_benchmark`, benchmarks/results/rotary_plans_cuda.txt.

// Below, single components: more threads with less work each finish sooner.
constexpr int64_t threads_for_half_vectors = 1 << 11;

// With an even number of heads per head table, two per thread gain earlier.
constexpr int64_t threads_for_full_vectors_of_head_tables = 3 << 14;

// Positions of their own make pairs more costly, which more heads share.
constexpr int64_t threads_for_three_heads_with_rows = 1 << 20;

bool takes_full_vectors(const RotaryShape& shape, int64_t threads) {
    const bool has_even_head_tables = shape.is_per_head() && shape.heads / shape.table_heads % 2 == 0;
    return threads >= (has_even_head_tables ? threads_for_full_vectors_of_head_tables : threads_for_full_vectors);
}

// All five heads of a table gain where their blocks nearly fill one wave, or at most half of one: 1024 x 32/8 take 6.7
// us, three per thread 7.2; 768 x 32/8 take 6.1 us, three per thread 5.4.
bool takes_whole_table(const RotaryShape& shape, const Device& device, int64_t threads) {
    const int64_t one_wave =
        int64_t{device.sms} * rotary_min_blocks_per_sm(heads_of_whole_table) * rotary_block_threads;
    const int64_t with_all_heads = threads / heads_of_whole_table;
    const bool fills_wave = with_all_heads <= one_wave && with_all_heads >= one_wave * 9 / 10;
    return shape.is_per_head() && shape.heads / shape.table_heads == heads_of_whole_table &&
           (fills_wave || with_all_heads <= one_wave / 2);
}

// Three where two would leave many threads with one.
int choose_heads_per_thread(const RotaryShape& shape, const Device& device, int64_t threads) {
    const int heads = shape.heads / shape.table_heads;
    if (shape.lookup == TableLookup::position_rows) {
        return heads > 2 && threads >= threads_for_three_heads_with_rows ? 3 : 2;
    }
    if (heads == 1 || heads % 2 == 0) return 2;
    if (takes_whole_table(shape, device, threads)) return heads_of_whole_table;
    return heads <= 5 || (shape.is_per_head() && heads % 3 == 0) ? 3 : 2;
}

int log2(int vector) {
    return static_cast<int>(std::bit_width(static_cast<unsigned>(vector)));
}

bool has_whole_vectors(const RotaryShape& shape, int vector) {
    return vector * shape.element_size <= shape.alignment && shape.rotary_dim / 2 % vector == 0 &&
           (shape.head_dim - shape.rotary_dim) % vector == 0;
}

}  // namespace

bool copies_tail(const RotaryArgs& args) {
    return args.rotary_dim < args.head_dim && (args.q.in != args.q.out || args.k.in != args.k.out);
}

RotaryShape shape_of(const RotaryArgs& args) {
    const int element_size = size_of(args.dtype);
    const bool has_rows = args.positions.row_of_pair != nullptr;
    return {.batch = args.batch,
            .tokens = args.tokens,
            .heads = args.q.heads + args.k.heads,
            .head_dim = args.head_dim,
            .rotary_dim = args.rotary_dim,
            .element_size = element_size,
            .pairing = args.pairing,
            .alignment = args.positions.rows > max_rows_with_vectors
                             ? 0
                             : std::min(alignment_of(args.q, element_size), alignment_of(args.k, element_size)),
            .lookup = has_rows                ? TableLookup::position_rows
                      : args.choice.count > 1 ? TableLookup::indexed
                                              : TableLookup::single,
            .copies_tail = copies_tail(args),
            .tokens_adjacent = tokens_are_adjacent(args.q) && tokens_are_adjacent(args.k),
            .table_heads = args.choice.heads,
            .has_query_factors = args.choice.query_factors != nullptr};
}

bool serves(const RotaryKernel& kernel, const RotaryShape& shape) {
    if (kernel.pairing != shape.pairing) return false;
    if (kernel.any_shape) return true;
    const int tail = shape.head_dim - shape.rotary_dim;
    if (!has_whole_vectors(shape, kernel.vector)) return false;
    if (kernel.whole_heads && (tail == 0 || tail % (2 * kernel.vector) != 0)) return false;
    if (kernel.is_per_head != shape.is_per_head()) return false;
    // Without an index, that of a token is its sequence's, and is clamped to the only table.
    const bool indexes_one_table =
        shape.is_per_head() && shape.lookup == TableLookup::single && kernel.lookup == TableLookup::indexed;
    return kernel.lookup == shape.lookup || indexes_one_table;
}

RotaryPlan plan(const RotaryShape& shape, const Device& device) {
    return plan(shape, device, rotary_kernels(shape.element_size));
}

RotaryPlan plan(const RotaryShape& shape, const Device& device, const RotaryKernels& kernels) {
    const int full = full_vector(shape.element_size);
    const int64_t threads = shape.batch * shape.tokens * shape.heads * ceil_div(shape.rotary_dim / 2, full);
    const bool is_large = takes_full_vectors(shape, threads);
    const int vector = is_large ? full : threads < threads_for_half_vectors ? 1 : full / 2;
    const int heads_per_thread = is_large ? choose_heads_per_thread(shape, device, threads) : 1;
    // In which respects a kernel is not what is wanted, the costliest first.
    const auto misses = [&](const RotaryKernel& kernel) {
        const int halvings = std::abs(log2(kernel.vector) - log2(vector));
        return std::tuple(kernel.any_shape, kernel.whole_heads != shape.copies_tail, halvings,
                          kernel.heads_per_thread != heads_per_thread,
                          kernel.tokens_inside != (shape.tokens_adjacent && is_large), kernel.lookup != shape.lookup);
    };
    std::optional<RotaryKernel> best;
    for (const RotaryKernel& kernel : kernels) {
        if (serves(kernel, shape) && (!best || misses(kernel) < misses(*best))) best = kernel;
    }
    return plan_by(best.value(), shape);
}

RotaryPlan plan_by(const RotaryKernel& kernel, const RotaryShape& shape) {
    RotaryPlan plan = plan_groups(shape, kernel.vector, kernel.heads_per_thread,
                                  groups_of(shape.heads, kernel.heads_per_thread, shape.table_heads));
    static_cast<RotaryKernel&>(plan) = kernel;
    plan.table_heads = shape.table_heads;
    if (kernel.whole_heads) plan.lanes = shape.head_dim / 2 / kernel.vector;
    plan.tokens_per_launch =
        tokens_per_launch(shape.batch, shape.tokens, plan.threads_per_token(), rotary_block_threads);
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
