#include "rotary_cos_sin_kernel.cuh"

template void mrrope::launch_rotary_cos_sin<cutlass::half_t>(const RotaryCosSinArgs&, const RotaryPlan&, cudaStream_t);
