#include "qkv_rotary_kernel.cuh"

namespace mrrope {

template QkvLauncher qkv_launcher<QkvKernel{Pairing::interleaved, Phases::computed}>(DType dtype);

}  // namespace mrrope
