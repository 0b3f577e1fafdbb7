#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// The arithmetic of one rotation, shared by host and device, so that CPU tests cover the GPU's formula.

#if defined(__CUDACC__)
#define MRROPE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MRROPE_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace mrrope {

template <class Real>
struct CosSin {
    Real cos;
    Real sin;
};

template <class Real>
struct Pair {
    Real first;
    Real second;
};

// The phase of a pair at a position, in 64-bit fixed-point revolutions. Integer overflow drops whole revolutions, so
// the phase is exact at every position, negative or huge.
MRROPE_HOST_DEVICE uint64_t phase_of(int64_t position, uint64_t phase_step) {
    return static_cast<uint64_t>(position) * phase_step;
}

// Decodes a word of a packed table that is not a phase step: a factor or a row of positions. Both are
// nonnegative, so the top bit is set only if the table was negated word by word, to rotate backwards; this undoes it.
// Negative factors cannot be stored: the bits of -1.0 would decode to 4.0.
MRROPE_HOST_DEVICE uint64_t without_negation(uint64_t word) {
    return word >> 63 ? 0 - word : word;
}

// The attention factor in the last word of a packed table, or the factor of a query head.
MRROPE_HOST_DEVICE double factor_of(uint64_t word) {
    return std::bit_cast<double>(without_negation(word));
}

// The top bit of a word that names rows of positions tells whether it was negated.
inline constexpr int max_position_rows = 128;

// The row of positions that a word of PositionsView::row_of_pair names for the pair `ahead` pairs after its own.
MRROPE_HOST_DEVICE int named_row(uint64_t word, int ahead) {
    return static_cast<int>(without_negation(word) >> (8 * ahead) & 0xff);
}

// The row of positions for a pair. Clamped, so that no word leads out of bounds.
MRROPE_HOST_DEVICE int position_row_of(uint64_t word, int64_t rows) {
    const int row = named_row(word, 0);
    const int last = static_cast<int>(rows) - 1;
    return row < last ? row : last;
}

// Cosine and sine of quarter * pi/2 + x, given those of x.
template <class Real>
MRROPE_HOST_DEVICE CosSin<Real> rotated_by_quarters(uint32_t quarter, Real cosine, Real sine) {
    const bool odd = quarter & 1;
    const Real c = odd ? sine : cosine;
    const Real s = odd ? cosine : sine;
    return {(quarter + 1) & 2 ? -c : c, quarter & 2 ? -s : s};
}

// Takes the phase's top 32 bits: 2^-32 revolutions are 1.5e-9 radians, far below float's rounding. Range reduction to
// [-pi/4, pi/4] is exact integer arithmetic, followed by minimax polynomials (error below 3e-9).
MRROPE_HOST_DEVICE CosSin<float> cos_sin(uint32_t phase_top) {
    const uint32_t quarter = (phase_top + 0x20000000u) >> 30;
    const auto rest = static_cast<int32_t>(phase_top - (quarter << 30));
    const float x = static_cast<float>(rest) * 0x1p-29f;
    const float x2 = x * x;
    const float sine =
        x * (0.785398160977f + x2 * (-0.0807454347081f + x2 * (0.00249000680149f + x2 * -3.59542907251e-5f)));
    const float cosine =
        1.0f + x2 * (-0.308425137344f + x2 * (0.0158543381473f + x2 * (-0.000325961380347f + x2 * 3.54195272814e-6f)));
    return rotated_by_quarters(quarter & 3, cosine, sine);
}

// In double: the same range reduction, then Taylor series.
MRROPE_HOST_DEVICE CosSin<double> cos_sin(uint64_t phase) {
    const uint64_t quarter = (phase + (uint64_t{1} << 61)) >> 62;
    const auto rest = static_cast<int64_t>(phase - (quarter << 62));
    const double angle = static_cast<double>(rest) * (0x1p-61 * 0.78539816339744830962);
    const double a2 = angle * angle;
    double sine = 1.0 / 355687428096000.0;
    sine = sine * a2 - 1.0 / 1307674368000.0;
    sine = sine * a2 + 1.0 / 6227020800.0;
    sine = sine * a2 - 1.0 / 39916800.0;
    sine = sine * a2 + 1.0 / 362880.0;
    sine = sine * a2 - 1.0 / 5040.0;
    sine = sine * a2 + 1.0 / 120.0;
    sine = sine * a2 - 1.0 / 6.0;
    sine = angle + angle * (a2 * sine);
    double cosine = 1.0 / 20922789888000.0;
    cosine = cosine * a2 - 1.0 / 87178291200.0;
    cosine = cosine * a2 + 1.0 / 479001600.0;
    cosine = cosine * a2 - 1.0 / 3628800.0;
    cosine = cosine * a2 + 1.0 / 40320.0;
    cosine = cosine * a2 - 1.0 / 720.0;
    cosine = cosine * a2 + 1.0 / 24.0;
    cosine = cosine * a2 - 0.5;
    cosine = 1.0 + a2 * cosine;
    return rotated_by_quarters(static_cast<uint32_t>(quarter) & 3, cosine, sine);
}

// Cosine and sine of a phase, times the attention factor `gain`; `direction` is 1, or -1 to negate the angle.
MRROPE_HOST_DEVICE CosSin<float> scaled_cos_sin(uint64_t phase, float gain, float direction) {
    const CosSin<float> unit = cos_sin(static_cast<uint32_t>(phase >> 32));
    return {gain * unit.cos, gain * direction * unit.sin};
}

MRROPE_HOST_DEVICE CosSin<double> scaled_cos_sin(uint64_t phase, double gain, double direction) {
    const CosSin<double> unit = cos_sin(phase);
    return {gain * unit.cos, gain * direction * unit.sin};
}

// a * b + c, as an FMA where the processor has one.
template <class Real>
MRROPE_HOST_DEVICE Real multiply_add(Real a, Real b, Real c) {
#if defined(__CUDA_ARCH__) || defined(__FP_FAST_FMA)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

// FMA contraction is explicit; otherwise kernels may contract different products and differ in the last bit. A token
// rotates to the same bits in every batch, layout and op.
template <class Real>
MRROPE_HOST_DEVICE Pair<Real> rotate(Pair<Real> x, CosSin<Real> by) {
    return {multiply_add(x.first, by.cos, -(x.second * by.sin)), multiply_add(x.second, by.cos, x.first * by.sin)};
}

// Multiplies what `rotate` returns, not the cosines, so that neighbouring heads share those.
template <class Real>
MRROPE_HOST_DEVICE Pair<Real> scaled(Pair<Real> x, Real factor) {
    return {factor * x.first, factor * x.second};
}

}  // namespace mrrope
