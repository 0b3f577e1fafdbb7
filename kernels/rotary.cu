#include "launch_slices.h"
#include "rotary_kernel.cuh"

namespace mrrope {

void rotary_cuda(const RotaryArgs& args, CUstream_st* stream) {
    validate(args);
    const RotaryShape shape = shape_of(args);
    if (shape.batch == 0 || shape.tokens == 0 || shape.heads == 0) return;
    rotary_cuda(args, plan(shape, current_device()), stream);
}

void rotary_cuda(const RotaryArgs& args, const RotaryPlan& plan, CUstream_st* stream) {
    const LoggedCall logged("rotary", args);
    with_element(args.dtype, [&](auto element) {
        for_each_launch(args, plan.tokens_per_launch,
                        [&](const RotaryArgs& part) { launch_rotary<decltype(element)>(part, plan, stream); });
    });
}

}  // namespace mrrope
