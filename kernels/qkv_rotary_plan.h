#pragma once

#include <cstdint>
#include <string>

#include "device_properties.h"
#include "mrrope/qkv_rotary.h"

// Launch plan of the projection with fused rotation: which kernel, raster order and swizzle. Pure host functions of
// shape and device, tested without a GPU.

namespace mrrope {

// Components per tile, and the default of tokens per tile. Pingpong schedule: each of a block's two consumer warp
// groups has its own tile, and rotates it while the other multiplies.
inline constexpr int qkv_tile = 128;

struct QkvKernel {
    Pairing pairing;
    // weight x^T: tokens are the tile's N, which need not be a power of two.
    bool transposed = false;
    int tile_tokens = qkv_tile;
};

// The compiled kernels. Slower when measured on an H200: tiles of 64 x 256, 256 x 128 and 128 x 256, the
// cooperative schedule (two warp groups per tile), split-K, and cos/sin by polynomials or from a table.
inline constexpr QkvKernel qkv_kernels[] = {
    {Pairing::halves},
    {Pairing::halves, /*transposed=*/true, 160},
    {Pairing::interleaved},
};
inline constexpr int qkv_kernel_count = sizeof(qkv_kernels) / sizeof(qkv_kernels[0]);

// Columns per epilogue visit. In `halves` pairing it holds both partners of a pair, which lie up to 64 columns apart.
constexpr int epilogue_columns(Pairing pairing) {
    return pairing == Pairing::halves ? 128 : 32;
}

std::string describe(const QkvKernel& kernel);

struct QkvRotaryShape {
    int64_t rows = 0;
    int inputs = 0;
    int outputs = 0;
    int head_dim = 0;
    int rotary_dim = 0;
    DType dtype = DType::bfloat16;
    Pairing pairing = Pairing::halves;
    bool aligned = false;  // every row of x, weight and out starts at a multiple of 16 bytes
};

QkvRotaryShape shape_of(const QkvRotaryArgs& args);

// Whether the kernels of this pairing support the shape at all.
bool can_fuse(const QkvRotaryShape& shape, const Device& device);

// Whether this kernel supports the shape. The transposed epilogue needs partners 64 components apart.
bool supports(const QkvKernel& kernel, const QkvRotaryShape& shape);

// The tiles that CUTLASS schedules, including tile padding: M is rounded up to clusters of two tiles and both
// dimensions to the swizzle.
int64_t scheduled_tiles(const QkvKernel& kernel, const QkvRotaryShape& shape, int swizzle);

QkvRotaryPlan plan(const QkvRotaryShape& shape, const Device& device);

}  // namespace mrrope
