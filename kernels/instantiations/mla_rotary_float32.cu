#include "mla_rotary_kernel.cuh"

template void mrrope::launch_mla_rotary<float>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&, cudaStream_t);
template void mrrope::launch_mla_rotary_gradient<float>(const MlaRotaryGradientLaunch&, const MlaRotaryPlan&,
                                                        cudaStream_t);
