#include "mla_rotary_plan.h"

#include <algorithm>

#include "launch_slices.h"
#include "vector_plans.h"

namespace mrrope {
namespace {

MlaRotaryShape shape_of(const RotaryArgs& rotary, const CopiedPart& q_copied, const CopiedPart& k_copied,
                        KeyTarget target) {
    const int element_size = size_of(rotary.dtype);
    const int stored_size = target == KeyTarget::float8_cache ? 1 : element_size;
    int aligned = std::min(aligned_vector(rotary.q, element_size, element_size),
                           aligned_vector(rotary.k, element_size, stored_size));
    if (q_copied.dim > 0) aligned = std::min(aligned, aligned_vector(q_copied.view, element_size, element_size));
    if (k_copied.dim > 0) aligned = std::min(aligned, aligned_vector(k_copied.view, element_size, stored_size));
    return {.batch = rotary.batch,
            .tokens = rotary.tokens,
            .q_heads = rotary.q.heads,
            .k_heads = rotary.k.heads,
            .rotary_dim = rotary.rotary_dim,
            .q_copied = q_copied.dim,
            .k_copied = k_copied.dim,
            .element_size = element_size,
            .target = target,
            .aligned_vector = aligned};
}

}  // namespace

MlaRotaryShape shape_of(const MlaRotaryArgs& args) {
    return shape_of(args.rotary, args.q_nope, args.k_nope, KeyTarget::tensor);
}

MlaRotaryShape shape_of(const MlaRotaryGradientArgs& args) {
    return shape_of(args.rotary, args.q_nope, {}, KeyTarget::sum);
}

MlaRotaryShape shape_of(const MlaRotaryAndCacheArgs& args) {
    const KeyTarget target = is_float8(args.cached_as) ? KeyTarget::float8_cache : KeyTarget::cache;
    return shape_of(args.rotary, {}, args.latent, target);
}

bool has_plan(const MlaRotaryShape& shape, int vector, int heads_per_thread) {
    return has_mla_kernel(shape.element_size, shape.target, vector, heads_per_thread, TableLookup::indexed) &&
           vector <= shape.aligned_vector && shape.rotary_dim / 2 % vector == 0 && shape.q_copied % vector == 0 &&
           shape.k_copied % vector == 0;
}

MlaRotaryPlan plan(const MlaRotaryShape& shape, const Device&) {
    const int64_t q_components = int64_t{shape.q_heads} * (shape.rotary_dim + shape.q_copied);
    const int64_t k_components =
        int64_t{shape.k_heads} * (shape.rotary_dim + (is_cache(shape.target) ? 0 : shape.k_copied));
    const int64_t threads =
        shape.batch * shape.tokens * (q_components + k_components) / (2 * full_vector(shape.element_size));
    const int full = full_vector(shape.element_size);
    // 1024 tokens of 16 heads with a cache, between the two thresholds, take 3.4 us on an H200 by half vectors, 3.9 by
    // two heads.
    const bool is_large = threads >= (is_cache(shape.target) ? threads_for_two_cached_heads : threads_for_full_vectors);
    const VectorsOfThread preferred = is_large ? VectorsOfThread{full, 2} : VectorsOfThread{full / 2, 1};
    const auto [vector, heads_per_thread] =
        choose_vectors(shape.element_size, preferred, [&](int v, int heads) { return has_plan(shape, v, heads); });
    return plan_with(shape, vector, heads_per_thread);
}

MlaRotaryPlan plan_with(const MlaRotaryShape& shape, int vector, int heads_per_thread) {
    const bool to_cache = is_cache(shape.target);
    MlaRotaryPlan plan;
    plan.vector = vector;
    plan.rotating_lanes = shape.rotary_dim / 2 / vector;
    const auto copying_lanes = [&](int copied) { return static_cast<int>(ceil_div(copied, 2 * vector)); };
    plan.q_lanes = plan.rotating_lanes + copying_lanes(shape.q_copied);
    plan.k_lanes = plan.rotating_lanes + (to_cache ? 0 : copying_lanes(shape.k_copied));
    plan.latent_lanes = to_cache ? copying_lanes(shape.k_copied) : 0;
    plan.heads_per_thread = heads_per_thread;
    plan.q_groups = groups_of(shape.q_heads, heads_per_thread);
    if (shape.target != KeyTarget::sum) {
        plan.k_groups = groups_of(shape.k_heads, heads_per_thread);
    } else if (shape.k_heads > 0) {
        // A token is a whole warp, which adds up by shuffles, where the lanes of a head divide it; else each lane has
        // one thread for all heads.
        const bool divides_warp = mla_warp_threads % plan.rotating_lanes == 0;
        plan.head_sums = divides_warp ? mla_warp_threads / plan.rotating_lanes : 1;
    }
    // Blocks that rotate, and those that copy or add up, are separate, so two of them may have idle threads.
    const int64_t threads = plan.threads_per_token() + plan.latent_lanes + plan.sum_threads_per_token();
    plan.tokens_per_launch = tokens_per_launch(shape.batch, shape.tokens, threads, 2 * mla_block_threads);
    return plan;
}

}  // namespace mrrope
