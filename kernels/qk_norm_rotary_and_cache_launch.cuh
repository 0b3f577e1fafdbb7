#pragma once

#include <cutlass/fast_math.h>

#include "device/head_fragment.cuh"
#include "device/rms_norm.cuh"
#include "mrrope/float8.h"
#include "qk_norm_rotary_and_cache_map.h"

// What both kernels that norm, rotate and write a cache get, and how they take the gate's sigmoid.

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
    Float8Range q_range;  // where q is stored as float8
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

    // Where the computed scale of a head of q is stored.
    __device__ float* q_scale(int batch, int token, int head) const {
        return args.q_scale_out + offset_of(args.q_scale_out_strides, batch, token, head);
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

}  // namespace mrrope
