#pragma once

#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/float8_fragment.cuh"
#include "device/rms_norm.cuh"
#include "qk_norm_rotary_and_cache_launch.cuh"

namespace mrrope {

// Any shape and pairing, component by component: a block takes one row, and reads it to write it, before that for its
// mean square, where it has a norm, and for the scales of float8 that it computes.
template <class Element>
class RowOfHeads {
    using Real = RealOf<Element>;
    using Launch = QkNormRotaryAndCacheLaunch<Real>;

public:
    __device__ RowOfHeads(const Launch& launch, const StoreRow& row)
        : launch_(launch),
          args_(launch.args.rotary),
          row_(row),
          of_(launch.heads(row.kind)),
          over_head_(launch.args.over == NormOver::head),
          first_(over_head_ ? row.row : 0),
          end_(over_head_ ? row.row + 1 : of_.view.heads) {}

    __device__ void store() {
        const bool is_cached = row_.kind == HeadKind::key || row_.kind == HeadKind::value;
        int64_t slot = 0;
        if (is_cached) slot = load_position(launch_.args.slots.of_tokens, 0, row_.batch, row_.token);
        if (is_cached && !launch_.has_slot(slot)) return;
        out_ = launch_.out_offset(of_, is_cached, row_.batch, row_.token, slot);
        rotates_ = row_.kind == HeadKind::query || row_.kind == HeadKind::key;
        if (of_.weight != nullptr) scale_ = inverse_rms();
        for (int head = first_; head < end_; ++head) store_head(head);
    }

private:
    __device__ const Element* in(int head) const {
        return static_cast<const Element*>(of_.view.in) + offset_of(of_.view.in_strides, row_.batch, row_.token, head);
    }

    __device__ Real inverse_rms() const {
        Real sums[1] = {0};
        for (int head = first_; head < end_; ++head) {
            CUTLASS_PRAGMA_NO_UNROLL
            for (int at = threadIdx.x; at < args_.head_dim; at += static_cast<int>(blockDim.x)) {
                const auto x = static_cast<Real>(in(head)[at]);
                sums[0] += x * x;
            }
        }
        sum_over_block(sums);
        return launch_.inverse_rms(sums[0], of_);
    }

    __device__ Real normed(int head, int at) const {
        const auto x = static_cast<Real>(in(head)[at]);
        if (of_.weight == nullptr) return x;
        const int64_t first_weight = over_head_ ? 0 : static_cast<int64_t>(head) * args_.head_dim;
        const auto weight = static_cast<Real>(static_cast<const Element*>(of_.weight)[first_weight + at]);
        return x * scale_ * (weight + launch_.weight_offset);
    }

    // Calls f(component, value) for this thread's share of a head's results.
    template <class F>
    __device__ void each_result(int head, F&& f) const {
        const int half = rotates_ ? args_.rotary_dim / 2 : 0;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int pair = threadIdx.x; pair < half; pair += static_cast<int>(blockDim.x)) {
            const RowPair lane{args_.pairing, pair, half};
            const Pair<Real> rotated = rotated_pair<Element>(
                args_, lane, {normed(head, lane.first()), normed(head, lane.second())},
                /*is_q=*/row_.kind == HeadKind::query, of_.view.heads, row_.batch, row_.token, head, Real(1));
            f(lane.first(), rotated.first);
            f(lane.second(), rotated.second);
        }
        CUTLASS_PRAGMA_NO_UNROLL
        for (int at = 2 * half + threadIdx.x; at < args_.head_dim; at += static_cast<int>(blockDim.x)) {
            const Real x = normed(head, at);
            f(at, row_.kind == HeadKind::gate ? sigmoid<Element>(x) : x);
        }
    }

    __device__ void store_head(int head) {
        const int64_t out = out_ + head * of_.view.out_strides.head;
        if (is_float8(of_.stored_as)) {
            if constexpr (std::is_same_v<Real, float>) {
                const float scale = float8_scale(head);
                auto* to = static_cast<uint8_t*>(of_.view.out) + out;
                each_result(head, [&](int at, float x) {
                    to[at] = to_float8<1>(cutlass::Array<float, 1>{x}, scale, of_.stored_as)[0];
                });
            }
            return;
        }
        Element* to = static_cast<Element*>(of_.view.out) + out;
        // Components that are neither normed nor rotated keep their bits.
        const int kept_from = of_.weight != nullptr || row_.kind == HeadKind::gate ? args_.head_dim
                              : rotates_                                           ? args_.rotary_dim
                                                                                   : 0;
        each_result(head, [&](int at, Real x) { to[at] = at < kept_from ? static_cast<Element>(x) : in(head)[at]; });
    }

    __device__ float float8_scale(int head) {
        if (row_.kind != HeadKind::query || launch_.args.q_scale_out == nullptr) {
            return of_.scale == nullptr ? 1.0f : of_.scale[head * of_.scale_stride];
        }
        float largest = 0.0f;
        each_result(head, [&](int, float x) { largest = fmaxf(largest, fabsf(x)); });
        const float scale = launch_.q_range.scale_of(max_over_block(largest));
        if (threadIdx.x == 0) *launch_.q_scale(row_.batch, row_.token, head) = scale;
        return scale;
    }

    const Launch& launch_;
    const RotaryArgs& args_;
    const StoreRow row_;
    const HeadsOfKind<Real>& of_;
    const bool over_head_;
    const int first_;
    const int end_;
    int64_t out_ = 0;
    bool rotates_ = false;
    Real scale_ = 1;
};

template <class Element>
__global__ void __launch_bounds__(norm_row_block_threads, norm_row_min_blocks_per_sm)
    qk_norm_rotary_and_cache_row_kernel(const __grid_constant__ QkNormRotaryAndCacheLaunch<RealOf<Element>> launch) {
    const StoreRow row = launch.map.row(blockIdx.x);
    pdl_wait();
    pdl_trigger();
    RowOfHeads<Element>(launch, row).store();
}

}  // namespace mrrope
