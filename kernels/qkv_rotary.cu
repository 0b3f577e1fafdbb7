#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device_properties.h"
#include "qkv_rotary_launch.h"

namespace mrrope {
#ifdef MRROPE_WITH_WGMMA
namespace {

QkvLauncher launcher_for(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
    if (plan.kernel < 0 || plan.kernel >= qkv_kernel_count || !can_fuse(shape_of(args), current_device()) ||
        !supports(qkv_kernels[plan.kernel], shape_of(args))) {
        throw std::invalid_argument("mrrope: kernel " + std::to_string(plan.kernel) + " does not take this projection");
    }
    return [&]<int... kernels>(std::integer_sequence<int, kernels...>) {
        constexpr QkvLauncher (*launchers[])(DType) = {qkv_launcher<qkv_kernels[kernels]>...};
        return launchers[plan.kernel](args.dtype);
    }(std::make_integer_sequence<int, qkv_kernel_count>{});
}
}  // namespace
#endif

std::vector<std::string> qkv_rotary_kernels_cuda() {
    std::vector<std::string> names;
    for (const QkvKernel& kernel : qkv_kernels) names.push_back(describe(kernel));
    return names;
}

#ifdef MRROPE_WITH_WGMMA

QkvRotaryPlan plan_qkv_rotary_cuda(const QkvRotaryArgs& args) {
    return plan(shape_of(args), current_device());
}

size_t qkv_rotary_workspace_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
    return launcher_for(args, plan).workspace(args, plan);
}

void qkv_rotary_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan, void* workspace, CUstream_st* stream) {
    validate(args);
    launcher_for(args, plan).launch(args, plan, workspace, stream);
}

#else  // not compiled for sm_90a

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
