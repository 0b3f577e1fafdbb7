#include "launch_slices.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "rotary_and_cache_kernel.cuh"

namespace mrrope {

void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, CUstream_st* stream) {
    if (args.rotary.positions.row_of_pair != nullptr) {
        QkNormRotaryAndCacheArgs without_norm;
        static_cast<RotaryAndCacheArgs&>(without_norm) = args;
        return qk_norm_rotary_and_cache_cuda(without_norm, stream);
    }
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
