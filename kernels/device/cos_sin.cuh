#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "mrrope/rotation.h"

// cos/sin by the special function units where results are rounded to 16 bits, else by polynomials.

namespace mrrope {

// The precision of the computation.
template <class Element>
using RealOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

// The upper 32 bits of phase_of, in three instructions instead of six.
__device__ inline uint32_t phase_top_of(int64_t position, uint64_t step) {
    const auto low = static_cast<uint32_t>(position);
    const auto high = static_cast<uint32_t>(position >> 32);
    const auto low_step = static_cast<uint32_t>(step);
    return __umulhi(low, low_step) + low * static_cast<uint32_t>(step >> 32) + high * low_step;
}

// Absolute error below 1e-6, hundreds of times below the error of rounding to 16 bits. The phase is exact, and the
// angle lies in [-pi, pi), where __cosf and __sinf are most accurate.
__device__ inline CosSin<float> hardware_cos_sin(uint32_t phase_top, float gain, float direction = 1.0f) {
    constexpr float radians = 3.14159265f * 0x1p-31f;  // 2^32 is one revolution
    const float angle = static_cast<float>(static_cast<int32_t>(phase_top)) * radians;
    return {gain * __cosf(angle), gain * direction * __sinf(angle)};
}

// Cosine and sine of a pair of Elements at a position, times the attention factor `gain`; `direction` is 1, or -1 to
// negate the angle. With polynomials a third of the instructions of two 16-bit heads would be cos/sin.
template <class Element>
__device__ CosSin<RealOf<Element>> cos_sin_at(int64_t position, uint64_t step, RealOf<Element> gain,
                                              RealOf<Element> direction) {
    if constexpr (sizeof(Element) == 2) {
        return hardware_cos_sin(phase_top_of(position, step), gain, direction);
    } else {
        return scaled_cos_sin(phase_of(position, step), gain, direction);
    }
}

}  // namespace mrrope
