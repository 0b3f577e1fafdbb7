#pragma once

#include <cstdint>

#include "device_properties.h"
#include "head_split.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_cos_sin.h"
#include "rotary_schedule.h"

// Launch plan of the rotary kernel: pure host functions of shape and device, tested without a GPU. What the kernel does
// with a plan is in rotary_map.h (thread to element) and rotary_schedule.h (PDL, load order, prefetch).

namespace mrrope {

// What rotary_kernel and rotary_cos_sin_kernel are instantiated for, beside the dtype.
struct RotaryKernel {
    Pairing pairing = Pairing::halves;
    int vector = 1;  // components per load: 16, 8 or 4 bytes, or one component
    int heads_per_thread = 1;
    TableLookup lookup = TableLookup::single;
    bool is_per_head = false;    // head tables or query factors
    bool whole_heads = false;    // further lanes copy the unrotated tail, two neighbouring vectors each
    bool tokens_inside = false;  // neighbouring threads take neighbouring tokens before other heads
    bool any_shape = false;      // by single components, with every lookup

    bool operator==(const RotaryKernel&) const = default;
};

// The instantiations for one dtype.
struct RotaryKernels {
    RotaryKernel of[48] = {};
    int count = 0;

    constexpr void add(const RotaryKernel& kernel) { of[count++] = kernel; }
    constexpr const RotaryKernel* begin() const { return of; }
    constexpr const RotaryKernel* end() const { return of + count; }
};

// One thread may take all heads of a head table with so many (32/8: four of q and one of k).
inline constexpr int heads_of_whole_table = 5;

// Models rotate 16-bit heads, in `halves` pairing but for a few: those have a kernel for every case. Other heads have
// one with 16 bytes and one with 8, which look an index up where only the heads differ. One kernel of each pairing
// takes any shape.
constexpr RotaryKernels rotary_kernels(int element_size) {
    constexpr TableLookup single = TableLookup::single, indexed = TableLookup::indexed,
                          position_rows = TableLookup::position_rows;
    const int full = full_vector(element_size);
    RotaryKernels kernels;
    for (const Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
        const bool is_common = element_size == 2 && pairing == Pairing::halves;
        const auto add = [&](const RotaryKernel& kernel, bool by_one_table_per_head, bool by_rows_per_head) {
            for (const TableLookup lookup : {single, indexed, position_rows}) {
                for (const bool is_per_head : {false, true}) {
                    if (is_per_head && lookup == single && !by_one_table_per_head) continue;
                    if (is_per_head && lookup == position_rows && !by_rows_per_head) continue;
                    RotaryKernel added = kernel;
                    added.pairing = pairing;
                    added.lookup = lookup;
                    added.is_per_head = is_per_head;
                    kernels.add(added);
                }
            }
        };
        if (element_size <= 4) {
            add({.vector = full, .heads_per_thread = 2}, is_common, is_common);
            add({.vector = full / 2}, is_common, false);
        }
        if (is_common) {
            add({.vector = full, .heads_per_thread = 3}, true, false);
            add({.vector = full, .heads_per_thread = 2, .whole_heads = true}, true, false);
            add({.vector = full / 4}, true, false);
            kernels.add({.vector = 1});  // one token of 32/8 heads takes 0.90 us on an H200, by vectors of 4 bytes 0.96
            for (const int heads : {2, 3}) {
                kernels.add({.vector = full, .heads_per_thread = heads, .tokens_inside = true});
            }
            for (const TableLookup lookup : {single, indexed}) {
                kernels.add(
                    {.vector = full, .heads_per_thread = heads_of_whole_table, .lookup = lookup, .is_per_head = true});
            }
        }
        kernels.add({.pairing = pairing, .lookup = position_rows, .is_per_head = true, .any_shape = true});
    }
    return kernels;
}

// Those of rotary_cos_sin, where there are no tables.
constexpr RotaryKernels rotary_cos_sin_kernels(int element_size) {
    RotaryKernels kernels;
    for (RotaryKernel kernel : rotary_kernels(element_size)) {
        const bool has_table = kernel.lookup != TableLookup::single || kernel.is_per_head;
        const bool is_wanted = !has_table && kernel.heads_per_thread <= 2 && kernel.vector > 1;
        if (!is_wanted && !kernel.any_shape) continue;
        kernel.lookup = TableLookup::single;
        kernel.is_per_head = false;
        kernels.add(kernel);
    }
    return kernels;
}

struct RotaryShape {
    int64_t batch = 0;
    int64_t tokens = 0;
    int heads = 0;  // of q and k together
    int head_dim = 0;
    int rotary_dim = 0;
    int element_size = 0;
    Pairing pairing = Pairing::halves;
    int alignment = 0;  // every head starts at a multiple of so many bytes, at most 16; 0: too many rows for vectors
    TableLookup lookup = TableLookup::single;
    bool copies_tail = false;      // out of place, with unrotated components
    bool tokens_adjacent = false;  // the tokens of a head lie closer together than the heads of a token
    int table_heads = 1;           // TableChoice::heads
    bool has_query_factors = false;

    bool is_per_head() const { return table_heads > 1 || has_query_factors; }
};

RotaryShape shape_of(const RotaryArgs& args);

// Whether a kernel can rotate a shape.
bool serves(const RotaryKernel& kernel, const RotaryShape& shape);

// Whether unrotated components must be copied: they are there, and the call is not in place.
bool copies_tail(const RotaryArgs& args);

// Small blocks: threads share nothing, and a small grid spreads over more SMs. Blocks of 64 are slower from 256 tokens
// on, blocks of 256 below 16.
inline constexpr int rotary_block_threads = 128;

// Minimum blocks per SM for __launch_bounds__: enough occupancy to hide sin/cos behind memory latency. Without it the
// compiler spills a few registers to reach occupancies that gain nothing. More heads per thread need more registers,
// and fewer threads to keep as many bytes in flight; so does the tail, with what leads to the angle of every head.
constexpr int rotary_min_blocks_per_sm(int heads_per_thread, bool whole_heads = false, bool is_per_head = false,
                                       bool has_rows = false) {
    if (whole_heads) return is_per_head || has_rows ? 7 : 8;
    if (heads_per_thread <= 2) return 8;
    return heads_per_thread == 3 ? 6 : 4;
}

// Launches of fewer threads, counted with one head and a full vector per thread, are latency-bound.
inline constexpr int64_t threads_for_full_vectors = 1 << 16;

// A kernel and how it is launched. `lanes` threads rotate one head. Each takes a vector from each half of the rotated
// part, for `heads_per_thread` heads of one token, and computes their cos/sin once.
struct RotaryPlan : RotaryKernel {
    int lanes = 1;
    int head_groups = 1;            // of heads_per_thread heads of one head table
    int table_heads = 1;            // head tables
    int64_t tokens_per_launch = 0;  // of the whole batch if it fits in one launch, else of one sequence

    int64_t threads_per_token() const { return static_cast<int64_t>(lanes) * head_groups; }
};

// By the fastest of the kernels that serve the shape.
RotaryPlan plan(const RotaryShape& shape, const Device& device, const RotaryKernels& kernels);
RotaryPlan plan(const RotaryShape& shape, const Device& device);

// By a given kernel, which serves the shape.
RotaryPlan plan_by(const RotaryKernel& kernel, const RotaryShape& shape);

// For kernels that split heads in the same way but form head groups of their own.
RotaryPlan plan_groups(const RotaryShape& shape, int vector, int heads_per_thread, int head_groups);

// The ops by a given plan.
void rotary_cuda(const RotaryArgs& args, const RotaryPlan& plan, CUstream_st* stream);
void rotary_cos_sin_cuda(const RotaryCosSinArgs& args, const RotaryPlan& plan, CUstream_st* stream);

}  // namespace mrrope
