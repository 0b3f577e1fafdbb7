#pragma once

#ifdef CUDA_KERNEL  // defined by kernel-builder, which builds the package for the Hub
#define MRROPE_WITH_CUDA
#endif

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include "mrrope/learnable_rotary.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"

#ifdef MRROPE_WITH_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#endif

// Backend::run(args, heads) runs an op on torch's threads, or on the current stream of heads' device.

namespace mrrope {

struct Cpu {
    static void run(const RotaryArgs& args, const at::Tensor&) { rotary_cpu(args, parallel_for); }
    static void run(const RotaryCosSinArgs& args, const at::Tensor&) { rotary_cos_sin_cpu(args, parallel_for); }
    static void run(const RescaleCacheArgs& args, const at::Tensor&) { rescale_cache_cpu(args, parallel_for); }
    static void run(const RotaryAndCacheArgs& args, const at::Tensor&) { rotary_and_cache_cpu(args, parallel_for); }
    static void run(const MlaRotaryArgs& args, const at::Tensor&) { mla_rotary_cpu(args, parallel_for); }
    static void run(const MlaRotaryGradientArgs& args, const at::Tensor&) {
        mla_rotary_gradient_cpu(args, parallel_for);
    }
    static void run(const MlaRotaryAndCacheArgs& args, const at::Tensor&) {
        mla_rotary_and_cache_cpu(args, parallel_for);
    }
    static void run(const QkNormRotaryArgs& args, const at::Tensor&) { qk_norm_rotary_cpu(args, parallel_for); }
    static void run(const QkNormRotaryAndCacheArgs& args, const at::Tensor&) {
        qk_norm_rotary_and_cache_cpu(args, parallel_for);
    }
    static void run(const QkNormRotaryGradientArgs& args, const at::Tensor&) {
        qk_norm_rotary_gradient_cpu(args, parallel_for);
    }
    static WeightSumRows weight_sum_rows(const QkNormRotaryGradientArgs& args, const at::Tensor&) {
        return weight_sum_rows_cpu(args);
    }
    static void run(const LearnableRotaryArgs& args, const at::Tensor&) { learnable_rotary_cpu(args, parallel_for); }
    static void run(const LearnableRotaryGradientArgs& args, const at::Tensor&) {
        learnable_rotary_gradient_cpu(args, parallel_for);
    }
    static int64_t table_sum_rows(const LearnableRotaryGradientArgs& args, const at::Tensor&) {
        return table_sum_rows_cpu(args);
    }

private:
    static void parallel_for(int64_t count, int64_t grain, const RangeBody& body) {
        at::parallel_for(0, count, grain, body);
    }
};

struct Cuda {
#ifdef MRROPE_WITH_CUDA
    static void run(const RotaryArgs& args, const at::Tensor& heads) { launch(rotary_cuda, args, heads); }
    static void run(const RotaryCosSinArgs& args, const at::Tensor& heads) { launch(rotary_cos_sin_cuda, args, heads); }
    static void run(const RescaleCacheArgs& args, const at::Tensor& heads) { launch(rescale_cache_cuda, args, heads); }
    static void run(const RotaryAndCacheArgs& args, const at::Tensor& heads) {
        launch(rotary_and_cache_cuda, args, heads);
    }
    static void run(const MlaRotaryArgs& args, const at::Tensor& heads) { launch(mla_rotary_cuda, args, heads); }
    static void run(const MlaRotaryGradientArgs& args, const at::Tensor& heads) {
        launch(mla_rotary_gradient_cuda, args, heads);
    }
    static void run(const MlaRotaryAndCacheArgs& args, const at::Tensor& heads) {
        launch(mla_rotary_and_cache_cuda, args, heads);
    }
    static void run(const QkNormRotaryArgs& args, const at::Tensor& heads) { launch(qk_norm_rotary_cuda, args, heads); }
    static void run(const QkNormRotaryAndCacheArgs& args, const at::Tensor& heads) {
        launch(qk_norm_rotary_and_cache_cuda, args, heads);
    }
    static void run(const QkNormRotaryGradientArgs& args, const at::Tensor& heads) {
        launch(qk_norm_rotary_gradient_cuda, args, heads);
    }
    // The plans behind both numbers of rows are those of the current device: the heads' device, as in launch().
    static WeightSumRows weight_sum_rows(const QkNormRotaryGradientArgs& args, const at::Tensor& heads) {
        const c10::DeviceGuard guard(heads.device());
        return weight_sum_rows_cuda(args);
    }
    static void run(const LearnableRotaryArgs& args, const at::Tensor& heads) {
        launch(learnable_rotary_cuda, args, heads);
    }
    static void run(const LearnableRotaryGradientArgs& args, const at::Tensor& heads) {
        launch(learnable_rotary_gradient_cuda, args, heads);
    }
    // By c10's virtual interface, which CUDA builds of torch implement: libc10_cuda is not linked, because CPU builds
    // do not have it.
    static CUstream_st* current_stream(at::Device device) {
        const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
        return static_cast<CUstream_st*>(stream.native_handle());
    }
    static int64_t table_sum_rows(const LearnableRotaryGradientArgs& args, const at::Tensor& heads) {
        const c10::DeviceGuard guard(heads.device());
        return table_sum_rows_cuda(args);
    }

private:
    template <class Args>
    static void launch(void (*kernel)(const Args&, CUstream_st*), const Args& args, const at::Tensor& heads) {
        const c10::DeviceGuard guard(heads.device());
        kernel(args, current_stream(heads.device()));
    }
#else
    template <class Args>
    static void run(const Args&, const at::Tensor& heads) {
        TORCH_CHECK(false, "q is on ", heads.device(),
                    ", but this build of mrrope has no CUDA kernels: rebuild it where nvcc is");
    }
    static WeightSumRows weight_sum_rows(const QkNormRotaryGradientArgs&, const at::Tensor&) { return {}; }
    static int64_t table_sum_rows(const LearnableRotaryGradientArgs&, const at::Tensor&) { return 0; }
#endif
};

}  // namespace mrrope
