#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

// Launches that overlap. From sm_90 on, a kernel may be started while the one before it in the stream still runs: its
// blocks are placed, and then it waits.

namespace mrrope {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kernels_overlap = true;
#else
inline constexpr bool kernels_overlap = false;
#endif

// Before the first access to memory that counts, by every thread: until the kernel before has ended and its results can
// be seen.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

// To the second-level cache, which is one for all: it never holds anything old.
__device__ inline void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Keeps the compiler from computing an address only after the wait, where it would move it otherwise: hands it to an
// instruction that is never reached, which only the caller knows. On an H200 that is 6 to 8 % of a call for 16 to 256
// tokens; really prefetching there costs more than it gains.
__device__ inline void compute_before_wait([[maybe_unused]] bool never, [[maybe_unused]] const void* address) {
#if __CUDA_ARCH__ >= 900
    if (never) prefetch(address);
#endif
}

// The next kernel, if it can wait like this one, may be started as soon as every block has said so. Never before the
// wait: a kernel that has started may then rely on all but the one before it, and read their results before its own
// wait.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

inline void check_cuda(cudaError_t status) {
    if (status != cudaSuccess) {
        cudaGetLastError();  // or the next one to ask would take it for an error of its own
        throw std::runtime_error(std::string("mrrope: a kernel could not be launched: ") + cudaGetErrorString(status));
    }
}

// Whether a kernel waits on each device, as far as that was asked.
enum class Waits : char { unknown, no, yes };
using WaitsOnDevices = std::array<std::atomic<Waits>, 64>;

template <auto kernel>
inline WaitsOnDevices waits_of{};

// A kernel that may be launched with the PDL attribute, where its code has griddepcontrol.wait. PTX older than sm_90
// has none, even where the driver compiles it for a newer device: launched early, it would not wait.
template <class Launch>
struct DependentKernel {
    void (*entry)(Launch);
    WaitsOnDevices* known;

    // Asked of the driver once for each kernel and device.
    bool waits_on_current_device() const {
        int device = 0;
        check_cuda(cudaGetDevice(&device));
        std::atomic<Waits>& answer = (*known)[device % known->size()];
        if (answer == Waits::unknown) {
            cudaFuncAttributes attributes{};
            check_cuda(cudaFuncGetAttributes(&attributes, entry));
            answer = attributes.ptxVersion >= 90 ? Waits::yes : Waits::no;
        }
        return answer == Waits::yes;
    }
};

template <auto kernel>
inline constexpr DependentKernel dependent_kernel{kernel, &waits_of<kernel>};

template <class Launch>
void launch_overlapping(const DependentKernel<Launch>& kernel, dim3 grid, int block_threads, cudaStream_t stream,
                        const Launch& launch) {
    cudaLaunchAttribute early;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(block_threads);
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = kernel.waits_on_current_device() ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, kernel.entry, launch));
}

}  // namespace mrrope
