#pragma once

#include <cmath>
#include <cstdint>

namespace mrrope {

// Double-double arithmetic, about 106 bits. Phase steps have 64 bits, which neither double nor x86's long double rounds
// correctly; this does, with the same result on every machine.
struct WideFloat {
    double hi = 0.0;
    double lo = 0.0;

    constexpr WideFloat() = default;
    constexpr WideFloat(double value) : hi(value) {}
    constexpr WideFloat(double high, double low) : hi(high), lo(low) {}
    explicit operator double() const { return hi; }
};

namespace wide {

inline constexpr WideFloat two_pi{6.283185307179586232e+00, 2.449293598294706414e-16};
inline constexpr WideFloat ln2{6.931471805599452862e-01, 2.319046813846299558e-17};

inline WideFloat two_sum(double a, double b) {
    const double sum = a + b;
    const double shadow = sum - a;
    return {sum, (a - (sum - shadow)) + (b - shadow)};
}

inline WideFloat two_product(double a, double b) {
    const double product = a * b;
    return {product, std::fma(a, b, -product)};
}

inline WideFloat normalized(double hi, double lo) {
    const double sum = hi + lo;
    return {sum, lo - (sum - hi)};
}

}  // namespace wide

inline WideFloat operator-(WideFloat a) {
    return {-a.hi, -a.lo};
}

inline WideFloat operator+(WideFloat a, WideFloat b) {
    const WideFloat high = wide::two_sum(a.hi, b.hi);
    const WideFloat low = wide::two_sum(a.lo, b.lo);
    const WideFloat carried = wide::normalized(high.hi, high.lo + low.hi);
    return wide::normalized(carried.hi, carried.lo + low.lo);
}

inline WideFloat operator-(WideFloat a, WideFloat b) {
    return a + -b;
}

inline WideFloat operator*(WideFloat a, WideFloat b) {
    const WideFloat product = wide::two_product(a.hi, b.hi);
    return wide::normalized(product.hi, product.lo + (a.hi * b.lo + a.lo * b.hi));
}

inline WideFloat operator/(WideFloat a, WideFloat b) {
    // Long division with doubles as digits.
    const double first = a.hi / b.hi;
    const WideFloat rest = a - b * first;
    const double second = rest.hi / b.hi;
    const double third = (rest - b * second).hi / b.hi;
    return wide::normalized(first, second) + third;
}

inline bool operator<(WideFloat a, WideFloat b) {
    return a.hi < b.hi || (a.hi == b.hi && a.lo < b.lo);
}

namespace wide {

inline WideFloat exp(WideFloat x) {
    if (x.hi < -700.0) return 0.0;
    // x = k ln2 + 512 r, with r small enough for 12 terms of the series; then square nine times.
    const double k = std::nearbyint(x.hi / ln2.hi);
    const WideFloat r = (x - ln2 * k) * (1.0 / 512.0);
    WideFloat term = r;
    WideFloat sum = r;
    for (int n = 2; n <= 12; ++n) {
        term = term * r / static_cast<double>(n);
        sum = sum + term;
    }
    // Squaring exp(r) - 1 instead of exp(r) keeps the low bits that adding 1 would drop.
    for (int n = 0; n < 9; ++n) sum = sum * 2.0 + sum * sum;
    const WideFloat result = sum + 1.0;
    const int exponent = static_cast<int>(k);
    return {std::ldexp(result.hi, exponent), std::ldexp(result.lo, exponent)};
}

inline WideFloat log(WideFloat x) {
    // Split off the exponent of very large and small x, where exp(-y) below would overflow or underflow.
    if (x.hi > 0x1p500 || x.hi < 0x1p-500) {
        const int exponent = std::ilogb(x.hi);
        return log({std::scalbn(x.hi, -exponent), std::scalbn(x.lo, -exponent)}) + ln2 * exponent;
    }
    // Each Newton step on exp doubles the 53 correct bits; two give more than 106.
    WideFloat y = std::log(x.hi);
    for (int n = 0; n < 2; ++n) y = y + (x * exp(-y) - 1.0);
    return y;
}

inline WideFloat pow(WideFloat x, WideFloat exponent) {
    return exp(exponent * log(x));
}

// `radians` in revolutions, modulo 1, rounded to the nearest multiple of 2^-64.
inline uint64_t phase_step(WideFloat radians) {
    constexpr double two_to_32 = 4294967296.0;
    const WideFloat revolutions = radians / two_pi;
    WideFloat fraction = revolutions - std::floor(revolutions.hi);
    fraction = fraction - std::floor(fraction.hi);  // beyond 2^53 revolutions lo holds whole ones, too
    if (fraction < 0.0) fraction = fraction + 1.0;

    const WideFloat scaled = fraction * two_to_32;
    double top = std::floor(scaled.hi);
    if (scaled.hi == top && scaled.lo < 0.0) top -= 1.0;
    const WideFloat rest = (scaled - top) * two_to_32;
    const double whole = std::floor(rest.hi);
    const double remainder = (rest.hi - whole) + rest.lo;
    return (static_cast<uint64_t>(top) << 32) + static_cast<uint64_t>(whole) +
           static_cast<uint64_t>(static_cast<int64_t>(std::floor(remainder + 0.5)));
}

}  // namespace wide
}  // namespace mrrope
