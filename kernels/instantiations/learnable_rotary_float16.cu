#include "learnable_rotary_kernel.cuh"

template void mrrope::launch_learnable_rotary<cutlass::half_t>(const LearnableRotaryLaunch&, bool, cudaStream_t);
