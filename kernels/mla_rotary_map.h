#pragma once

#include <cstdint>

#include "head_tables_map.h"
#include "lane_layout.h"
#include "mla_rotary_plan.h"

// Thread-to-element map of the MLA kernels, for host and device. Neighbouring threads take neighbouring vectors, then
// head groups, then tokens; the groups of q come before those of the key.

namespace mrrope {

struct MlaRotaryPlace {
    int batch;
    int token;
    bool is_query;
    int group;  // of heads
    int lane;
};

template <class Divmod>
struct MlaRotaryMap {
    Divmod threads_per_token;
    Divmod tokens;
    Divmod q_lanes;
    Divmod k_lanes;
    int q_threads;  // per token

    static MlaRotaryMap of(const MlaRotaryPlan& plan, int64_t tokens) {
        // No threads: there are no heads of q, and the gradient has only sums.
        const int64_t threads = plan.threads_per_token();
        return {Divmod{threads == 0 ? 1 : static_cast<int>(threads)}, Divmod{static_cast<int>(tokens)},
                Divmod{plan.q_lanes}, Divmod{plan.k_lanes}, static_cast<int>(plan.q_threads_per_token())};
    }

    MRROPE_HOST_DEVICE MlaRotaryPlace place(int thread) const {
        MlaRotaryPlace place;
        int sequence_token, of_token;
        threads_per_token(sequence_token, of_token, thread);
        tokens(place.batch, place.token, sequence_token);
        place.is_query = of_token < q_threads;
        if (place.is_query) {
            q_lanes(place.group, place.lane, of_token);
        } else {
            k_lanes(place.group, place.lane, of_token - q_threads);
        }
        return place;
    }
};

// The two vectors of a lane that copies, as far apart as there are such lanes. The last lane of an odd number of
// vectors takes its only one twice.
struct CopyLayout {
    int lane;
    int lanes;
    int dim;
    int vector;

    MRROPE_HOST_DEVICE int first() const { return lane * vector; }
    MRROPE_HOST_DEVICE int second() const {
        const int at = (lane + lanes) * vector;
        return at < dim ? at : first();
    }
};

// The threads that copy the latent part of a cache row: neighbouring vectors, then tokens.
template <class Divmod>
struct MlaLatentMap {
    Divmod lanes;
    Divmod tokens;

    static MlaLatentMap of(const MlaRotaryPlan& plan, int64_t tokens) {
        return {Divmod{plan.latent_lanes < 1 ? 1 : plan.latent_lanes}, Divmod{static_cast<int>(tokens)}};
    }

    MRROPE_HOST_DEVICE void place(int& batch, int& token, int& lane, int thread) const {
        int sequence_token;
        lanes(sequence_token, lane, thread);
        tokens(batch, token, sequence_token);
    }
};

// The two vectors of a lane, as offsets in its part of a head. Lanes after the rotating ones copy the part before the
// rope part.
template <Pairing pairing, int Vector>
struct MlaLaneLayout {
    static constexpr bool crosses_vectors = LaneLayout<pairing, Vector>::crosses_vectors;

    LaneLayout<pairing, Vector> rotated;
    CopyLayout copied;

    MRROPE_HOST_DEVICE MlaLaneLayout(int lane, int half, int lanes, int copied_dim)
        : rotated{lane, half}, copied{lane - half / Vector, lanes - half / Vector, copied_dim, Vector} {}

    MRROPE_HOST_DEVICE bool rotates() const { return copied.lane < 0; }
    MRROPE_HOST_DEVICE int first() const { return rotates() ? rotated.first() : copied.first(); }
    MRROPE_HOST_DEVICE int second() const { return rotates() ? rotated.second() : copied.second(); }
    // Copying lanes return pairs that exist, so that their loads are valid; the values are unused.
    MRROPE_HOST_DEVICE int pair(int j) const { return rotates() ? rotated.pair(j) : j; }
};

// A thread that adds up a part of the heads of a token's key gradient: `first_head` and every head_sums-th after it.
struct MlaSumPlace {
    int batch;
    int token;
    int first_head;
    int lane;
};

template <class Divmod>
struct MlaSumMap {
    Divmod lanes;
    Divmod head_sums;
    Divmod tokens;

    static MlaSumMap of(const MlaRotaryPlan& plan, int64_t tokens) {
        return {Divmod{plan.rotating_lanes}, Divmod{plan.head_sums < 1 ? 1 : plan.head_sums},
                Divmod{static_cast<int>(tokens)}};
    }

    MRROPE_HOST_DEVICE MlaSumPlace place(int thread) const {
        MlaSumPlace place;
        int item, sequence_token;
        lanes(item, place.lane, thread);
        head_sums(sequence_token, place.first_head, item);
        tokens(place.batch, place.token, sequence_token);
        return place;
    }
};

}  // namespace mrrope
