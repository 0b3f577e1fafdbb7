#include "qkv_rotary_kernel.cuh"

namespace mrrope {

template QkvLauncher qkv_launcher<QkvKernel{Pairing::halves, Phases::computed}>(DType dtype);
template QkvLauncher qkv_launcher<QkvKernel{Pairing::halves, Phases::tabled}>(DType dtype);

}  // namespace mrrope
