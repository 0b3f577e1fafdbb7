#include "learnable_rotary_kernel.cuh"

template void mrrope::launch_learnable_gradient<double>(const LearnableRotaryLaunch&, cudaStream_t);
