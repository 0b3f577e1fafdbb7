#include "rotary_and_cache_plan.h"

namespace mrrope {
namespace {

// Threads write as many components at a time as they read, of float8 fewer bytes.
bool starts_aligned(const HeadsView& view, int element_size, int written_size) {
    return view.heads == 0 ||
           (starts_aligned(view.in, view.in_strides, element_size) &&
            starts_aligned(view.out, view.out_strides, written_size, access_bytes / element_size * written_size));
}

// As many as there would be with one head and full vectors each.
constexpr int64_t threads_for_two_heads = 1 << 17;

}  // namespace

HeadGroups head_groups(const RotaryAndCacheArgs& args, int heads_per_thread) {
    const auto groups = [&](int heads) { return static_cast<int>(ceil_div(heads, heads_per_thread)); };
    return {.queries = groups(args.rotary.q.heads), .keys = groups(args.k.view.heads)};
}

RotaryPlan plan_rotary_and_cache(const RotaryAndCacheArgs& args) {
    RotaryShape shape = shape_of(args.rotary);
    const int cached_size = args.float8 ? 1 : shape.element_size;
    shape.heads = args.rotary.q.heads + args.k.view.heads + args.v.view.heads;
    shape.aligned = starts_aligned(args.rotary.q, shape.element_size, shape.element_size) &&
                    starts_aligned(args.k.view, shape.element_size, cached_size) &&
                    starts_aligned(args.v.view, shape.element_size, cached_size);
    const HeadSplit split = split_head(shape.head_dim, shape.rotary_dim, shape.element_size, shape.aligned);
    const int64_t threads = shape.batch * shape.tokens * shape.heads * split.lanes;
    const int vector = split.vector > 1 && threads < threads_for_full_vectors ? split.vector / 2 : split.vector;
    const int heads_per_thread = split.vector > 1 && shape.heads > 1 && threads >= threads_for_two_heads ? 2 : 1;
    const HeadGroups groups = head_groups(args, heads_per_thread);
    return plan_groups(shape, vector, heads_per_thread, groups.queries + 2 * groups.keys);
}

}  // namespace mrrope
