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

// The heads of a thread: `first` and every `step`-th after it, all of q, all of k or all of v.
struct HeadsOfThread {
    enum Kind { query, key, value };
    Kind kind;
    int first;
    int step;

    MRROPE_HOST_DEVICE HeadsOfThread(const HeadGroups& groups, int group) {
        kind = group < groups.queries ? query : group < groups.queries + groups.keys ? key : value;
        step = kind == query ? groups.queries : groups.keys;
        first = group - (kind == query ? 0 : groups.queries) - (kind == value ? groups.keys : 0);
    }

    MRROPE_HOST_DEVICE int head(int j) const { return first + j * step; }

    MRROPE_HOST_DEVICE const CachedHeads& cached(const RotaryAndCacheArgs& args) const {
        return kind == key ? args.k : args.v;
    }

    MRROPE_HOST_DEVICE const HeadsView& view(const RotaryAndCacheArgs& args) const {
        return kind == query ? args.rotary.q : cached(args).view;
    }
};

}  // namespace mrrope
