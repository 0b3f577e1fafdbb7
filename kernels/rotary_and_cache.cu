#include "rotary_and_cache_kernel.cuh"

namespace mrrope {

void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, CUstream_st* stream) {
    const int64_t heads = static_cast<int64_t>(args.rotary.q.heads) + args.k.view.heads + args.v.view.heads;
    if (args.rotary.batch == 0 || args.rotary.tokens == 0 || heads == 0) return;
    const RotaryPlan plan = plan_rotary_and_cache(args);
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, plan, [&](const RotaryAndCacheArgs& part) {
            launch_rotary_and_cache<decltype(element)>(part, plan, stream);
        });
    });
}

}  // namespace mrrope
