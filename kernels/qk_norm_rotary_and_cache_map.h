#pragma once

#include <algorithm>
#include <cstdint>

#include "head_split.h"
#include "head_tables_map.h"
#include "lane_layout.h"
#include "qk_norm_rotary_and_cache_plan.h"

// Thread-to-element map of the kernels that norm, rotate and write a cache, for host and device.

namespace mrrope {

enum class HeadKind { query, key, value, gate };
inline constexpr int head_kinds = 4;

// A unit of a token: its kind, and its number among those of its kind.
struct UnitOfKind {
    HeadKind kind;
    int number;

    MRROPE_HOST_DEVICE static UnitOfKind of(int unit, const HeadGroups& units) {
        if (unit < units.queries) return {HeadKind::query, unit};
        unit -= units.queries;
        if (unit < units.keys) return {HeadKind::key, unit};
        unit -= units.keys;
        if (unit < units.values) return {HeadKind::value, unit};
        return {HeadKind::gate, unit - units.values};
    }
};

// A thread of the kernel that holds heads in registers.
struct StorePlace {
    int lane;
    HeadKind kind;
    int group;   // of heads of this kind
    int groups;  // of this kind
    int batch;
    int token;
    bool active;      // others only take part in reductions
    int sharers = 1;  // teams of the warp that have this token
    int sharer = 0;   // this team's number among them

    MRROPE_HOST_DEVICE bool rotates() const { return kind == HeadKind::query || kind == HeadKind::key; }
    MRROPE_HOST_DEVICE bool is_cached() const { return kind == HeadKind::key || kind == HeadKind::value; }
};

// Where a warp keeps the rotations of a thread's lane: sharers keep theirs together.
MRROPE_HOST_DEVICE int rotation_column(int thread, int team, int sharers) {
    const int thread_of_warp = thread & 31;  // % 32 of an int takes eight instructions more
    return thread_of_warp / (team * sharers) * team + thread_of_warp % team;
}

// A block of the kernel that goes component by component: one row.
struct StoreRow {
    int batch;
    int token;
    HeadKind kind;
    int row;  // of this kind: the head, or 0 over all heads
};

// A block takes one unit of a tile of plan.tokens_per_block tokens; neighbouring blocks take units of the same tile.
//
// is_large: with eight heads per thread, or four over all heads.
// Units of v and the gate come after those of q and k of all tiles. They run other code and are shorter, so that fewer
// SMs idle at the end: 131072 tokens with float8 q take 590 us on an H200 instead of 629. With sharers, a block takes
// as many groups, of as many times fewer tokens. Small launches, which are latency-bound, do without both.
template <class Divmod>
struct QkNormRotaryAndCacheMap {
    QkNormRotaryAndCachePlan plan;
    Divmod members;        // of a block: by plan.team, over a head; by plan.lanes, over all heads
    Divmod units;          // per tile
    Divmod rotated_units;  // of q and k, where they come first
    Divmod other_units;
    int rotated_blocks;
    Divmod tokens;
    int all_tokens;  // of the launch
    HeadTablesMap<Divmod> q_tables;
    HeadTablesMap<Divmod> k_tables;

    static QkNormRotaryAndCacheMap of(const QkNormRotaryAndCachePlan& plan, const QkNormRotaryAndCacheShape& shape) {
        const int64_t all_tokens = shape.batch * shape.tokens;
        const int rotated = plan.units.queries + plan.units.keys;
        return {
            .plan = plan,
            .members = Divmod{shape.over == NormOver::head ? plan.team : plan.lanes},
            .units = Divmod{plan.units.count()},
            .rotated_units = Divmod{std::max(1, rotated)},
            .other_units = Divmod{std::max(1, plan.units.count() - rotated)},
            .rotated_blocks = static_cast<int>(ceil_div(all_tokens, plan.tokens_per_block) * rotated),
            .tokens = Divmod{static_cast<int>(shape.tokens)},
            .all_tokens = static_cast<int>(all_tokens),
            .q_tables = HeadTablesMap<Divmod>::of(shape.q_heads, plan.groups.queries, shape.table_heads),
            .k_tables = HeadTablesMap<Divmod>::of(shape.kv_heads, plan.groups.keys, shape.table_heads),
        };
    }

    MRROPE_HOST_DEVICE int groups_of(HeadKind kind) const {
        switch (kind) {
            case HeadKind::query: return plan.groups.queries;
            case HeadKind::key: return plan.groups.keys;
            case HeadKind::value: return plan.groups.values;
            case HeadKind::gate: return plan.groups.gates;
        }
        return 0;
    }

    MRROPE_HOST_DEVICE int sharers_log2(HeadKind kind) const {
        switch (kind) {
            case HeadKind::query: return plan.q_sharers_log2;
            case HeadKind::key: return plan.k_sharers_log2;
            default: return 0;
        }
    }

    // The heads of a thread; `has_tables`: there may be several head tables.
    template <bool has_tables>
    MRROPE_HOST_DEVICE StridedHeads heads_of(const StorePlace& place, int heads) const {
        if (has_tables && place.rotates()) {
            return (place.kind == HeadKind::query ? q_tables : k_tables).heads_of(place.group);
        }
        return {place.group, place.groups, heads, 0};
    }

    template <NormOver over, bool is_large>
    MRROPE_HOST_DEVICE StorePlace place(int block, int thread) const {
        StorePlace place;
        int tile, unit, number, member;
        if (!is_large) {
            units(tile, unit, block);
        } else if (block < rotated_blocks) {
            rotated_units(tile, unit, block);
        } else {
            other_units(tile, unit, block - rotated_blocks);
            unit += plan.units.queries + plan.units.keys;
        }
        members(number, member, thread);
        const UnitOfKind found = UnitOfKind::of(unit, plan.units);
        place.kind = found.kind;
        place.groups = groups_of(place.kind);
        place.lane = member < plan.lanes - 1 ? member : plan.lanes - 1;
        int sequence_token = tile;
        if constexpr (over == NormOver::head) {
            place.group = found.number;
            int token_of_tile = number;
            if constexpr (is_large) {
                // As many units divide the tile's tokens.
                const int log2 = sharers_log2(place.kind);
                place.sharers = 1 << log2;
                place.sharer = number & (place.sharers - 1);
                const int part = found.number & (place.sharers - 1);
                place.group = found.number - part + place.sharer;
                token_of_tile = (part * plan.tokens_per_block + number) >> log2;
            }
            sequence_token = tile * plan.tokens_per_block + token_of_tile;
            place.active = sequence_token < all_tokens && member < plan.lanes;
            if (sequence_token >= all_tokens) sequence_token = all_tokens - 1;
        } else {
            place.active = number < place.groups;
            place.group = place.active ? number : 0;
        }
        tokens(place.batch, place.token, sequence_token);
        return place;
    }

    MRROPE_HOST_DEVICE StoreRow row(int block) const {
        StoreRow found;
        int sequence_token, unit;
        units(sequence_token, unit, block);
        tokens(found.batch, found.token, sequence_token);
        const UnitOfKind row = UnitOfKind::of(unit, plan.units);
        found.kind = row.kind;
        found.row = row.number;
        return found;
    }
};

}  // namespace mrrope
