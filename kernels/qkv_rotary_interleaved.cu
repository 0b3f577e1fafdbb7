#include "qkv_rotary_kernel.cuh"

template mrrope::QkvLauncher mrrope::qkv_launcher<mrrope::Pairing::interleaved>(int kernel, mrrope::DType dtype);
