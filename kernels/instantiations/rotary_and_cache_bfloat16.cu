#include "rotary_and_cache_kernel.cuh"

template void mrrope::launch_rotary_and_cache<cutlass::bfloat16_t>(const RotaryAndCacheArgs&, const RotaryPlan&,
                                                                   cudaStream_t);
