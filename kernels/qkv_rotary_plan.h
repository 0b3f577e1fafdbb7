#pragma once

#include <cstdint>
#include <string>

#include "mrrope/qkv_rotary.h"

// Which kernel projects and rotates a call, and how its tiles are walked through: pure functions, tested without a GPU.

namespace mrrope {

// How the two warp groups of a block share its work: each has a tile of its own, and rotates it while the other
// multiplies; or both multiply one tile and then rotate it; or that, with tiles that can be divided along the inputs.
enum class Schedule { pingpong, cooperative, divisible };

// Where cosines and sines come from: from positions and frequencies, where a pair is rotated; or from a table of a row
// for each position, which a small kernel writes first.
enum class Phases { computed, tabled };

struct QkvKernel {
    Pairing pairing;
    int tile_rows;
    int tile_columns;
    Schedule schedule;
    Phases phases;
    // Two blocks share what they both read: tiles below each other the weights, tiles beside each other x.
    bool shares_weights = true;
};

// The kernels that are compiled.
inline constexpr QkvKernel qkv_kernels[] = {
    {Pairing::halves, 128, 128, Schedule::pingpong, Phases::computed},
    {Pairing::halves, 128, 128, Schedule::pingpong, Phases::tabled},
    {Pairing::halves, 64, 256, Schedule::pingpong, Phases::computed},
    {Pairing::halves, 128, 256, Schedule::divisible, Phases::tabled},
    {Pairing::halves, 256, 128, Schedule::cooperative, Phases::tabled, /*shares_weights=*/false},
    {Pairing::interleaved, 128, 128, Schedule::pingpong, Phases::computed},
    {Pairing::interleaved, 128, 160, Schedule::pingpong, Phases::computed},
    {Pairing::interleaved, 256, 160, Schedule::cooperative, Phases::tabled},
    {Pairing::interleaved, 128, 256, Schedule::divisible, Phases::tabled},
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

// How many times every multiprocessor has a tile to do.
int64_t waves_of(const QkvKernel& kernel, const QkvRotaryShape& shape, const QkvDevice& device);

QkvRotaryPlan plan_qkv_rotary(const QkvRotaryShape& shape, const QkvDevice& device);

}  // namespace mrrope
