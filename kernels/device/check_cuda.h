#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace mrrope {

inline void check_cuda(cudaError_t status) {
    if (status != cudaSuccess) {
        cudaGetLastError();  // clears it: the next caller of cudaGetLastError would report it as its own
        throw std::runtime_error(std::string("mrrope: a kernel could not be launched: ") + cudaGetErrorString(status));
    }
}

}  // namespace mrrope
