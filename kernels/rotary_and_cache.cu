#include "launch_slices.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "rotary_and_cache_kernel.cuh"

namespace mrrope {

void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, CUstream_st* stream) {
    const LoggedCall logged("rotary_and_cache", args.rotary, args.k.view.heads);
    qk_norm_rotary_and_cache_cuda(QkNormRotaryAndCacheArgs{args}, stream);
}

void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, const RotaryPlan& plan, CUstream_st* stream) {
    if (args.rotary.batch == 0 || args.rotary.tokens == 0 || args.rotary.q.heads + args.k.view.heads == 0) return;
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, plan.tokens_per_launch, [&](const RotaryAndCacheArgs& part) {
            launch_rotary_and_cache<decltype(element)>(part, plan, stream);
        });
    });
}

}  // namespace mrrope
