#pragma once

#include "head_tables_map.h"
#include "lane_layout.h"
#include "rescale_cache_plan.h"

// Thread-to-element map of the rescale kernel, for host and device. Neighbouring threads take neighbouring vectors,
// then head groups, then tokens.

namespace mrrope {

struct RescaleCachePlace {
    int lane;
    int group;        // of heads
    int first_token;  // advances by token_step; a thread whose first_token is not below token_step idles

    MRROPE_HOST_DEVICE RescaleCachePlace(const RescaleCachePlan& plan, int thread) {
        lane = thread % plan.lanes;
        group = thread / plan.lanes % plan.head_groups;
        first_token = thread / plan.lanes / plan.head_groups;
    }

    // The thread's heads, of `heads` heads.
    MRROPE_HOST_DEVICE StridedHeads heads_of_group(const RescaleCachePlan& plan, int heads) const {
        const HeadTablesMap<PlainDivmod> map{{plan.head_groups / plan.table_heads}, heads / plan.table_heads};
        return map.heads_of(group);
    }
};

}  // namespace mrrope
