#include "qk_norm_rotary_and_cache_kernel.cuh"

template void mrrope::launch_qk_norm_rotary_and_cache<cutlass::bfloat16_t>(const QkNormRotaryAndCacheArgs&,
                                                                           const QkNormRotaryAndCachePlan&,
                                                                           cudaStream_t);
