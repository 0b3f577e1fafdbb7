#pragma once

#include "mrrope/rotary_cache.h"
#include "rotary_plan.h"

// How a rotation on the way to a cache is laid over the GPU: pure functions of the arguments, tested without one.

namespace mrrope {

// What registers must leave room for, so that none are spilled; rounding to float8 takes more. Before sm_90 the same
// code takes a few more.
constexpr int rotary_cache_resident_blocks(bool float8) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    constexpr int of_own_dtype = 14;
#else
    constexpr int of_own_dtype = 16;
#endif
    return float8 ? 10 : of_own_dtype;
}

// The heads of q, k and v, in this order, as rotary_kernel takes those of q and k.
RotaryPlan plan_rotary_cache(const RotaryCacheArgs& args);

template <class F>
void for_each_launch(const RotaryCacheArgs& args, const RotaryPlan& plan, F&& f) {
    for_each_part(args.rotary.batch, args.rotary.tokens, plan, [&](auto... part) { f(slice(args, part...)); });
}

}  // namespace mrrope
