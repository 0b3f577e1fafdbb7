#pragma once

#include <cstdint>
#include <string>

#include "mrrope/qkv_rotary.h"

// Which kernel projects and rotates a call, and how its tiles are walked through: pure functions, tested without a GPU.

namespace mrrope {

// The components of a tile, and its tokens where nothing else is said. Each of a block's two warp groups has a tile of
// its own, and rotates it while the other multiplies.
inline constexpr int qkv_tile = 128;

struct QkvKernel {
    Pairing pairing;
    // The product's transpose, weight x^T: a tile's tokens lie along its columns, which need not be a power of two.
    bool transposed = false;
    int tile_tokens = qkv_tile;
};

// The kernels that are compiled. Others that were measured on an H200 did not pay: tiles of 64 x 256, 256 x 128 and
// 128 x 256, two warp groups at one tile, tiles divided along the inputs, and cosines and sines by polynomials or from
// a table.
inline constexpr QkvKernel qkv_kernels[] = {
    {Pairing::halves},
    {Pairing::halves, /*transposed=*/true, 160},
    {Pairing::interleaved},
};
inline constexpr int qkv_kernel_count = sizeof(qkv_kernels) / sizeof(qkv_kernels[0]);

// Columns that a kernel rotates at a time. Pairs of `halves` pairing lie up to half a head apart.
constexpr int columns_at_a_time(Pairing pairing) {
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

// What a kernel is laid over: these many multiprocessors, with the instructions of sm_90a or without.
struct QkvDevice {
    bool has_wgmma = false;
    int multiprocessors = 0;
};

// Whether a kernel of this pairing can do such a call at all.
bool can_fuse(const QkvRotaryShape& shape, const QkvDevice& device);

// Whether this kernel of it can: transposed, pairs lie 64 components apart.
bool takes(const QkvKernel& kernel, const QkvRotaryShape& shape);

// As CUTLASS counts them, where it walks through `swizzle` of them side by side: clusters of two, below each other, and
// groups of those are whole, though nothing is in some of their tiles.
int64_t tiles_of(const QkvKernel& kernel, const QkvRotaryShape& shape, int swizzle);

QkvRotaryPlan plan_qkv_rotary(const QkvRotaryShape& shape, const QkvDevice& device);

}  // namespace mrrope
