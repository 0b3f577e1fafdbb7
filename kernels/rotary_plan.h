#pragma once

#include <cstdint>

#include "device_properties.h"
#include "head_split.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_cos_sin.h"

// Launch plan of the rotary kernel: pure host functions of shape and device, tested without a GPU. What the kernel does
// with a plan is in rotary_map.h (thread to element) and rotary_schedule.h (PDL, load order, prefetch).

namespace mrrope {

struct RotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int heads = 0;  // of q and k together
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    bool aligned = false;          // every head starts at a multiple of 16 bytes; not with too many rows for vectors
    bool with_rows = false;        // a token has several positions, and every pair names one
    bool copies_tail = false;      // out of place, with unrotated components
    bool tokens_adjacent = false;  // the tokens of a head lie closer together than the heads of a token
    int table_heads = 1;           // TableChoice::heads
    bool has_query_factors = false;

    bool is_per_head() const { return table_heads > 1 || has_query_factors; }
};

RotaryShape shape_of(const RotaryArgs& args);

// Whether unrotated components must be copied: they are there, and the call is not in place.
bool copies_tail(const RotaryArgs& args);

// Small blocks: threads share nothing, and a small grid spreads over more SMs. Blocks of 64 are slower from 256 tokens
// on, blocks of 256 below 16.
inline constexpr int rotary_block_threads = 128;

// Minimum blocks per SM for __launch_bounds__: enough occupancy to hide sin/cos behind memory latency. Without it the
// compiler spills a few registers to reach occupancies that gain nothing. More heads per thread need more registers,
// and fewer threads to keep as many bytes in flight; so does the tail, with what leads to the angle of every head.
constexpr int rotary_min_blocks_per_sm(int heads_per_thread, bool whole_heads = false, bool has_head_tables = false,
                                       bool has_rows = false) {
    if (whole_heads) return has_head_tables && has_rows ? 5 : has_head_tables || has_rows ? 7 : 8;
    if (heads_per_thread <= 2) return 8;
    return heads_per_thread == 3 ? 6 : 4;
}

// One thread may take all heads of a head table with so many (32/8: four of q and one of k). Instantiated with head
// tables only.
inline constexpr int heads_of_whole_table = 5;

// Full vectors from this many threads on, counted with one head and a full vector per thread; measured in
// rotary_plan.cpp.
inline constexpr int64_t threads_for_full_vectors = 1 << 16;

// The only instantiation for tokens with several positions and head tables.
inline constexpr int heads_per_thread_with_rows = 2;

// Whether there is an instantiation with tokens inside, of one table: for large launches only.
constexpr bool takes_tokens_inside(int vector_bytes, int heads_per_thread, bool whole_heads) {
    return vector_bytes == access_bytes && (heads_per_thread == 2 || heads_per_thread == 3) && !whole_heads;
}

// The only instantiation whose lanes hold whole heads, with full vectors.
inline constexpr int heads_per_thread_of_whole_heads = 2;

// `lanes` threads rotate one head. Each takes `vector` components (16 bytes, 8 bytes or one component) from each half
// of the rotated part, for `heads_per_thread` heads of one token, and computes their cos/sin once.
struct RotaryPlan {
    int vector = 1;
    int lanes = 1;
    bool whole_heads = false;  // further lanes copy the unrotated tail, two neighbouring vectors each
    int heads_per_thread = 1;
    int head_groups = 1;            // of heads_per_thread heads of one head table
    int table_heads = 1;            // head tables
    bool tokens_inside = false;     // with one table, neighbouring threads take neighbouring tokens before other heads
    bool speculates_table = false;  // with several tables: loads the table index before griddepcontrol.wait, too
    int64_t tokens_per_launch = 0;  // of the whole batch if it fits in one launch, else of one sequence

    int64_t threads_per_token() const { return static_cast<int64_t>(lanes) * head_groups; }
};

RotaryPlan plan(const RotaryShape& shape, const Device& device);

// plan() with a given vector and number of heads per thread. The shape must allow the vector: full, half or one
// component. Instantiated are 1 head, 2 heads with full vectors or single components, and with full vectors 3, or 5 of
// a head table.
RotaryPlan plan_with(const RotaryShape& shape, const Device& device, int vector, int heads_per_thread);

// Lanes for whole heads. The shape must have full vectors, and a tail of pairs of them.
RotaryPlan plan_whole_heads(const RotaryShape& shape, const Device& device);
bool has_whole_head_plan(const RotaryShape& shape);

// For kernels that split heads in the same way but form head groups of their own.
RotaryPlan plan_groups(const RotaryShape& shape, int vector, int heads_per_thread, int head_groups);

// The ops by a given plan.
void rotary_cuda(const RotaryArgs& args, const RotaryPlan& plan, CUstream_st* stream);
void rotary_cos_sin_cuda(const RotaryCosSinArgs& args, const RotaryPlan& plan, CUstream_st* stream);

}  // namespace mrrope
