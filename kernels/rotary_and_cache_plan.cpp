#include "rotary_and_cache_plan.h"

namespace mrrope {
namespace {

// A store has as many components as a load; in a float8 cache they are fewer bytes.
bool starts_aligned(const HeadsView& view, int element_size, int stored_size) {
    return view.heads == 0 ||
           (starts_aligned(view.in, view.in_strides, element_size) &&
            starts_aligned(view.out, view.out_strides, stored_size, access_bytes / element_size * stored_size));
}

// Two heads per thread from this many threads on, counted with one head and a full vector per thread.
constexpr int64_t threads_for_two_heads = 1 << 17;

}  // namespace

RotaryAndCacheShape shape_of(const RotaryAndCacheArgs& args) {
    const int element_size = size_of(args.rotary.dtype);
    const int cached_size = size_of(args.cached_as, args.rotary.dtype);
    return {.batch = args.rotary.batch,
            .tokens = args.rotary.tokens,
            .q_heads = args.rotary.q.heads,
            .kv_heads = args.k.view.heads,
            .head_dim = args.rotary.head_dim,
            .rotary_dim = args.rotary.rotary_dim,
            .element_size = element_size,
            .aligned = starts_aligned(args.rotary.q, element_size, element_size) &&
                       starts_aligned(args.k.view, element_size, cached_size) &&
                       starts_aligned(args.v.view, element_size, cached_size),
            .table_heads = args.rotary.choice.heads};
}

HeadGroups head_groups(int q_heads, int kv_heads, int heads_per_thread, int table_heads) {
    return {.queries = groups_of(q_heads, heads_per_thread, table_heads),
            .keys = groups_of(kv_heads, heads_per_thread, table_heads),
            .values = groups_of(kv_heads, heads_per_thread),
            .gates = 0};
}

// Independent of the device so far: the thresholds are those of an H200.
RotaryPlan plan(const RotaryAndCacheShape& shape, const Device&) {
    const RotaryShape heads{.batch = shape.batch,
                            .tokens = shape.tokens,
                            .heads = shape.q_heads + 2 * shape.kv_heads,
                            .head_dim = shape.head_dim,
                            .rotary_dim = shape.rotary_dim,
                            .element_size = shape.element_size};
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int64_t threads = shape.batch * shape.tokens * heads.heads * split.lanes;
    const int vector = split.vector > 1 && threads < threads_for_full_vectors ? split.vector / 2 : split.vector;
    const int heads_per_thread = split.vector > 1 && heads.heads > 1 && threads >= threads_for_two_heads ? 2 : 1;
    const HeadGroups groups = head_groups(shape.q_heads, shape.kv_heads, heads_per_thread, shape.table_heads);
    RotaryPlan plan = plan_groups(heads, vector, heads_per_thread, groups.count());
    plan.table_heads = shape.table_heads;
    return plan;
}

}  // namespace mrrope
