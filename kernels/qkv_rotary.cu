#include <array>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cos_sin_table.cuh"
#include "dependent_launch.cuh"
#include "head_fragment.cuh"
#include "qkv_rotary_launch.h"

namespace mrrope {
namespace {

constexpr int table_block_threads = 256;

// Passed to the kernel by value.
struct CosSinLaunch {
    PositionsView positions;
    cutlass::FastDivmod tokens;
    cutlass::FastDivmod lanes;
    const uint64_t* table;
    float4* cos_sin;
    int threads;
};

// A thread computes two pairs of one row: 16 bytes a store.
__global__ void __launch_bounds__(table_block_threads) cos_sin_kernel(const __grid_constant__ CosSinLaunch launch) {
    const int thread = blockIdx.x * table_block_threads + threadIdx.x;
    int row, lane, sequence, token;
    launch.lanes(row, lane, thread);
    launch.tokens(sequence, token, row);
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (thread >= launch.threads) return;
    const int64_t position = position_at(launch.positions, 0, sequence, token);
    const auto gain = static_cast<float>(attention_factor_of(launch.table[2 * launch.lanes.divisor]));
    const CosSin<float> first = turn(phase_of(position, launch.table[2 * lane]), gain, 1.0f);
    const CosSin<float> second = turn(phase_of(position, launch.table[2 * lane + 1]), gain, 1.0f);
    launch.cos_sin[thread] = {first.cos, first.sin, second.cos, second.sin};
}

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

void write_cos_sin_table(const QkvRotaryArgs& args, float2* table, cudaStream_t stream) {
    const int lanes = args.rotary_dim / 4;
    const auto threads = static_cast<int>(args.rows() * lanes);
    const CosSinLaunch launch{.positions = args.positions,
                              .tokens = cutlass::FastDivmod(static_cast<int>(args.tokens)),
                              .lanes = cutlass::FastDivmod(lanes),
                              .table = args.table,
                              .cos_sin = reinterpret_cast<float4*>(table),
                              .threads = threads};
    const int blocks = (threads + table_block_threads - 1) / table_block_threads;
    launch_overlapping(cos_sin_kernel, dim3(blocks), table_block_threads, stream, launch);
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
