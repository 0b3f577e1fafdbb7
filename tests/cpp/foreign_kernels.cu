#include <algorithm>
#include <iterator>

#include "device_properties.h"
#include "foreign_kernels.h"
#include "waiting_copy.cuh"

namespace mrrope::testing {
namespace {

__global__ void slow_writer(int* values, int value) {
    pdl_trigger();
    const long long start = clock64();
    while (clock64() - start < 50'000) {
    }
    values[threadIdx.x] = value;
}

__global__ void reader(const int* values, int* seen, Reads reads) {
    const volatile int* from = values + threadIdx.x;  // volatile: not moved across the wait
    int value = 0;
    if (reads == Reads::before_wait) value = *from;
    pdl_wait();
    if (reads == Reads::after_wait) value = *from;
    seen[threadIdx.x] = value;
}

}  // namespace

void launch_slow_writer(int* values, int value, cudaStream_t stream) {
    slow_writer<<<1, foreign_values, 0, stream>>>(values, value);
    check_cuda(cudaGetLastError(), "slow_writer");
}

void launch_reader(const int* values, int* seen, Reads reads, cudaStream_t stream) {
    cudaLaunchAttribute pdl;
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(foreign_values);
    config.stream = stream;
    config.attrs = &pdl;
    config.numAttrs = copy_waits() ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, reader, values, seen, reads), "the launch of reader");
}

void launch_copy(const int* values, int* seen, cudaStream_t stream) {
    launch_with_pdl(waiting_copy_kernel, dim3(1), foreign_values, stream, {values, seen});
}

bool copy_waits() {
    return waiting_copy_kernel.waits_on_current_device();
}

bool has_dependent_launch() {
    constexpr int compiled[] = {__CUDA_ARCH_LIST__};
    return current_device().pdl && *std::max_element(std::begin(compiled), std::end(compiled)) >= 900;
}

}  // namespace mrrope::testing
