#include "rotary_plan.h"

#include <limits>

namespace mrrope {
namespace {

constexpr int access_bytes = 16;

bool starts_aligned(const void* pointer, const HeadStrides& strides, int element_size) {
    const auto misaligned = [](int64_t bytes) { return bytes % access_bytes != 0; };
    return !misaligned(reinterpret_cast<int64_t>(pointer)) && !misaligned(strides.batch * element_size) &&
           !misaligned(strides.token * element_size) && !misaligned(strides.head * element_size);
}

bool starts_aligned(const HeadsView& view, int element_size) {
    return view.heads == 0 || (starts_aligned(view.in, view.in_strides, element_size) &&
                               starts_aligned(view.out, view.out_strides, element_size));
}

int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Computing the phases once for several heads pays as soon as the chip is full without a thread for every head.
int choose_heads_per_thread(const RotaryShape& shape, int lanes, DeviceLimits limits) {
    constexpr int64_t threads_to_fill_multiprocessor = 2048;
    const int64_t enough = limits.multiprocessors * threads_to_fill_multiprocessor;
    const int64_t threads = shape.batch * shape.tokens * lanes * shape.heads;
    for (const int heads : {4, 2}) {
        if (shape.heads >= heads && threads / heads >= enough) return heads;
    }
    return 1;
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
            .aligned = starts_aligned(args.q, element_size) && starts_aligned(args.k, element_size)};
}

RotaryPlan plan_rotary(const RotaryShape& shape, DeviceLimits limits) {
    RotaryPlan plan;
    const int half = shape.rotary_dim / 2;
    const int vector = access_bytes / shape.element_size;
    const bool fits_vectors = half % vector == 0 && (shape.head_dim - shape.rotary_dim) % vector == 0;
    plan.vector = shape.aligned && fits_vectors ? vector : 1;
    plan.lanes = half / plan.vector;
    plan.heads_per_thread = choose_heads_per_thread(shape, plan.lanes, limits);
    plan.head_groups = static_cast<int>(ceil_div(shape.heads, plan.heads_per_thread));
    // The last block of a launch may count past its last thread.
    const int64_t most_threads = std::numeric_limits<int32_t>::max() - plan.block_threads;
    const int64_t most_tokens = std::max<int64_t>(1, most_threads / plan.threads_per_token());
    const int64_t all_tokens = shape.batch * shape.tokens;
    plan.tokens_per_launch = all_tokens <= most_tokens ? all_tokens : std::min(most_tokens, shape.tokens);
    return plan;
}

RotaryArgs slice(const RotaryArgs& args, int64_t first_batch, int64_t batch, int64_t first_token, int64_t tokens) {
    const int element_size = size_of(args.dtype);
    const auto offset = [&](const HeadStrides& strides) {
        return (first_batch * strides.batch + first_token * strides.token) * element_size;
    };
    const auto advance = [&](HeadsView& view) {
        if (view.heads == 0) return;
        view.in = static_cast<const char*>(view.in) + offset(view.in_strides);
        view.out = static_cast<char*>(view.out) + offset(view.out_strides);
    };
    RotaryArgs part = args;
    advance(part.q);
    advance(part.k);
    const int64_t positions = first_batch * args.positions.batch_stride + first_token * args.positions.token_stride;
    part.positions.data = static_cast<const char*>(args.positions.data) + positions * (args.positions.is_int64 ? 8 : 4);
    part.batch = batch;
    part.tokens = tokens;
    return part;
}

}  // namespace mrrope
