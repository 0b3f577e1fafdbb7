#include "launch_slices.h"
#include "rotary_cos_sin_kernel.cuh"

namespace mrrope {

void rotary_cos_sin_cuda(const RotaryCosSinArgs& args, CUstream_st* stream) {
    validate(args);
    const RotaryShape shape = shape_of(args.rotary);
    if (shape.batch == 0 || shape.tokens == 0 || shape.heads == 0) return;
    rotary_cos_sin_cuda(args, plan(shape, current_device(), rotary_cos_sin_kernels(shape.element_size)), stream);
}

void rotary_cos_sin_cuda(const RotaryCosSinArgs& args, const RotaryPlan& plan, CUstream_st* stream) {
    const LoggedCall logged("rotary_cos_sin", args.rotary);
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, plan.tokens_per_launch, [&](const RotaryCosSinArgs& part) {
            launch_rotary_cos_sin<decltype(element)>(part, plan, stream);
        });
    });
}

}  // namespace mrrope
