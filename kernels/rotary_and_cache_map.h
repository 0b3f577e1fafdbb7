#pragma once

#include <cstdint>

#include "mrrope/rotary_and_cache.h"
#include "rotary_and_cache_plan.h"
#include "rotary_map.h"

// Thread-to-element map of the kernel that writes a cache, for host and device: RotaryMap, whose head groups are those
// of q, of k and of v.

namespace mrrope {

// A token of a sequence, or a slot of a cache block.
struct CachePlace {
    int outer;
    int inner;

    MRROPE_HOST_DEVICE int64_t offset(const HeadStrides& strides) const {
        return outer * strides.batch + inner * strides.token;
    }
};

// The heads of a thread: all of q, all of k or all of v.
struct HeadsOfThread : StridedHeads {
    enum Kind { query, key, value };
    Kind kind;

    MRROPE_HOST_DEVICE const CachedHeads& cached(const RotaryAndCacheArgs& args) const {
        return kind == key ? args.k : args.v;
    }

    MRROPE_HOST_DEVICE const HeadsView& view(const RotaryAndCacheArgs& args) const {
        return kind == query ? args.rotary.q : cached(args).view;
    }
};

template <class Divmod>
struct HeadGroupsOfCacheMap {
    HeadGroups groups;
    HeadTablesMap<Divmod> queries;
    HeadTablesMap<Divmod> keys;

    static HeadGroupsOfCacheMap of(const RotaryPlan& plan, int q_heads, int kv_heads) {
        const HeadGroups groups = head_groups(q_heads, kv_heads, plan.heads_per_thread, plan.table_heads);
        return {groups, HeadTablesMap<Divmod>::of(q_heads, groups.queries, plan.table_heads),
                HeadTablesMap<Divmod>::of(kv_heads, groups.keys, plan.table_heads)};
    }

    // `has_tables`: there may be several head tables. Values are not rotated, so their groups ignore tables.
    template <bool has_tables>
    MRROPE_HOST_DEVICE HeadsOfThread heads_of(int group, int q_heads, int kv_heads) const {
        using Kind = HeadsOfThread::Kind;
        const Kind kind = group < groups.queries                 ? Kind::query
                          : group < groups.queries + groups.keys ? Kind::key
                                                                 : Kind::value;
        const int first = group - (kind == Kind::query ? 0 : groups.queries) - (kind == Kind::value ? groups.keys : 0);
        // One table has as many groups of k as of v.
        const int step = kind == Kind::query ? groups.queries : groups.values;
        HeadsOfThread heads{{first, step, kind == Kind::query ? q_heads : kv_heads, 0}, kind};
        if constexpr (has_tables) {
            if (kind != Kind::value) {
                static_cast<StridedHeads&>(heads) = (kind == Kind::query ? queries : keys).heads_of(first);
            }
        }
        return heads;
    }
};

}  // namespace mrrope
