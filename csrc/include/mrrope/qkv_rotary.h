#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mrrope/rotary.h"

// The QKV projection fused with the rotation of q and k: the GEMM's epilogue rotates the accumulators.

namespace mrrope {

// out = x weight^T + bias, where x is [rows, inputs] and weight is [outputs, inputs]. A row of out holds the heads of
// q, then k, then v; those of q and k are rotated by the row's position. All pointers are device memory.
struct QkvRotaryArgs {
    const void* x = nullptr;
    int64_t x_stride = 0;  // between rows, in elements
    const void* weight = nullptr;
    int64_t weight_stride = 0;
    const void* bias = nullptr;       // [outputs], or nullptr
    void* out = nullptr;              // contiguous
    PositionsView positions;          // one per row: row = sequence * tokens + token
    const uint64_t* table = nullptr;  // packed(FrequencyTable)
    int64_t batch = 0;
    int64_t tokens = 0;
    int inputs = 0;
    int q_heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    DType dtype = DType::bfloat16;
    Pairing pairing = Pairing::halves;

    int64_t rows() const { return batch * tokens; }
    int outputs() const { return (q_heads + 2 * kv_heads) * head_dim; }
};

void validate(const QkvRotaryArgs& args);

// The launch plan of one call.
struct QkvRotaryPlan {
    enum class Raster { rows, columns };  // raster order: along which dimension consecutive tiles lie

    static constexpr int unfused = -1;

    int kernel = unfused;  // index into qkv_rotary_kernels_cuda(); unfused: cuBLAS, then rotary
    int swizzle = 1;       // max_swizzle_size of the CUTLASS scheduler
    Raster raster = Raster::rows;
};

// The kernels' names, indexed by QkvRotaryPlan::kernel.
std::vector<std::string> qkv_rotary_kernels_cuda();

// The plan for the current device. A separate call, because the caller runs unfused plans.
QkvRotaryPlan plan_qkv_rotary_cuda(const QkvRotaryArgs& args);

// Device workspace for this plan, in bytes; it must be aligned to 256 bytes.
size_t qkv_rotary_workspace_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan);

// Asynchronous on `stream` of the current device. The plan must not be `unfused`. Throws std::runtime_error if the
// launch fails, std::invalid_argument if the plan's kernel does not support these arguments.
void qkv_rotary_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan, void* workspace, CUstream_st* stream);

}  // namespace mrrope
