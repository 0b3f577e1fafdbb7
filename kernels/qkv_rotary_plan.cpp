#include "qkv_rotary_plan.h"

#include <limits>

#include "head_split.h"

namespace mrrope {
namespace {

using Raster = QkvRotaryPlan::Raster;
using Work = QkvRotaryPlan::Work;

// What one unit of a kernel's tiles costs beside the others, when the chip is full of them; and how its tiles are best
// walked through. To be measured by benchmarks/qkv_rotary.py --plans: until then every unit costs the same, so that the
// kernel whose waves leave the least of the chip idle is chosen, of equals the first.
struct Measured {
    double cost;
    int swizzle;
    Raster raster;
};
constexpr Measured measured[] = {
    {1.0, 8, Raster::rows}, {1.0, 8, Raster::rows}, {1.0, 8, Raster::rows},
    {1.0, 8, Raster::rows}, {1.0, 8, Raster::rows}, {1.0, 8, Raster::rows},
    {1.0, 8, Raster::rows}, {1.0, 8, Raster::rows}, {1.0, 8, Raster::rows},
};
static_assert(sizeof(measured) / sizeof(measured[0]) == qkv_kernel_count);

// Below these, the product and the rotation apart are faster: cuBLAS has kernels for few rows that these are not, and
// the rotation of so few is no memory pass. From a trial on an H200 with another epilogue, bfloat16, microseconds:
//     rows x outputs x inputs    cuBLAS    fused    rotary apart
//        16 x 6144 x 4096         22.5     34.6        2.1
//       256 x 6144 x 4096         28.5     33.4        3.3
//      2048 x 6144 x 4096          146      148         13
//      8192 x 6144 x 4096          603      626         45
//     32768 x 6144 x 4096    2430-2500     2505        163
//      8192 x 2560 x 2048          123      129         20
//      8192 x 1280 x 8192          245      263         10
constexpr int64_t least_rows_to_fuse = 1024;
constexpr int most_inputs_per_output = 4;

// Of kernels that divide the tiles of the last wave, a wave need not be whole. What is divided has to be added up
// again.
constexpr double cost_of_dividing = 1.05;

int64_t tiles_of(const QkvKernel& kernel, const QkvRotaryShape& shape) {
    return ceil_div(shape.rows, kernel.tile_rows) * ceil_div(shape.outputs, kernel.tile_columns);
}

struct Candidate {
    QkvRotaryPlan plan;
    double cost = std::numeric_limits<double>::infinity();
};

Candidate candidate(int index, const QkvRotaryShape& shape, const QkvDevice& device) {
    const QkvKernel& kernel = qkv_kernels[index];
    const Measured& by = measured[index];
    Candidate found{.plan = {.kernel = index, .swizzle = by.swizzle, .raster = by.raster, .work = Work::tiles}};
    const double area = static_cast<double>(kernel.tile_rows) * kernel.tile_columns * by.cost;
    found.cost = static_cast<double>(waves_of(kernel, shape, device)) * area;
    if (kernel.schedule == Schedule::divisible) {
        const double divided =
            static_cast<double>(tiles_of(kernel, shape)) / device.multiprocessors * area * cost_of_dividing;
        if (divided < found.cost) {
            found.cost = divided;
            found.plan.work = Work::divided_tiles;
        }
    }
    return found;
}

}  // namespace

std::string describe(const QkvKernel& kernel) {
    std::string name = kernel.pairing == Pairing::halves ? "halves " : "interleaved ";
    name += std::to_string(kernel.tile_rows) + "x" + std::to_string(kernel.tile_columns);
    switch (kernel.schedule) {
        case Schedule::pingpong: name += " pingpong"; break;
        case Schedule::cooperative: name += " cooperative"; break;
        case Schedule::divisible: name += " divisible"; break;
    }
    return name + (kernel.phases == Phases::computed ? " computed" : " tabled");
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
    if (!device.has_wgmma || !shape.aligned || shape.inputs % 8 != 0) return false;
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

int64_t waves_of(const QkvKernel& kernel, const QkvRotaryShape& shape, const QkvDevice& device) {
    return ceil_div(tiles_of(kernel, shape), device.multiprocessors);
}

QkvRotaryPlan plan_qkv_rotary(const QkvRotaryShape& shape, const QkvDevice& device) {
    if (!can_fuse(shape, device) || shape.rows < least_rows_to_fuse ||
        shape.inputs > static_cast<int64_t>(most_inputs_per_output) * shape.outputs) {
        return {};
    }
    Candidate best;
    for (int index = 0; index < qkv_kernel_count; ++index) {
        if (qkv_kernels[index].pairing != shape.pairing) continue;
        const Candidate found = candidate(index, shape, device);
        if (found.cost < best.cost) best = found;
    }
    return best.plan;
}

}  // namespace mrrope
