#include "launch_slices.h"
#include "qk_norm_rotary_and_cache_kernel.cuh"

namespace mrrope {

void qk_norm_rotary_and_cache_cuda(const QkNormRotaryAndCacheArgs& args, CUstream_st* stream) {
    const bool has_norm = args.q_weight != nullptr || args.k_weight != nullptr;
    const bool has_rows = args.rotary.positions.row_of_pair != nullptr;
    // Its kernel has no norms, gates and rows of positions to branch around.
    if (!has_norm && !has_rows && args.gate.heads == 0 && !is_float8(args.q_stored_as)) {
        return rotary_and_cache_cuda(args, stream);
    }
    qk_norm_rotary_and_cache_cuda(args, plan(shape_of(args), current_device()), stream);
}

void qk_norm_rotary_and_cache_cuda(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan,
                                   CUstream_st* stream) {
    if (args.rotary.batch == 0 || args.rotary.tokens == 0 || plan.units.count() == 0) return;
    with_element(args.rotary.dtype, [&](auto element) {
        for_each_launch(args, plan.tokens_per_launch, [&](const QkNormRotaryAndCacheArgs& part) {
            launch_qk_norm_rotary_and_cache<decltype(element)>(part, plan, stream);
        });
    });
}

}  // namespace mrrope
