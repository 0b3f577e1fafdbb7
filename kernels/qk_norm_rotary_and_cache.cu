#include "launch_slices.h"
#include "qk_norm_rotary_and_cache_kernel.cuh"
#include "rotary_and_cache_plan.h"

namespace mrrope {
namespace {

// The kernel that only rotates leaves the tail of q in place, and does not read it. It is faster with a lookup, too (64
// tokens of 32/8 heads take 2.65 us on an H200, not 2.82), and where heads are not made of vectors (8192 tokens of
// heads of 100 take 205 us, not 480). Elsewhere this one is faster: 64 tokens take 2.23 us, not 2.50. Kernels over all
// heads sum rows, which without norms is for nothing.
bool is_faster_by_rotary_kernel(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan) {
    const RotaryArgs& rotary = args.rotary;
    const bool only_rotates = args.q_weight == nullptr && args.k_weight == nullptr && args.gate.heads == 0 &&
                              !is_float8(args.q_stored_as) && rotary.positions.row_of_pair == nullptr;
    return only_rotates && (plan.needs_lookup || rotary.rotary_dim < rotary.head_dim || !plan.in_registers ||
                            args.over == NormOver::all_heads);
}

}  // namespace

void qk_norm_rotary_and_cache_cuda(const QkNormRotaryAndCacheArgs& args, CUstream_st* stream) {
    const LoggedCall logged("qk_norm_rotary_and_cache", args.rotary, args.k.view.heads);
    validate(args);
    const Device device = current_device();
    const QkNormRotaryAndCachePlan planned = plan(shape_of(args), device);
    if (is_faster_by_rotary_kernel(args, planned)) {
        const RotaryAndCacheArgs& rotated = args;
        return rotary_and_cache_cuda(rotated, plan(shape_of(rotated), device), stream);
    }
    qk_norm_rotary_and_cache_cuda(args, planned, stream);
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
