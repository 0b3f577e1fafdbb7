#include "qk_norm_rotary_gradient_kernel.cuh"
#include "qk_norm_rotary_kernel.cuh"

template void mrrope::launch_qk_norm_rotary<cutlass::bfloat16_t>(const QkNormRotaryArgs&, const QkNormRotaryPlan&,
                                                                 cudaStream_t);
template void mrrope::launch_qk_norm_rotary_gradient<cutlass::bfloat16_t>(const QkNormRotaryGradientArgs&,
                                                                          const QkNormRotaryGradientPlan&,
                                                                          cudaStream_t);
