#include <array>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device/dependent_launch.cuh"
#include "qkv_rotary_launch.h"

namespace mrrope {
namespace {

// What is known of a device, asked of the driver once.
QkvDevice current_device() {
    static std::array<std::atomic<int>, 64> known{};
    int device = 0;
    check_cuda(cudaGetDevice(&device));
    std::atomic<int>& answer = known[device % known.size()];
    if (answer == 0) {
        int major = 0;
        int multiprocessors = 0;
        check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
        answer = 2 * multiprocessors + (major == 9 ? 1 : 0);
    }
    return {.has_wgmma = answer % 2 == 1, .multiprocessors = answer / 2};
}

#ifdef MRROPE_WITH_WGMMA
QkvLauncher launcher_for(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
    if (plan.kernel < 0 || plan.kernel >= qkv_kernel_count || !can_fuse(shape_of(args), current_device()) ||
        !takes(qkv_kernels[plan.kernel], shape_of(args))) {
        throw std::invalid_argument("mrrope: kernel " + std::to_string(plan.kernel) + " does not take this projection");
    }
    return [&]<int... kernels>(std::integer_sequence<int, kernels...>) {
        constexpr QkvLauncher (*launchers[])(DType) = {qkv_launcher<qkv_kernels[kernels]>...};
        return launchers[plan.kernel](args.dtype);
    }(std::make_integer_sequence<int, qkv_kernel_count>{});
}
#endif

}  // namespace

int multiprocessors_of_current_device() {
    return current_device().multiprocessors;
}

std::vector<std::string> qkv_rotary_kernels_cuda() {
    std::vector<std::string> names;
    for (const QkvKernel& kernel : qkv_kernels) names.push_back(describe(kernel));
    return names;
}

#ifdef MRROPE_WITH_WGMMA

QkvRotaryPlan plan_qkv_rotary_cuda(const QkvRotaryArgs& args) {
    return plan_qkv_rotary(shape_of(args), current_device());
}

size_t qkv_rotary_workspace_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
    return launcher_for(args, plan).workspace(args, plan);
}

void qkv_rotary_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan, void* workspace, CUstream_st* stream) {
    launcher_for(args, plan).launch(args, plan, workspace, stream);
}

#else  // no kernel was compiled for sm_90a

QkvRotaryPlan plan_qkv_rotary_cuda(const QkvRotaryArgs&) {
    return {};
}

size_t qkv_rotary_workspace_cuda(const QkvRotaryArgs&, const QkvRotaryPlan&) {
    return 0;
}

void qkv_rotary_cuda(const QkvRotaryArgs&, const QkvRotaryPlan&, void*, CUstream_st*) {
    throw std::invalid_argument("mrrope: this build has no projection for sm_90a");
}

#endif

}  // namespace mrrope
