#include "rotary_kernel.cuh"

template void mrrope::launch_rotary<float>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
