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

// Models rotate 16-bit heads, in `halves` pairing but for a few: those have a kernel for every case. Other heads have
// one with 16 bytes and one with 8, which look an index up where only the heads differ. The last kernel of a pairing
// takes any shape, component by component.
constexpr RotaryKernels rotary_kernels(int element_size) {
    RotaryKernels kernels;
    for (const Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
        const bool is_common = element_size == 2 && pairing == Pairing::halves;
        const auto add = [&](int bytes, int heads_per_thread) {
            for (const TableLookup lookup : {TableLookup::single, TableLookup::indexed, TableLookup::position_rows}) {
                for (const bool is_per_head : {false, true}) {
                    const bool is_rare = lookup == TableLookup::position_rows
                                             ? !is_common || heads_per_thread != 2
                                             : !is_common && lookup == TableLookup::single;
                    if (is_per_head && is_rare) continue;
                    kernels.add({pairing, bytes / element_size, heads_per_thread, lookup, is_per_head});
                }
            }
        };
        if (element_size <= 4) {
            add(access_bytes, 2);
            add(access_bytes / 2, 1);
        }
        if (is_common) {
            add(access_bytes, 3);
            add(access_bytes / 4, 1);
            for (const int heads_per_thread : {2, 3}) {
                kernels.add(
                    {.vector = full_vector(element_size), .heads_per_thread = heads_per_thread, .tokens_inside = true});
            }
            for (const TableLookup lookup : {TableLookup::single, TableLookup::indexed, TableLookup::position_rows}) {
                for (const bool is_per_head : {false, true}) {
                    if (is_per_head && lookup == TableLookup::position_rows) continue;
                    kernels.add({.vector = full_vector(element_size),
                                 .heads_per_thread = 2,
                                 .lookup = lookup,
                                 .is_per_head = is_per_head,
                                 .whole_heads = true});
                }
            }
        }
        kernels.add({.pairing = pairing, .lookup = TableLookup::position_rows, .is_per_head = true});
    }
    return kernels;
}

// Those of rotary_cos_sin, where there are no tables.
constexpr RotaryKernels rotary_cos_sin_kernels(int element_size) {
    RotaryKernels kernels;
    for (RotaryKernel kernel : rotary_kernels(element_size)) {
        const bool is_general = kernel.vector == 1;
        const bool has_table = kernel.lookup != TableLookup::single || kernel.is_per_head;
        if (kernel.heads_per_thread > 2 || (has_table && !is_general)) continue;
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
    return heads_per_thread <= 2 ? 8 : 6;
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
