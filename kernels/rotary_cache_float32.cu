#include "rotary_cache_kernel.cuh"

template void mrrope::launch_rotary_cache<float>(const RotaryCacheArgs&, const RotaryPlan&, cudaStream_t);
