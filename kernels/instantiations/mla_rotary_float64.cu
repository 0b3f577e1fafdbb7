#include "mla_rotary_kernel.cuh"

template void mrrope::launch_mla_rotary<double>(const MlaRotaryLaunch&, KeyTarget, const MlaRotaryPlan&, cudaStream_t);
template void mrrope::launch_mla_rotary_gradient<double>(const MlaRotaryGradientLaunch&, const MlaRotaryPlan&,
                                                         cudaStream_t);
