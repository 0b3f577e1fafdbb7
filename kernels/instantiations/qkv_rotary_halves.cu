#include "qkv_rotary_kernel.cuh"

template mrrope::QkvLauncher mrrope::qkv_launcher<mrrope::QkvKernel{mrrope::Pairing::halves}>(mrrope::DType dtype);
