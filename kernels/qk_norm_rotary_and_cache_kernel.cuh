#pragma once

#include <cutlass/fast_math.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <type_traits>
#include <variant>

#include "device/dependent_launch.cuh"
#include "device/float8_fragment.cuh"
#include "device/rms_norm.cuh"
#include "qk_norm_rotary_and_cache_map.h"
#include "qk_norm_rotary_and_cache_plan.h"

namespace mrrope {

// q, k, v or the gate.
template <class Real>
struct HeadsOfKind {
    HeadsView view;
    const void* weight = nullptr;  // nullptr: not normed
    Real inverse_size = 0;         // of a row
    StoredAs stored_as = StoredAs::heads_dtype;
    const float* scale = nullptr;  // of float8
    int64_t scale_stride = 0;
};

// Passed to the kernel by value. A thread finds its kind of heads by an index, not by branches.
template <class Real>
struct QkNormRotaryAndCacheLaunch {
    QkNormRotaryAndCacheArgs args;
    HeadsOfKind<Real> kinds[head_kinds];
    Real eps;
    Real weight_offset;
    QkNormRotaryAndCacheMap<cutlass::FastDivmod> map;
    cutlass::FastDivmod block_size;
    uint32_t slots;

    __device__ const HeadsOfKind<Real>& heads(HeadKind kind) const { return kinds[static_cast<int>(kind)]; }

    __device__ Real inverse_rms(Real sum_of_squares, const HeadsOfKind<Real>& of) const {
        return of.weight == nullptr ? Real(1) : rsqrt(sum_of_squares * of.inverse_size + eps);
    }

    // Without weights, which are zero then, the offset makes them 1.
    __device__ Real offset_of_weights(const HeadsOfKind<Real>& of) const {
        return of.weight == nullptr ? Real(1) : weight_offset;
    }

    __device__ bool has_slot(int64_t slot) const {
        return static_cast<uint64_t>(slot) < slots;  // unsigned: negative slots are out of range, too
    }

    // Where a token's heads are stored, in elements; `slot` is that of cached heads.
    __device__ int64_t out_offset(const HeadsOfKind<Real>& of, bool is_cached, int batch, int token,
                                  int64_t slot) const {
        int outer = batch;
        int inner = token;
        if (is_cached && args.slots.paged) {
            block_size(outer, inner, static_cast<int>(slot));
        } else if (is_cached) {
            inner = static_cast<int>(slot);
        }
        return offset_of(of.view.out_strides, outer, inner, 0);
    }

    __device__ void store_q_scale(float scale, int batch, int token, int head) const {
        args.q_scale_out[offset_of(args.q_scale_out_strides, batch, token, head)] = scale;
    }
};

// No exponential overflows, so small results keep their precision. For results of 16 bits the approximations' error,
// at most 1.3e-5, is far below that of rounding.
template <class Element>
__device__ RealOf<Element> sigmoid(RealOf<Element> x) {
    if constexpr (sizeof(Element) == 2) {
        const float small = __expf(-fabsf(x));
        return __fdividef(x < 0.0f ? small : 1.0f, 1.0f + small);
    } else {
        using Real = RealOf<Element>;
        const Real small = exp(-abs(x));
        return (x < 0 ? small : Real(1)) / (Real(1) + small);
    }
}

template <int Vector>
__device__ float largest_magnitude(const WideFragment<float, Vector>& wide) {
    float largest = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vector; ++i) largest = fmaxf(largest, fmaxf(fabsf(wide.first[i]), fabsf(wide.second[i])));
    return largest;
}

// qk_norm_rotary_kernel for heads of four kinds: a thread holds two vectors of HeadsPerThread heads, all of q, of k, of
// v or of the gate, and stores k and v to the token's cache slot. All loads are in flight while it computes cos/sin.
// What is stored as which dtype is decided at run time: every thread of a kind decides alike.
template <class Element, int HeadsPerThread, Pairing pairing, NormOver over, bool needs_lookup>
__global__ void __launch_bounds__(over == NormOver::head ? norm_block_threads : norm_max_block_threads,
                                  norm_and_cache_min_blocks_per_sm(over, HeadsPerThread, needs_lookup,
                                                                   std::is_same_v<Element, cutlass::half_t>))
    qk_norm_rotary_and_cache_kernel(const __grid_constant__ QkNormRotaryAndCacheLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = 16 / sizeof(Element);
    using Lane = WholeHeadLayout<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    constexpr bool over_head = over == NormOver::head;
    const RotaryArgs& args = launch.args.rotary;
    const StorePlace place = launch.map.template place<over>(blockIdx.x, threadIdx.x);
    const Lane lane(place.lane, args.rotary_dim / 2);
    const HeadsOfKind<Real>& of = launch.heads(place.kind);
    const StridedHeads heads = launch.map.template heads_of<needs_lookup>(place, of.view.heads);
    const Element* in =
        static_cast<const Element*>(of.view.in) + offset_of(of.view.in_strides, place.batch, place.token, heads.first);
    const int64_t in_step = heads.step * of.view.in_strides.head;
    const auto has_head = [&](int j) { return place.active && heads.exists(j); };
    const void* token_slot = position_address(launch.args.slots.of_tokens, 0, place.batch, place.token);
    // Small launches are latency-bound, so all addresses are computed before the wait.
    if constexpr (HeadsPerThread <= 2) {
        const bool always_false = launch.map.threads < 0;
        compute_before_wait(always_false, in + lane.first());
        compute_before_wait(always_false, in + lane.second());
        compute_before_wait(always_false, position_address(args.positions, 0, place.batch, place.token));
        compute_before_wait(always_false, token_slot);
        compute_before_wait(always_false, args.table + lane.pair(0));
    }
    pdl_wait();

    constexpr int held = norm_heads_in_registers(HeadsPerThread);
    // As in qk_norm_rotary_kernel: more than two sets would cost too many registers during the reduction.
    constexpr int weights_held = over_head ? 1 : 2;
    // As in qk_norm_rotary_kernel: over all heads, for many tokens, threads share cos/sin through shared memory.
    constexpr bool shares_cos_sin = !over_head && HeadsPerThread == 4;
    Fragment fragments[held];
    Fragment weights[weights_held];
    // Small launches are latency-bound, so their scales are loaded with the heads. Otherwise the registers matter more.
    constexpr bool loads_scales_first = HeadsPerThread <= 2;
    float scales[loads_scales_first ? HeadsPerThread : 1];
    const auto load_head = [&](int j) {
        fragments[j % held] = Fragment{};
        if (has_head(j)) fragments[j % held].load(in + j * in_step, lane);
    };
    const auto load_weights = [&](int j) {
        weights[j % weights_held] = Fragment{};
        const int64_t head = over_head ? 0 : heads.head(j);
        if (of.weight != nullptr && has_head(j)) {
            weights[j % weights_held].load(static_cast<const Element*>(of.weight) + head * args.head_dim, lane);
        }
    };
    const auto load_scale = [&](int j) {
        return of.scale != nullptr && has_head(j) ? of.scale[heads.head(j) * of.scale_stride] : 1.0f;
    };
    const auto load_first = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) load_head(j);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < weights_held; ++j) load_weights(j);
        if constexpr (loads_scales_first) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < HeadsPerThread; ++j) scales[j] = load_scale(j);
        }
    };

    // Issued first, since loads return in issue order: what leads to cos/sin.
    CosSin<Real> by[Vector];
    __shared__ std::conditional_t<shares_cos_sin, SharedCosSin<Real, Vector>, std::monostate> shared_cos_sin;
    LaneAngles<Vector, needs_lookup> angles;
    if constexpr (!shares_cos_sin) {
        if (place.rotates()) angles.load(args, lane, place.batch, place.token, heads.table);
    }
    int64_t slot = 0;
    if (place.is_cached()) slot = load_position(launch.args.slots.of_tokens, token_slot);
    load_first();
    if constexpr (shares_cos_sin) {
        static_assert(!needs_lookup, "heads share cos/sin of one table only");
        if (place.rotates()) {
            shared_cos_sin.template compute<pairing>(args, place.batch, place.token, Real(1));
        }
    } else {
        if (place.rotates()) angles.compute(by, args, lane, place.batch, place.token, Real(1));
    }
    pdl_trigger();
    // As in qk_norm_rotary_kernel: folding the weights into cos/sin pays off with eight heads per thread.
    constexpr bool folds_weights = over_head && HeadsPerThread == 8;
    WeightedRotation<Real> weighted[folds_weights ? Vector : 1];
    if constexpr (folds_weights) {
        if (place.rotates()) {
            with_offset(weights[0], launch.offset_of_weights(of))
                .template for_each_pair<Lane::crosses_vectors>(
                    [&](int i, Real a, Real b) { weighted[i] = WeightedRotation<Real>(a, b, by[i]); });
        }
    }

    const bool is_stored = !place.is_cached() || launch.has_slot(slot);
    const bool stores_float8 = is_float8(of.stored_as);
    const int64_t out_offset = launch.out_offset(of, place.is_cached(), place.batch, place.token, slot) +
                               heads.first * of.view.out_strides.head;
    const int64_t out_step = heads.step * of.view.out_strides.head;
    const bool computes_q_scale = launch.args.q_scale_out != nullptr;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < HeadsPerThread; first += held) {
        Real sums[held];
        if (over_head || place.rotates()) {
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < held; ++j) {
                const Wide wide = fragments[j].widened();
                sums[j] = sum_of_products(wide, wide);
            }
        }
        if constexpr (over_head) {
            sum_over_team(sums, launch.map.plan.team);
        } else if (place.rotates()) {  // the same for the whole block
            Real all[1] = {0};
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < held; ++j) all[0] += sums[j];
            sum_over_block(all);
            const Real scale = launch.inverse_rms(all[0], of);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                if constexpr (shares_cos_sin)
                    by[i] = lane.rotates() ? shared_cos_sin[lane.pair(i)] : CosSin<Real>{1, 0};
                by[i] = {by[i].cos * scale, by[i].sin * scale};
            }
        }

        CUTLASS_PRAGMA_UNROLL
        for (int j = first; j < first + held; ++j) {
            // The whole warp takes part in the maximum of a head.
            if (!has_head(j) && !computes_q_scale) break;
            Wide wide = fragments[j % held].widened();
            if (place.rotates()) {
                if constexpr (folds_weights) {
                    const Real scale = launch.inverse_rms(sums[j % held], of);
                    wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
                        // The tail has no partner: the sum's other term would turn its infinity into NaN.
                        const Pair<Real> rotated =
                            lane.rotates() ? weighted[i](a, b)
                                           : Pair<Real>{a * weighted[i].first.cos, b * weighted[i].second.cos};
                        a = scale * rotated.first;
                        b = scale * rotated.second;
                    });
                } else {
                    const Wide weight = with_offset(weights[j % weights_held], launch.offset_of_weights(of));
                    if constexpr (over_head) {
                        wide.multiply(weight, launch.inverse_rms(sums[j % held], of));
                    } else {
                        if (j + weights_held < HeadsPerThread) load_weights(j + weights_held);
                        wide.multiply(weight);
                    }
                    wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
                        const Pair<Real> rotated =
                            lane.rotates() ? rotate<Real>({a, b}, by[i]) : Pair<Real>{a * by[i].cos, b * by[i].cos};
                        a = rotated.first;
                        b = rotated.second;
                    });
                }
            } else if (place.kind == HeadKind::gate) {
                CUTLASS_PRAGMA_UNROLL
                for (int i = 0; i < Vector; ++i) {
                    wide.first[i] = sigmoid<Element>(wide.first[i]);
                    wide.second[i] = sigmoid<Element>(wide.second[i]);
                }
            }
            float scale = loads_scales_first ? scales[loads_scales_first ? j : 0] : load_scale(j);
            if (computes_q_scale) {
                const bool is_query = place.kind == HeadKind::query;
                const float largest = max_over_team(has_head(j) ? largest_magnitude(wide) : 0.0f, launch.map.plan.team);
                if (is_query) scale = float8_scale_of(largest, of.stored_as);
                if (is_query && has_head(j) && place.lane == 0) {
                    launch.store_q_scale(scale, place.batch, place.token, heads.head(j));
                }
            }

            if (is_stored && has_head(j)) {
                const int64_t head = out_offset + j * out_step;
                if (stores_float8) {
                    Float8Fragment<Vector> narrowed;
                    narrowed.narrow(wide, scale, of.stored_as);
                    narrowed.store(static_cast<uint8_t*>(of.view.out) + head, lane);
                } else {
                    Fragment narrowed = fragments[j % held];
                    if (place.kind != HeadKind::value) narrowed.narrow(wide);  // values keep their bits
                    narrowed.store(static_cast<Element*>(of.view.out) + head, lane);
                }
            }
            if (j + held < HeadsPerThread) load_head(j + held);
        }
    }
}

// Any shape, component by component: a block takes one row, and reads it once for its mean square, once to write it,
// and once more for the scales of float8 that it computes.
template <class Element, Pairing pairing>
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
            for (int at = threadIdx.x; at < args_.head_dim; at += norm_row_block_threads) {
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
        const int heads_per_table = of_.view.heads / args_.choice.heads;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int pair = threadIdx.x; pair < half; pair += norm_row_block_threads) {
            const WholeHeadLayout<pairing, 1> lane(pair, half);
            LaneAngles<1, true> angles;
            angles.load(args_, lane, row_.batch, row_.token, head / heads_per_table);
            CosSin<Real> by[1];
            angles.compute(by, args_, lane, row_.batch, row_.token, Real(1));
            const Pair<Real> rotated = rotate<Real>({normed(head, lane.first()), normed(head, lane.second())}, by[0]);
            f(lane.first(), rotated.first);
            f(lane.second(), rotated.second);
        }
        CUTLASS_PRAGMA_NO_UNROLL
        for (int at = 2 * half + threadIdx.x; at < args_.head_dim; at += norm_row_block_threads) {
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
        const float scale = float8_scale_of(max_over_block(largest), of_.stored_as);
        if (threadIdx.x == 0) launch_.store_q_scale(scale, row_.batch, row_.token, head);
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

template <class Element, Pairing pairing>
__global__ void __launch_bounds__(norm_row_block_threads, norm_row_min_blocks_per_sm)
    qk_norm_rotary_and_cache_row_kernel(const __grid_constant__ QkNormRotaryAndCacheLaunch<RealOf<Element>> launch) {
    const StoreRow row = launch.map.row(blockIdx.x);
    pdl_wait();
    pdl_trigger();
    RowOfHeads<Element, pairing>(launch, row).store();
}

template <class Element, Pairing pairing>
auto store_kernel(const QkNormRotaryAndCachePlan& plan, NormOver over) {
    constexpr NormOver head = NormOver::head;
    constexpr NormOver all_heads = NormOver::all_heads;
    if constexpr (sizeof(Element) <= 4) {
        const auto plan_is = [&](NormOver plan_over, int heads_per_thread, bool finds_table) {
            return plan.in_registers && over == plan_over && plan.heads_per_thread == heads_per_thread &&
                   plan.finds_table == finds_table;
        };
        if (plan_is(head, 1, false))
            return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 1, pairing, head, false>>;
        if (plan_is(head, 2, false))
            return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 2, pairing, head, false>>;
        if (plan_is(head, 8, false))
            return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 8, pairing, head, false>>;
        if (plan_is(head, 2, true)) return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 2, pairing, head, true>>;
        if (plan_is(all_heads, 4, false)) {
            return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 4, pairing, all_heads, false>>;
        }
        if (plan_is(all_heads, 2, true)) {
            return pdl_kernel<qk_norm_rotary_and_cache_kernel<Element, 2, pairing, all_heads, true>>;
        }
    }
    if (plan.in_registers) throw std::logic_error("mrrope: no kernel norms and caches that many heads a thread");
    return pdl_kernel<qk_norm_rotary_and_cache_row_kernel<Element, pairing>>;
}

template <class Real>
void fill_kinds(HeadsOfKind<Real> (&kinds)[head_kinds], const QkNormRotaryAndCacheArgs& args) {
    const auto inverse_size = [&](const HeadsView& view) {
        const double heads = args.over == NormOver::head ? 1 : view.heads;
        return static_cast<Real>(1.0 / (heads * args.rotary.head_dim));
    };
    const HeadsView& q = args.rotary.q;
    kinds[static_cast<int>(HeadKind::query)] = {q,
                                                args.q_weight,
                                                inverse_size(q),
                                                args.q_stored_as,
                                                args.q_scale_out == nullptr ? args.q_scale : nullptr,
                                                args.q_scale_stride};
    kinds[static_cast<int>(HeadKind::key)] = {args.k.view,    args.k_weight, inverse_size(args.k.view),
                                              args.cached_as, args.k.scale,  args.k.scale_stride};
    kinds[static_cast<int>(HeadKind::value)] = {args.v.view,    nullptr,      0,
                                                args.cached_as, args.v.scale, args.v.scale_stride};
    kinds[static_cast<int>(HeadKind::gate)] = {.view = args.gate};
}

// Instantiated in one file per element type, for parallel builds.
template <class Element>
void launch_qk_norm_rotary_and_cache(const QkNormRotaryAndCacheArgs& args, const QkNormRotaryAndCachePlan& plan,
                                     cudaStream_t stream) {
    using Real = RealOf<Element>;
    const auto blocks = static_cast<int>(blocks_of(plan, args.over, args.rotary.batch * args.rotary.tokens));
    QkNormRotaryAndCacheLaunch<Real> launch{
        .args = args,
        .kinds = {},
        .eps = static_cast<Real>(args.eps),
        .weight_offset = static_cast<Real>(args.weight_offset),
        .map = QkNormRotaryAndCacheMap<cutlass::FastDivmod>::of(plan, shape_of(args)),
        .block_size = cutlass::FastDivmod(static_cast<int>(std::max<int64_t>(1, args.slots.block_size))),
        .slots = static_cast<uint32_t>(args.slots.count()),
    };
    fill_kinds(launch.kinds, args);
    const auto kernel = args.rotary.pairing == Pairing::halves
                            ? store_kernel<Element, Pairing::halves>(plan, args.over)
                            : store_kernel<Element, Pairing::interleaved>(plan, args.over);
    launch_with_pdl(kernel, dim3(blocks), plan.block_threads, stream, launch);
}

extern template void launch_qk_norm_rotary_and_cache<double>(const QkNormRotaryAndCacheArgs&,
                                                             const QkNormRotaryAndCachePlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_and_cache<float>(const QkNormRotaryAndCacheArgs&,
                                                            const QkNormRotaryAndCachePlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_and_cache<cutlass::half_t>(const QkNormRotaryAndCacheArgs&,
                                                                      const QkNormRotaryAndCachePlan&, cudaStream_t);
extern template void launch_qk_norm_rotary_and_cache<cutlass::bfloat16_t>(const QkNormRotaryAndCacheArgs&,
                                                                          const QkNormRotaryAndCachePlan&,
                                                                          cudaStream_t);

}  // namespace mrrope
