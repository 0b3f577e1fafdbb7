#include "rotary_and_cache_plan.h"

#include <algorithm>

#include "vector_plans.h"

namespace mrrope {

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
            .pairing = args.rotary.pairing,
            .float8 = is_float8(args.cached_as),
            .aligned_vector = std::min({aligned_vector(args.rotary.q, element_size, element_size),
                                        aligned_vector(args.k.view, element_size, cached_size),
                                        aligned_vector(args.v.view, element_size, cached_size)}),
            .table_heads = args.rotary.choice.heads};
}

HeadGroups head_groups(int q_heads, int kv_heads, int heads_per_thread, int table_heads) {
    return {.queries = groups_of(q_heads, heads_per_thread, table_heads),
            .keys = groups_of(kv_heads, heads_per_thread, table_heads),
            .values = groups_of(kv_heads, heads_per_thread),
            .gates = 0};
}

bool has_plan(const RotaryAndCacheShape& shape, int vector, int heads_per_thread) {
    return has_rotary_and_cache_kernel(shape.element_size, shape.pairing, shape.float8, vector, heads_per_thread,
                                       TableLookup::indexed) &&
           vector <= shape.aligned_vector && shape.rotary_dim / 2 % vector == 0 &&
           (shape.head_dim - shape.rotary_dim) % vector == 0;
}

RotaryPlan plan(const RotaryAndCacheShape& shape, const Device&) {
    const int64_t components = int64_t{shape.q_heads + 2 * shape.kv_heads} * shape.rotary_dim / 2;
    const int64_t threads = shape.batch * shape.tokens * components / full_vector(shape.element_size);
    const int full = full_vector(shape.element_size);
    const VectorsOfThread preferred =
        threads >= threads_for_two_cached_heads ? VectorsOfThread{full, 2} : VectorsOfThread{full / 2, 1};
    const auto [vector, heads_per_thread] =
        choose_vectors(shape.element_size, preferred, [&](int v, int heads) { return has_plan(shape, v, heads); });
    return plan_with(shape, vector, heads_per_thread);
}

RotaryPlan plan_with(const RotaryAndCacheShape& shape, int vector, int heads_per_thread) {
    const RotaryShape heads{.batch = shape.batch, .tokens = shape.tokens, .rotary_dim = shape.rotary_dim};
    const HeadGroups groups = head_groups(shape.q_heads, shape.kv_heads, heads_per_thread, shape.table_heads);
    RotaryPlan plan = plan_groups(heads, vector, heads_per_thread, groups.count());
    plan.table_heads = shape.table_heads;
    return plan;
}

}  // namespace mrrope
