#pragma once

#include <cstdint>

#include "device_properties.h"
#include "mrrope/learnable_rotary.h"

// Launch plan of the backward pass of learnable_rotary.

namespace mrrope {

struct LearnableRotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int q_heads = 0;
    int k_heads = 0;
    int tables = 1;
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    bool aligned = false;  // every head starts at a multiple of 16 bytes
};

LearnableRotaryShape shape_of(const LearnableRotaryGradientArgs& args);

inline constexpr int learnable_block_threads = 128;
// Heads of one table and token that share cos/sin.
inline constexpr int learnable_heads_per_thread = 2;
// Blocks per SM: the persistent grid, and the registers that __launch_bounds__ leaves. Their 25 KB of shared memory
// each just fit in the 100 KB of sm_86, sm_89 and sm_120.
inline constexpr int learnable_blocks_per_sm = 4;

// A persistent grid. A block belongs to one table, and a thread to the same pairs of it throughout: it loads their
// phase steps once, and sums their gradients in registers. `lanes` threads rotate one head, each with `vector`
// components from each half of the rotated part. A block has room for `slots` times lanes_per_pass lanes; heads of more
// lanes take several passes.
struct LearnableRotaryPlan {
    int vector = 1;
    int lanes = 1;
    int lanes_per_pass = 1;
    int slots = 1;
    int tables = 1;
    int head_groups = 1;  // per table and token, of up to learnable_heads_per_thread heads
    int blocks_per_table = 1;

    int blocks() const { return tables * blocks_per_table; }
};

LearnableRotaryPlan plan(const LearnableRotaryShape& shape, const Device& device);

// learnable_rotary_gradient_cuda by a given plan, with blocks_per_table rows of table_sums.
void learnable_rotary_gradient_cuda(const LearnableRotaryGradientArgs& args, const LearnableRotaryPlan& plan,
                                    CUstream_st* stream);

}  // namespace mrrope
