#include "qk_norm_gradient_kernel.cuh"
#include "qk_norm_kernel.cuh"

template void mrrope::launch_qk_norm<float>(const QkNormArgs&, const QkNormPlan&, bool, cudaStream_t);
template void mrrope::launch_qk_norm_gradient<float>(const QkNormGradientArgs&, const QkNormGradientPlan&,
                                                     cudaStream_t);
