#include "qk_norm_gradient_kernel.cuh"
#include "qk_norm_kernel.cuh"

namespace mrrope {

void qk_norm_rotary_cuda(const QkNormArgs& args, CUstream_st* stream) {
    qk_norm_rotary_cuda(args, plan_qk_norm(shape_of(args)), stream);
}

void qk_norm_rotary_cuda(const QkNormArgs& args, const QkNormPlan& plan, CUstream_st* stream) {
    const QkNormShape shape = shape_of(args);
    if (shape.batch == 0 || shape.tokens == 0 || shape.q_heads + shape.k_heads == 0) return;
    const RotaryPlan slices{.tokens_per_launch = plan.tokens_per_launch};
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args.rotary, slices, [&](const RotaryArgs& rotary) {
            QkNormArgs part = args;
            part.rotary = rotary;
            launch_qk_norm<decltype(element)>(part, plan, shape.looks_up, stream);
        });
    });
}

WeightSumRows weight_sum_rows_cuda(const QkNormGradientArgs& args) {
    const QkNormGradientPlan plan = plan_qk_norm_gradient(shape_of(args));
    return {plan.q_blocks, plan.k_blocks};
}

void qk_norm_rotary_gradient_cuda(const QkNormGradientArgs& args, CUstream_st* stream) {
    const QkNormShape shape = shape_of(args);
    if (shape.batch == 0 || shape.tokens == 0 || shape.q_heads + shape.k_heads == 0) return;
    const QkNormGradientPlan plan = plan_qk_norm_gradient(shape);
    with_element(args.call.rotary.dtype,
                 [&](auto element) { launch_qk_norm_gradient<decltype(element)>(args, plan, stream); });
}

}  // namespace mrrope
