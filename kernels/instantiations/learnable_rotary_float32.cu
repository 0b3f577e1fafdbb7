#include "learnable_rotary_kernel.cuh"

template void mrrope::launch_learnable_gradient<float>(const LearnableRotaryLaunch&, cudaStream_t);
