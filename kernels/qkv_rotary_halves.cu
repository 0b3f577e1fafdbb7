#include "qkv_rotary_kernel.cuh"

template mrrope::QkvLauncher mrrope::qkv_launcher<mrrope::Pairing::halves>(int kernel, mrrope::DType dtype);
