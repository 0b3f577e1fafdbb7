#include "qkv_rotary_plan.h"

#include <limits>
#include <utility>

#include "head_split.h"

namespace mrrope {
namespace {

using Raster = QkvRotaryPlan::Raster;

// Few rows are cuBLAS's, which has kernels for them that these are not.
constexpr int64_t rows_apart = 256;

// Of the chip's time, by the tiles that are missing in the last round and by those that hang over the edge. On an H200,
// bfloat16, the best way through the tiles of each, as so many times cuBLAS's product alone (a rotation after it makes
// that 1.04 to 1.25; benchmarks/results/qkv_rotary_plans.json):
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
constexpr double most_idle = 0.08;

int64_t rounds_of(const QkvKernel& kernel, const QkvRotaryShape& shape, int swizzle, const QkvDevice& device) {
    return ceil_div(tiles_of(kernel, shape, swizzle), device.multiprocessors);
}

// What a kernel takes, in tokens of one multiprocessor: a round that is begun costs as much as a full one.
int64_t cost_of(const QkvKernel& kernel, const QkvRotaryShape& shape, const QkvDevice& device) {
    return rounds_of(kernel, shape, 1, device) * kernel.tile_tokens;
}

// Few rows stay in the cache while the weights pass by; of many, a few tiles of either do.
constexpr int64_t many_rows = 8192;
constexpr int many_outputs = 4096;

// As many tiles side by side as was fastest, or as many fewer as it takes that none is lost for want of others.
int swizzle_for(const QkvKernel& kernel, const QkvRotaryShape& shape, const QkvDevice& device) {
    int swizzle = kernel.transposed ? 4 : shape.rows >= many_rows ? 8 : 2;
    while (rounds_of(kernel, shape, swizzle, device) > rounds_of(kernel, shape, 1, device)) swizzle /= 2;
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

bool can_fuse(const QkvRotaryShape& shape, const QkvDevice& device) {
    if (!device.has_wgmma || !shape.aligned || shape.inputs < 8 || shape.inputs % 8 != 0) return false;
    if (shape.dtype != DType::bfloat16 && shape.dtype != DType::float16) return false;
    // Rows and threads are counted in 32 bits.
    if (shape.rows < 1 || shape.rows > std::numeric_limits<int32_t>::max() / 128) return false;
    // What is visited at once lies in one head, and turns by whole groups of 8 columns or not at all.
    if (shape.pairing == Pairing::halves) {
        return (shape.rotary_dim == 64 || shape.rotary_dim == 128) && shape.head_dim % shape.rotary_dim == 0;
    }
    constexpr int columns = columns_at_a_time(Pairing::interleaved);
    return shape.head_dim % columns == 0 && shape.rotary_dim % columns == 0;
}

bool takes(const QkvKernel& kernel, const QkvRotaryShape& shape) {
    return kernel.pairing == shape.pairing && (!kernel.transposed || shape.rotary_dim == qkv_tile);
}

int64_t tiles_of(const QkvKernel& kernel, const QkvRotaryShape& shape, int swizzle) {
    const auto in_groups_of = [](int64_t group, int64_t tiles) { return ceil_div(tiles, group) * group; };
    const int64_t by_tokens = ceil_div(shape.rows, kernel.tile_tokens);
    const int64_t by_components = ceil_div(shape.outputs, qkv_tile);
    const auto [below, beside] =
        kernel.transposed ? std::pair(by_components, by_tokens) : std::pair(by_tokens, by_components);
    return in_groups_of(2 * swizzle, below) * in_groups_of(swizzle, beside);
}

QkvRotaryPlan plan_qkv_rotary(const QkvRotaryShape& shape, const QkvDevice& device) {
    if (!can_fuse(shape, device) || shape.rows <= rows_apart) return {};
    QkvRotaryPlan plan;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int index = 0; index < qkv_kernel_count; ++index) {
        if (!takes(qkv_kernels[index], shape)) continue;
        const int64_t cost = cost_of(qkv_kernels[index], shape, device);
        if (cost > least) continue;  // of equals the one of wider tiles, which comes later and reads less
        least = cost;
        plan.kernel = index;
    }
    const double needed = static_cast<double>(shape.rows * shape.outputs) / (qkv_tile * device.multiprocessors);
    if (static_cast<double>(least) > (1 + most_idle) * needed) return {};
    const bool walks_columns = shape.rows >= many_rows && shape.outputs < many_outputs;
    plan.raster = walks_columns ? Raster::columns : Raster::rows;
    plan.swizzle = swizzle_for(qkv_kernels[plan.kernel], shape, device);
    return plan;
}

}  // namespace mrrope
