#pragma once

#include <cstdint>

// Order of events in the rotary kernel: PDL trigger, speculation, load order and prefetch. Percentages and times are of
// back-to-back graph replays on an H200.

namespace mrrope {

// How a thread finds its token's table. Each is a separate instantiation: a run-time branch costs a decoding step a
// third of its time.
enum class TableLookup {
    single,         // one table for every token
    indexed,        // TableChoice selects it
    position_rows,  // every pair has a position of its own; one table, or TableChoice selects it
};

struct RotarySchedule {
    // PDL trigger. A wrong placement costs up to 33 % at 1 to 256 tokens. Triggering before the wait would gain up to
    // 0.07 us (0.16 us with a table index), but a kernel two launches after a writer could then start while the writer
    // runs (benchmarks/results/trigger_cuda.json, dependent_launch_cuda_test).
    enum class Trigger {
        after_wait,           // one head per thread
        after_wait_if_small,  // several heads, speculated index: below small_launch_threads, else after_cos_sin
        after_cos_sin,        // otherwise
    };
    Trigger trigger;
    static constexpr int small_launch_threads = 1 << 16;

    // Loads the table index before griddepcontrol.wait. The preceding kernel may be about to write it, so it is loaded
    // again after the wait; a mispredict recomputes cos/sin. Hides the index's latency, 27 % of 256 tokens; the second
    // load costs 131072 tokens 1.5 %.
    bool speculates_index;

    // Loads return in issue order. Position and phase steps go first: issued after the heads, they cost 10 to 15 % at
    // 16 to 128 tokens. An index that was not speculated delays the phase steps by one more round trip, so the heads
    // are issued between the two. Before sm_90 the heads also go before the phase steps: the compiler would sink later
    // loads below the cos/sin.
    bool loads_heads_before_table;

    // Issues the load that verifies the index after all others, by a barrier that the compiler moves no load across.
    // Saves 0.1 us at 16 and 64 tokens with one head per thread; with more heads, 1024 tokens take 1 % longer.
    bool orders_verification_last;

    // Prefetches positions for blocks that start later. A position that comes from DRAM arrives no sooner than the
    // heads, whose latency then does not hide cos/sin: 1 % with few heads, which share each position. Two threads per
    // block prefetch, since a 32-byte sector holds four int64 positions. With two heads and a speculated index it costs
    // more than it gains.
    bool prefetches_positions;
    static constexpr int prefetches_per_block = 2;
    // Prefetch distance in threads: 1.5 times what an H200 holds at once, or twice at the occupancy of three heads.
    static constexpr int64_t prefetch_threads_ahead = 3 << 16;
};

// `pdl`: compiled for sm_90 or later. `may_speculate`: the kernel can verify an index.
constexpr RotarySchedule rotary_schedule(TableLookup lookup, int heads_per_thread, bool pdl,
                                         bool may_speculate = true) {
    using Trigger = RotarySchedule::Trigger;
    const bool is_indexed = lookup == TableLookup::indexed;
    const bool speculates = is_indexed && pdl && may_speculate;
    return {
        .trigger = heads_per_thread == 1 ? Trigger::after_wait
                   : speculates          ? Trigger::after_wait_if_small
                                         : Trigger::after_cos_sin,
        .speculates_index = speculates,
        .loads_heads_before_table = !pdl || (is_indexed && !speculates),
        .orders_verification_last = speculates && heads_per_thread == 1,
        .prefetches_positions =
            pdl && (heads_per_thread == 3 || (heads_per_thread == 2 && lookup == TableLookup::single)),
    };
}

}  // namespace mrrope
