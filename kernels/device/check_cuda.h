#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace mrrope {

// Throws for a failed call of the CUDA runtime: "mrrope: cudaGetDevice failed: no CUDA-capable device is detected
// (cudaErrorNoDevice)".
inline void check_cuda(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears it: the next caller of cudaGetLastError would report it as its own
    throw std::runtime_error(std::string("mrrope: ") + call + " failed: " + cudaGetErrorString(status) + " (" +
                             cudaGetErrorName(status) + ")");
}

// Throws for a failed launch, with the kernel's mangled name and its grid.
inline void check_launch(cudaError_t status, const void* entry, dim3 grid, int block_threads) {
    if (status == cudaSuccess) return;
    const char* name = nullptr;
    const bool has_name = cudaFuncGetName(&name, entry) == cudaSuccess && name != nullptr;
    const std::string call = std::string("the launch of ") + (has_name ? name : "a kernel") + " with " +
                             std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) +
                             " blocks of " + std::to_string(block_threads) + " threads";
    check_cuda(status, call.c_str());
}

}  // namespace mrrope
