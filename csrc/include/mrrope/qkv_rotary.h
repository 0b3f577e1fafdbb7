#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "mrrope/rotary.h"

// The projection to q, k and v with the rotation of q and k in it: one matrix product, whose results are rotated while
// they are still in registers.

namespace mrrope {

// out = x weight^T + bias, of [rows, inputs] and [outputs, inputs]; a row of out holds the heads of q, then those of k,
// then those of v, and the heads of q and k are rotated by the position of the row. Everything is where it is used.
struct QkvRotaryArgs {
    const void* x = nullptr;
    int64_t x_stride = 0;  // in elements, from row to row
    const void* weight = nullptr;
    int64_t weight_stride = 0;
    const void* bias = nullptr;       // of [outputs], or none
    void* out = nullptr;              // contiguous
    PositionsView positions;          // one position a row: row = sequence * tokens + token
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

// How one call is laid over the GPU.
struct QkvRotaryPlan {
    enum class Raster { rows, columns };  // which way neighbouring tiles lie

    static constexpr int apart = -1;

    int kernel = apart;  // of qkv_kernels; or a plain matrix product, and the rotation after it
    int swizzle = 1;     // tiles that are walked through in blocks of so many
    Raster raster = Raster::rows;
};

// The names of the kernels that plans count.
std::vector<std::string> qkv_rotary_kernels_cuda();

// What the current device does best; asked before the call, since the plain product is somebody else's.
QkvRotaryPlan plan_qkv_rotary_cuda(const QkvRotaryArgs& args);

// Device memory that a call by this plan needs, in bytes, aligned to 256.
size_t qkv_rotary_workspace_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan);

// Asynchronous on `stream` of the current device, by a plan that is not `apart`. Throws std::runtime_error where the
// launch fails, std::invalid_argument where the plan's kernel does not take such a call.
void qkv_rotary_cuda(const QkvRotaryArgs& args, const QkvRotaryPlan& plan, void* workspace, CUstream_st* stream);

}  // namespace mrrope
