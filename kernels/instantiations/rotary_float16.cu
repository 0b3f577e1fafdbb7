#include "rotary_kernel.cuh"

template void mrrope::launch_rotary<cutlass::half_t>(const RotaryArgs&, const RotaryPlan&, cudaStream_t);
