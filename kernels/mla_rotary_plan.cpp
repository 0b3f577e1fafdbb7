#include "mla_rotary_plan.h"

#include "head_split.h"
#include "launch_slices.h"
#include "rotary_plan.h"

namespace mrrope {
namespace {

// A store has as many components as a load; in a float8 cache they are fewer bytes.
bool starts_aligned(const HeadsView& view, int element_size, int stored_size) {
    return view.heads == 0 ||
           (starts_aligned(view.in, view.in_strides, element_size) &&
            starts_aligned(view.out, view.out_strides, stored_size, access_bytes / element_size * stored_size));
}

bool starts_aligned(const CopiedPart& part, int element_size, int stored_size) {
    return part.dim == 0 || starts_aligned(part.view, element_size, stored_size);
}

MlaRotaryShape shape_of(const RotaryArgs& rotary, const CopiedPart& q_copied, const CopiedPart& k_copied,
                        int stored_size) {
    const int element_size = size_of(rotary.dtype);
    return {.batch = rotary.batch,
            .tokens = rotary.tokens,
            .q_heads = rotary.q.heads,
            .k_heads = rotary.k.heads,
            .rotary_dim = rotary.rotary_dim,
            .q_copied = q_copied.dim,
            .k_copied = k_copied.dim,
            .element_size = element_size,
            .aligned = starts_aligned(rotary.q, element_size, element_size) &&
                       starts_aligned(q_copied, element_size, element_size) &&
                       starts_aligned(rotary.k, element_size, stored_size) &&
                       starts_aligned(k_copied, element_size, stored_size)};
}

int widest_vector(const MlaRotaryShape& shape) {
    const int full = full_vector(shape.element_size);
    const bool fits = shape.rotary_dim / 2 % full == 0 && shape.q_copied % full == 0 && shape.k_copied % full == 0;
    return shape.aligned && fits ? full : 1;
}

// Two heads per thread from this many threads on, counted with one head and a full vector per thread, as in
// rotary_and_cache_plan.cpp.
constexpr int64_t threads_for_two_heads = 1 << 17;

}  // namespace

MlaRotaryShape shape_of(const MlaRotaryArgs& args) {
    return shape_of(args.rotary, args.q_nope, args.k_nope, size_of(args.rotary.dtype));
}

MlaRotaryShape shape_of(const MlaRotaryGradientArgs& args) {
    return shape_of(args.rotary, args.q_nope, {}, size_of(args.rotary.dtype));
}

MlaRotaryShape shape_of(const MlaRotaryAndCacheArgs& args) {
    MlaRotaryShape shape =
        shape_of(args.rotary, {}, args.latent, is_float8(args.cached_as) ? 1 : size_of(args.rotary.dtype));
    shape.to_cache = true;
    return shape;
}

MlaRotaryPlan plan_with(const MlaRotaryShape& shape, int vector, int heads_per_thread) {
    MlaRotaryPlan plan;
    plan.vector = vector;
    plan.rotating_lanes = shape.rotary_dim / 2 / vector;
    const auto copying_lanes = [&](int copied) { return static_cast<int>(ceil_div(copied, 2 * vector)); };
    plan.q_lanes = plan.rotating_lanes + copying_lanes(shape.q_copied);
    plan.k_lanes = plan.rotating_lanes + (shape.to_cache ? 0 : copying_lanes(shape.k_copied));
    plan.latent_lanes = shape.to_cache ? copying_lanes(shape.k_copied) : 0;
    plan.heads_per_thread = heads_per_thread;
    plan.q_groups = groups_of(shape.q_heads, heads_per_thread);
    plan.k_groups = groups_of(shape.k_heads, heads_per_thread);
    // Blocks of rotating and of copying threads are separate, so two of them may have idle threads.
    plan.tokens_per_launch = tokens_per_launch(shape.batch, shape.tokens, plan.threads_per_token() + plan.latent_lanes,
                                               2 * mla_block_threads);
    return plan;
}

// Independent of the device so far: the thresholds are those of an H200.
MlaRotaryPlan plan(const MlaRotaryShape& shape, const Device&) {
    const int full = widest_vector(shape);
    const int64_t threads = shape.batch * shape.tokens * plan_with(shape, full, 1).threads_per_token();
    const int vector = full > 1 && threads < threads_for_full_vectors ? full / 2 : full;
    return plan_with(shape, vector, full > 1 && threads >= threads_for_two_heads ? 2 : 1);
}

MlaRotaryPlan gradient_plan(const MlaRotaryShape& shape, const Device& device) {
    MlaRotaryPlan gradient = plan(shape, device);
    gradient.k_groups = 0;
    // A token is a whole warp, which adds up by shuffles, where the lanes of a head divide it; else each lane has one
    // thread for all heads.
    const bool divides_warp = mla_warp_threads % gradient.rotating_lanes == 0;
    if (shape.k_heads > 0) gradient.head_sums = divides_warp ? mla_warp_threads / gradient.rotating_lanes : 1;
    // Blocks of sums and of queries are separate, so two of them may have idle threads.
    gradient.tokens_per_launch =
        tokens_per_launch(shape.batch, shape.tokens, gradient.threads_per_token() + gradient.sum_threads_per_token(),
                          2 * mla_block_threads);
    return gradient;
}

}  // namespace mrrope
