#pragma once

#include <cutlass/array.h>
#include <cutlass/float8.h>
#include <cutlass/numeric_conversion.h>

#include <cfloat>

#include "device/head_fragment.cuh"
#include "mrrope/float8.h"

// Rounds a lane's part of a head to float8 and stores it. The format is a run-time argument: every thread of a launch
// has the same, and the branch costs nothing beside the stores.

namespace mrrope {

template <int Vector>
using Float8Vector = cutlass::AlignedArray<uint8_t, Vector>;

template <class Format, int Vector>
__device__ Float8Vector<Vector> convert_to_float8(const cutlass::Array<float, Vector>& x) {
    cutlass::NumericArrayConverter<Format, float, Vector> narrow;
    cutlass::AlignedArray<Format, Vector> rounded;
    static_cast<cutlass::Array<Format, Vector>&>(rounded) = narrow(x);
    return reinterpret_cast<const Float8Vector<Vector>&>(rounded);
}

template <int Vector>
__device__ Float8Vector<Vector> to_float8(const cutlass::Array<float, Vector>& x, StoredAs format) {
#if __CUDA_ARCH__ >= 890
    if (format == StoredAs::float8_e5m2) return convert_to_float8<cutlass::float_e5m2_t>(x);
    return convert_to_float8<cutlass::float_e4m3_t>(x);
#else
    Float8Vector<Vector> bits;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) bits[j] = float8_bits(x[j], format);
    return bits;
#endif
}

// x / scale, correctly rounded before it is rounded to float8.
template <int Vector>
__device__ Float8Vector<Vector> to_float8(cutlass::Array<float, Vector> x, float scale, StoredAs format) {
    const Float8Scale by{scale, nan_unless_float8_scale(scale, __fdividef(1.0f, scale))};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Vector; ++j) x[j] = by.divide(x[j]);
    return to_float8(x, format);
}

// factor / scale: finite where the factor is, for the smallest scales, too, since 0 must not become NaN.
__device__ inline float finite_ratio(float factor, float scale) {
    const float ratio = nan_unless_float8_scale(scale, __fdividef(factor, scale));
    return fabsf(ratio) > FLT_MAX && fabsf(factor) <= FLT_MAX ? copysignf(FLT_MAX, ratio) : ratio;
}

// finite_ratio for a scale of Float8Range::scale_of, whose reciprocal is a normal number.
__device__ inline float ratio_to_computed_scale(float factor, float scale) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(scale));
    const float ratio = factor * reciprocal;
    return ratio > FLT_MAX && factor <= FLT_MAX ? FLT_MAX : ratio;
}

// A lane's two vectors as float8.
template <int Vector>
struct Float8Fragment {
    Float8Vector<Vector> first;
    Float8Vector<Vector> second;

    __device__ void narrow(const WideFragment<float, Vector>& wide, float scale, StoredAs format) {
        first = to_float8(wide.first, scale, format);
        second = to_float8(wide.second, scale, format);
    }

    // wide * factor, for results of float32 arithmetic: an exact quotient would cost three more instructions per
    // component, and change one in a million.
    __device__ void narrow_product(WideFragment<float, Vector> wide, float factor, StoredAs format) {
        wide.scale(factor);
        // One branch for both.
        cutlass::Array<float, 2 * Vector> both;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            both[j] = wide.first[j];
            both[Vector + j] = wide.second[j];
        }
        const Float8Vector<2 * Vector> rounded = to_float8(both, format);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) {
            first[j] = rounded[j];
            second[j] = rounded[Vector + j];
        }
    }

    template <class Layout>
    __device__ void store(uint8_t* head, Layout layout) const {
        *reinterpret_cast<Float8Vector<Vector>*>(head + layout.first()) = first;
        *reinterpret_cast<Float8Vector<Vector>*>(head + layout.second()) = second;
    }
};

}  // namespace mrrope
