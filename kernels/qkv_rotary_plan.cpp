#include "qkv_rotary_plan.h"

#include <limits>

#include "head_split.h"

namespace mrrope {
namespace {

using Raster = QkvRotaryPlan::Raster;

// Fused where there are tiles for so many rounds of the whole chip, and the last round leaves little of it idle.
// cuBLAS has kernels for few rows that these are not. Microseconds on an H200, bfloat16, the best way through the tiles
// of each (benchmarks/results/qkv_rotary_plans.json):
//     rows x outputs x inputs   rounds   cuBLAS   then rotary   computed   tabled
//       512 x 6144 x 4096         1.5     36.3        40.6        48.9      49.3
//      1024 x 6144 x 4096         2.9     71.6        78.6        77.2      79.0
//      2048 x 6144 x 4096         5.8      145         157         149       150
//      8192 x 6144 x 4096          23      591         636         610       602
//     32768 x 6144 x 4096          93     2426        2586        2464      2412
//      2048 x 2560 x 2048         2.4     30.4        36.5        42.7      46.2
//      8192 x 2560 x 2048         9.7      120         138         135       149
//     32768 x 2560 x 2048          39      486         562         510       549
//      2048 x 1280 x 8192         1.2     57.4        62.3        91.9      94.4
//      8192 x 1280 x 8192         4.8      235         245         251       254
//     32768 x 1280 x 8192          19     1018        1061        1026      1029
constexpr double least_rounds = 5.5;
constexpr double most_idle = 0.08;

// Writing cosines and sines first pays where products take long and rows are many.
constexpr int inputs_for_tabled = 4096;
constexpr int64_t rows_for_tabled = 8192;

bool fills(const QkvRotaryShape& shape, const QkvDevice& device) {
    const int64_t tiles = tiles_of(shape);
    const int64_t places = ceil_div(tiles, device.multiprocessors) * device.multiprocessors;
    return static_cast<double>(tiles) >= least_rounds * device.multiprocessors &&
           static_cast<double>(places) <= (1 + most_idle) * static_cast<double>(tiles);
}

int kernel_for(Pairing pairing, Phases phases) {
    for (int index = 0; index < qkv_kernel_count; ++index) {
        if (qkv_kernels[index].pairing == pairing && qkv_kernels[index].phases == phases) return index;
    }
    return QkvRotaryPlan::apart;
}

}  // namespace

std::string describe(const QkvKernel& kernel) {
    constexpr const char* phases[] = {" computed", " tabled", " hardware"};
    const std::string name = kernel.pairing == Pairing::halves ? "halves" : "interleaved";
    return name + phases[static_cast<int>(kernel.phases)] +
           (kernel.transposed ? " transposed " + std::to_string(kernel.tile_tokens) : "");
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

int64_t tiles_of(const QkvRotaryShape& shape) {
    return ceil_div(shape.rows, qkv_tile) * ceil_div(shape.outputs, qkv_tile);
}

QkvRotaryPlan plan_qkv_rotary(const QkvRotaryShape& shape, const QkvDevice& device) {
    if (!can_fuse(shape, device) || !fills(shape, device)) return {};
    const bool tabled =
        shape.pairing == Pairing::halves && shape.inputs >= inputs_for_tabled && shape.rows >= rows_for_tabled;
    if (tabled) {
        return {.kernel = kernel_for(shape.pairing, Phases::tabled),
                .swizzle = shape.outputs >= 4096 ? 8 : 2,
                .raster = Raster::columns};
    }
    return {.kernel = kernel_for(shape.pairing, Phases::computed),
            .swizzle = 1,
            .raster = shape.rows < rows_for_tabled ? Raster::rows : Raster::columns};
}

}  // namespace mrrope
