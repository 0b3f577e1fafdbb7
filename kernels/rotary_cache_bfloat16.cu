#include "rotary_cache_kernel.cuh"

template void mrrope::launch_rotary_cache<cutlass::bfloat16_t>(const RotaryCacheArgs&, const RotaryPlan&, cudaStream_t);
