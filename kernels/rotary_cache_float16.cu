#include "rotary_cache_kernel.cuh"

template void mrrope::launch_rotary_cache<cutlass::half_t>(const RotaryCacheArgs&, const RotaryPlan&, cudaStream_t);
