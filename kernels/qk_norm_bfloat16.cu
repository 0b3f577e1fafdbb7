#include "qk_norm_gradient_kernel.cuh"
#include "qk_norm_kernel.cuh"

template void mrrope::launch_qk_norm<cutlass::bfloat16_t>(const QkNormArgs&, const QkNormPlan&, bool, cudaStream_t);
template void mrrope::launch_qk_norm_gradient<cutlass::bfloat16_t>(const QkNormGradientArgs&, const QkNormGradientPlan&,
                                                                   cudaStream_t);
