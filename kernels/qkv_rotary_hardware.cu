#define CUTLASS_ENABLE_GDC_FOR_SM90  // starts early, and waits
#include "qkv_rotary_kernel.cuh"

namespace mrrope {

template QkvLauncher qkv_launcher<QkvKernel{Pairing::halves, Phases::hardware}>(DType dtype);

}  // namespace mrrope
