#include "qkv_rotary_plan.h"

#include <limits>
#include <utility>

#include "head_split.h"

namespace mrrope {
namespace {

using Raster = QkvRotaryPlan::Raster;

// Small M falls back to cuBLAS + rotary: there is no small-M kernel here.
constexpr int64_t max_small_m = 256;

// Fused only where wave quantization and tile padding add at most this to the time of the tiles. Time on an H200,
// bfloat16, with the best raster order and swizzle of each, relative to cuBLAS's GEMM alone (with a rotation after it
// cuBLAS takes 1.04 to 1.25; benchmarks/results/qkv_rotary_plans.json). `idle` is what the two add:
//     rows x outputs x inputs   tiles of 128 tokens, idle      of 160, idle
//       512 x 6144 x 4096              1.265      38 %      1.559     72 %
//      1024 x 6144 x 4096              1.024       3 %      1.266     29 %
//      2048 x 6144 x 4096              1.019       3 %      1.033      7 %
//      8192 x 6144 x 4096              1.013       3 %      0.990      2 %
//     32768 x 6144 x 4096              1.001       1 %      0.997      1 %
//      1024 x 2560 x 2048              1.447      65 %      1.539    106 %
//      2048 x 2560 x 2048              1.294      24 %      1.047      3 %
//      8192 x 2560 x 2048              1.061       3 %      1.019      3 %
//     32768 x 2560 x 2048              1.019       1 %      1.023      3 %
//      2048 x 1280 x 8192              1.554      65 %      1.039      3 %
//      8192 x 1280 x 8192              1.053       3 %      1.020      3 %
//     32768 x 1280 x 8192              1.010       3 %      1.003      3 %
constexpr double max_idle = 0.08;

int64_t waves_of(const QkvKernel& kernel, const QkvRotaryShape& shape, int swizzle, const Device& device) {
    return ceil_div(scheduled_tiles(kernel, shape, swizzle), device.sms);
}

// Time of a kernel, in tokens per SM: a partial wave costs as much as a full one.
int64_t cost_of(const QkvKernel& kernel, const QkvRotaryShape& shape, const Device& device) {
    return waves_of(kernel, shape, 1, device) * kernel.tile_tokens;
}

// Up to here all rows of x stay in L2 while the weights stream through; beyond, only a few tiles of each do.
constexpr int64_t many_rows = 8192;
constexpr int many_outputs = 4096;

// The fastest swizzle as measured, halved until its padding costs no wave.
int choose_swizzle(const QkvKernel& kernel, const QkvRotaryShape& shape, const Device& device) {
    int swizzle = kernel.transposed ? 4 : shape.rows >= many_rows ? 8 : 2;
    while (waves_of(kernel, shape, swizzle, device) > waves_of(kernel, shape, 1, device)) swizzle /= 2;
    return swizzle;
}

}  // namespace

std::string describe(const QkvKernel& kernel) {
    const std::string name = kernel.pairing == Pairing::halves ? "halves" : "interleaved";
    return name + (kernel.transposed ? " transposed" : "");
}

QkvRotaryShape shape_of(const QkvRotaryArgs& args) {
    const int element_size = size_of(args.dtype);
    const auto aligned = [&](const void* start, int64_t stride) {
        return reinterpret_cast<uintptr_t>(start) % access_bytes == 0 && stride * element_size % access_bytes == 0;
    };
    return {.rows = args.rows(),
            .inputs = args.inputs,
            .outputs = args.outputs(),
            .head_dim = args.head_dim,
            .rotary_dim = args.rotary_dim,
            .dtype = args.dtype,
            .pairing = args.pairing,
            .aligned = aligned(args.x, args.x_stride) && aligned(args.weight, args.weight_stride) &&
                       aligned(args.out, args.outputs()) && aligned(args.bias, 0)};
}

bool can_fuse(const QkvRotaryShape& shape, const Device& device) {
    if (!device.wgmma || !shape.aligned || shape.inputs < 8 || shape.inputs % 8 != 0) return false;
    if (shape.dtype != DType::bfloat16 && shape.dtype != DType::float16) return false;
    // Rows and threads are counted in 32 bits.
    if (shape.rows < 1 || shape.rows > std::numeric_limits<int32_t>::max() / 128) return false;
    // The epilogue rotates blocks of columns as a whole or not at all: rotary_dim columns in `halves` pairing, a visit
    // in `interleaved` pairing. No block may straddle heads, or the end of a rotated part.
    if (shape.pairing == Pairing::halves) {
        return (shape.rotary_dim == 64 || shape.rotary_dim == 128) && shape.head_dim % shape.rotary_dim == 0;
    }
    constexpr int columns = epilogue_columns(Pairing::interleaved);
    return shape.head_dim % columns == 0 && shape.rotary_dim % columns == 0;
}

bool supports(const QkvKernel& kernel, const QkvRotaryShape& shape) {
    return kernel.pairing == shape.pairing && (!kernel.transposed || shape.rotary_dim == qkv_tile);
}

int64_t scheduled_tiles(const QkvKernel& kernel, const QkvRotaryShape& shape, int swizzle) {
    const auto round_up = [](int64_t group, int64_t tiles) { return ceil_div(tiles, group) * group; };
    const int64_t by_tokens = ceil_div(shape.rows, kernel.tile_tokens);
    const int64_t by_components = ceil_div(shape.outputs, qkv_tile);
    const auto [m, n] = kernel.transposed ? std::pair(by_components, by_tokens) : std::pair(by_tokens, by_components);
    return round_up(2 * swizzle, m) * round_up(swizzle, n);
}

QkvRotaryPlan plan(const QkvRotaryShape& shape, const Device& device) {
    if (!can_fuse(shape, device) || shape.rows <= max_small_m) return {};
    QkvRotaryPlan plan;
    int64_t lowest_cost = std::numeric_limits<int64_t>::max();
    for (int index = 0; index < qkv_kernel_count; ++index) {
        if (!supports(qkv_kernels[index], shape)) continue;
        const int64_t cost = cost_of(qkv_kernels[index], shape, device);
        if (cost > lowest_cost) continue;  // ties go to the wider tiles, which come later and read less
        lowest_cost = cost;
        plan.kernel = index;
    }
    const double ideal_cost = static_cast<double>(shape.rows * shape.outputs) / (qkv_tile * device.sms);
    if (static_cast<double>(lowest_cost) > (1 + max_idle) * ideal_cost) return {};
    const bool along_columns = shape.rows >= many_rows && shape.outputs < many_outputs;
    plan.raster = along_columns ? Raster::columns : Raster::rows;
    plan.swizzle = choose_swizzle(qkv_kernels[plan.kernel], shape, device);
    return plan;
}

}  // namespace mrrope
