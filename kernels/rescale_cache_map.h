#pragma once

#include "lane_layout.h"
#include "rescale_cache_plan.h"

// Thread-to-element map of the rescale kernel, for host and device. Neighbouring threads take neighbouring vectors,
// then head groups, then tokens.

namespace mrrope {

struct RescaleCachePlace {
    int lane;
    int group;        // heads group, group + head_groups, ...
    int first_token;  // advances by token_step; a thread whose first_token is not below token_step idles

    MRROPE_HOST_DEVICE RescaleCachePlace(const RescaleCachePlan& plan, int thread) {
        lane = thread % plan.lanes;
        group = thread / plan.lanes % plan.head_groups;
        first_token = thread / plan.lanes / plan.head_groups;
    }

    // How many of the `heads` heads are in the group.
    MRROPE_HOST_DEVICE int heads_in_group(const RescaleCachePlan& plan, int heads) const {
        return (heads - group + plan.head_groups - 1) / plan.head_groups;
    }
};

}  // namespace mrrope
