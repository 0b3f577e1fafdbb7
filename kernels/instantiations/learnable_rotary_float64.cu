#include "learnable_rotary_kernel.cuh"

template void mrrope::launch_learnable_rotary<double>(const LearnableRotaryLaunch&, bool, cudaStream_t);
