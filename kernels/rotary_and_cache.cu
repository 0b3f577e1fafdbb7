#include "launch_slices.h"
#include "rotary_and_cache_kernel.cuh"

namespace mrrope {

void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, CUstream_st* stream) {
    const RotaryAndCacheShape shape = shape_of(args);
    if (shape.batch == 0 || shape.tokens == 0 || shape.q_heads + shape.kv_heads == 0) return;
    const RotaryPlan planned = plan(shape, current_device());
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, planned.tokens_per_launch, [&](const RotaryAndCacheArgs& part) {
            launch_rotary_and_cache<decltype(element)>(part, planned, stream);
        });
    });
}

}  // namespace mrrope
