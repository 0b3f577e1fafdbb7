#include "rotary_kernel.cuh"

template void mrrope::launch_rotary<cutlass::bfloat16_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
