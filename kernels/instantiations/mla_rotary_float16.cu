#include "mla_rotary_kernel.cuh"

template void mrrope::launch_mla_rotary<cutlass::half_t>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&,
                                                         cudaStream_t);
template void mrrope::launch_mla_rotary_gradient<cutlass::half_t>(const MlaRotaryGradientLaunch&, const MlaRotaryPlan&,
                                                                  cudaStream_t);
