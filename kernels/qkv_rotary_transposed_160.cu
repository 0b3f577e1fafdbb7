#define CUTLASS_ENABLE_GDC_FOR_SM90            // starts early, and waits
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // instructions of 160 columns; CUTLASS would take five of 32
#include "qkv_rotary_kernel.cuh"

namespace mrrope {

template QkvLauncher qkv_launcher<QkvKernel{Pairing::halves, Phases::hardware, /*transposed=*/true, 160}>(DType dtype);

}  // namespace mrrope
