#include "device_properties.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "device/check_cuda.h"

namespace mrrope {

Device current_device() {
    static std::array<std::atomic<int>, 64> cached{};  // 4 * sms + 2 * pdl + wgmma; 0: not queried yet
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    std::atomic<int>& properties = cached[device % cached.size()];
    if (properties == 0) {
        int major = 0;
        int sms = 0;
        check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
        check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
        properties = 4 * sms + (major >= 9 ? 2 : 0) + (major == 9 ? 1 : 0);
    }
    return {.sms = properties / 4, .pdl = (properties & 2) != 0, .wgmma = (properties & 1) != 0};
}

}  // namespace mrrope
