// One wgmma of N = 160 instead of five of N = 32.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#include "qkv_rotary_kernel.cuh"

template mrrope::QkvLauncher mrrope::qkv_launcher<mrrope::QkvKernel{mrrope::Pairing::halves, /*transposed=*/true, 160}>(
    mrrope::DType dtype);
