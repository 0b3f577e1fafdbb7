#include "learnable_rotary_kernel.cuh"

template void mrrope::launch_learnable_gradient<cutlass::bfloat16_t>(const LearnableRotaryLaunch&, cudaStream_t);
