#include "launch_slices.h"
#include "mla_rotary_kernel.cuh"

namespace mrrope {
namespace {

bool is_empty(const RotaryArgs& args) {
    return args.batch == 0 || args.tokens == 0 || args.q.heads + args.k.heads == 0;
}

}  // namespace

void mla_rotary_cuda(const MlaRotaryArgs& args, CUstream_st* stream) {
    validate(args);
    mla_rotary_cuda(args, plan(shape_of(args), current_device()), stream);
}

void mla_rotary_cuda(const MlaRotaryArgs& args, const MlaRotaryPlan& planned, CUstream_st* stream) {
    const LoggedCall logged("mla_rotary", args.rotary);
    if (is_empty(args.rotary)) return;
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, planned.tokens_per_launch, [&](const MlaRotaryArgs& part) {
            launch_mla_rotary<decltype(element)>(mla_rotary_launch(part, planned), KeyTarget::tensor, planned, stream);
        });
    });
}

void mla_rotary_gradient_cuda(const MlaRotaryGradientArgs& args, CUstream_st* stream) {
    validate(args);
    mla_rotary_gradient_cuda(args, plan(shape_of(args), current_device()), stream);
}

void mla_rotary_gradient_cuda(const MlaRotaryGradientArgs& args, const MlaRotaryPlan& planned, CUstream_st* stream) {
    const LoggedCall logged("mla_rotary_gradient", args.rotary);
    if (is_empty(args.rotary)) return;
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, planned.tokens_per_launch, [&](const MlaRotaryGradientArgs& part) {
            const auto sum_threads =
                static_cast<int>(part.rotary.batch * part.rotary.tokens * planned.sum_threads_per_token());
            const MlaRotaryArgs queries{.rotary = part.rotary, .q_nope = part.q_nope, .k_nope = {}};
            launch_mla_rotary_gradient<decltype(element)>(
                {.queries = mla_rotary_launch(queries, planned),
                 .keys = part.rotary.k,
                 .sums = MlaSumMap<cutlass::FastDivmod>::of(planned, part.rotary.tokens),
                 .sum_threads = sum_threads,
                 .sum_blocks = blocks_of(sum_threads)},
                planned, stream);
        });
    });
}

void mla_rotary_and_cache_cuda(const MlaRotaryAndCacheArgs& args, CUstream_st* stream) {
    validate(args);
    mla_rotary_and_cache_cuda(args, plan(shape_of(args), current_device()), stream);
}

void mla_rotary_and_cache_cuda(const MlaRotaryAndCacheArgs& args, const MlaRotaryPlan& planned, CUstream_st* stream) {
    const LoggedCall logged("mla_rotary_and_cache", args.rotary);
    if (is_empty(args.rotary)) return;
    const KeyTarget target = is_float8(args.cached_as) ? KeyTarget::float8_cache : KeyTarget::cache;
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, planned.tokens_per_launch, [&](const MlaRotaryAndCacheArgs& part) {
            const MlaRotaryArgs heads{.rotary = part.rotary, .q_nope = {}, .k_nope = part.latent};
            launch_mla_rotary<decltype(element)>(
                mla_rotary_launch(heads, planned, part.slots, part.cached_as, part.scale), target, planned, stream);
        });
    });
}

}  // namespace mrrope
