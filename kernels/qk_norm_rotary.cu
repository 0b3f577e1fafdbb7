#include "launch_slices.h"
#include "qk_norm_rotary_gradient_kernel.cuh"
#include "qk_norm_rotary_kernel.cuh"

namespace mrrope {

void qk_norm_rotary_cuda(const QkNormRotaryArgs& args, CUstream_st* stream) {
    validate(args);
    qk_norm_rotary_cuda(args, plan(shape_of(args), current_device()), stream);
}

void qk_norm_rotary_cuda(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan, CUstream_st* stream) {
    const LoggedCall logged("qk_norm_rotary", args.rotary);
    const QkNormRotaryShape shape = shape_of(args);
    if (shape.batch == 0 || shape.tokens == 0 || shape.q_heads + shape.k_heads == 0) return;
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args.rotary, plan.tokens_per_launch, [&](const RotaryArgs& rotary) {
            QkNormRotaryArgs part = args;
            part.rotary = rotary;
            launch_qk_norm_rotary<decltype(element)>(part, plan, stream);
        });
    });
}

WeightSumRows weight_sum_rows_cuda(const QkNormRotaryGradientArgs& args) {
    const QkNormRotaryGradientPlan plan = plan_gradient(shape_of(args), current_device());
    return {plan.q_blocks, plan.k_blocks};
}

void qk_norm_rotary_gradient_cuda(const QkNormRotaryGradientArgs& args, CUstream_st* stream) {
    validate(args);
    qk_norm_rotary_gradient_cuda(args, plan_gradient(shape_of(args), current_device()), stream);
}

void qk_norm_rotary_gradient_cuda(const QkNormRotaryGradientArgs& args, const QkNormRotaryGradientPlan& plan,
                                  CUstream_st* stream) {
    const LoggedCall logged("qk_norm_rotary_gradient", args.call.rotary);
    with_element(args.call.rotary.dtype,
                 [&](auto element) { launch_qk_norm_rotary_gradient<decltype(element)>(args, plan, stream); });
}

}  // namespace mrrope
