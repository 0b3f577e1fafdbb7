#pragma once

#include <bit>
#include <cstdint>

#include "mrrope/rotary.h"

// Element types of the CPU backend and their conversions, in branch-free integer arithmetic that every compiler
// vectorizes.

namespace mrrope {
namespace {

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline double load(double x) {
    return x;
}

inline float load(float x) {
    return x;
}

inline float load(BFloat16 x) {
    return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

#if defined(__aarch64__)

// Every 64-bit Arm has conversion instructions.
inline float load(Float16 x) {
    return static_cast<float>(std::bit_cast<__fp16>(x.bits));
}

inline void store(Float16& to, float x) {
    to.bits = std::bit_cast<uint16_t>(static_cast<__fp16>(x));
}

#else

inline float load(Float16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
    // Rebiasing the exponent by a multiplication handles subnormals, too.
    const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t special = magnitude | 0x7f800000u;
    return std::bit_cast<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

inline void store(Float16& to, float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + (0xfffu - 0x38000000u) + ((magnitude >> 13) & 1u)) >> 13;
    // Adding 0.5 lets the float unit round to multiples of 2^-24, Float16's smallest subnormal.
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    // From 65520 on, values round to infinity.
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    to.bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite));
}

#endif

inline void store(double& to, double x) {
    to = x;
}

inline void store(float& to, float x) {
    to = x;
}

// NaN is a case of its own: rounding 0x7fffffff, which a caller's float32 cosines may hold, would carry into the sign.
inline void store(BFloat16& to, float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    to.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

// Calls f with a value of the element type of `dtype`.
template <class F>
void with_storage(DType dtype, F&& f) {
    switch (dtype) {
        case DType::float64: return f(double{});
        case DType::float32: return f(float{});
        case DType::float16: return f(Float16{});
        case DType::bfloat16: return f(BFloat16{});
    }
}

}  // namespace
}  // namespace mrrope
