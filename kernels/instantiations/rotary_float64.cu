#include "rotary_kernel.cuh"

template void mrrope::launch_rotary<double>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
