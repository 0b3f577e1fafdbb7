#include "mrrope/rotation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <random>
#include <vector>

namespace mrrope {
namespace {

constexpr uint64_t full_circle_eighths = 8;

// --- cosine and sine ---

// The reference is double: 2^29 times finer than float, and the sweep takes seconds instead of minutes.
struct FloatError {
    double worst = 0.0;
    uint32_t at = 0;

    void look_at(uint32_t phase) {
        const CosSin<float> actual = cos_sin(phase);
        const double angle = static_cast<int32_t>(phase) * (2.0 * std::numbers::pi * 0x1p-32);
        const double error = std::max(std::abs(actual.cos - std::cos(angle)), std::abs(actual.sin - std::sin(angle)));
        if (!(error <= worst)) {
            worst = error;
            at = phase;
        }
    }
};

// The worst error over all 2^32 phases is 1.0302e-7 with FMA and 1.056e-7 without: 3.5 times half an ulp of a number
// below 1.
constexpr double float_bound = 1.06e-7;

TEST(CosSinFloat, IsRightAllAroundTheCircle) {
    FloatError error;
    for (uint64_t phase = 0; phase < (uint64_t{1} << 32); phase += 127) error.look_at(static_cast<uint32_t>(phase));
    EXPECT_LT(error.worst, float_bound) << "at phase " << error.at;
}

TEST(CosSinFloat, IsRightAroundEveryEighthOfACircle) {
    FloatError error;
    for (uint32_t eighth = 0; eighth < full_circle_eighths; ++eighth) {
        for (int32_t off = -20000; off <= 20000; ++off) error.look_at((eighth << 29) + off);
    }
    EXPECT_LT(error.worst, float_bound) << "at phase " << error.at;
}

TEST(CosSinFloat, IsExactAtQuarters) {
    const CosSin<float> quarters[] = {{1, 0}, {0, 1}, {-1, 0}, {0, -1}};
    for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        const CosSin<float> actual = cos_sin(quarter << 30);
        EXPECT_EQ(actual.cos, quarters[quarter].cos) << quarter;
        EXPECT_EQ(actual.sin, quarters[quarter].sin) << quarter;
    }
}

// Small angles distinguish nearby positions, so a small sine must be right to a few of its own ulp.
TEST(CosSinFloat, KeepsTheDigitsOfSmallSines) {
    for (int32_t phase = 1; phase < (1 << 28); phase += 1 + phase / 64) {
        const double sine = std::sin(phase * (2.0 * std::numbers::pi * 0x1p-32));
        ASSERT_NEAR(cos_sin(static_cast<uint32_t>(phase)).sin / sine, 1.0, 2e-7) << phase;
        ASSERT_EQ(cos_sin(static_cast<uint32_t>(-phase)).sin, -cos_sin(static_cast<uint32_t>(phase)).sin) << phase;
        ASSERT_EQ(cos_sin(static_cast<uint32_t>(-phase)).cos, cos_sin(static_cast<uint32_t>(phase)).cos) << phase;
    }
}

struct DoubleError {
    long double worst = 0.0L;
    uint64_t at = 0;

    void look_at(uint64_t phase) {
        const CosSin<double> actual = cos_sin(phase);
        const long double angle = static_cast<int64_t>(phase) * (2 * std::numbers::pi_v<long double> * 0x1p-64L);
        const long double error =
            std::max(std::abs(actual.cos - std::cos(angle)), std::abs(actual.sin - std::sin(angle)));
        if (!(error <= worst)) {
            worst = error;
            at = phase;
        }
    }
};

constexpr long double double_bound = 2.3e-16L;

TEST(CosSinDouble, IsRightAllAroundTheCircle) {
    DoubleError error;
    constexpr int samples = 200000;
    for (uint64_t n = 0; n < samples; ++n) error.look_at(n * (~uint64_t{0} / samples));
    EXPECT_LT(error.worst, double_bound) << "at phase " << error.at;
}

TEST(CosSinDouble, IsRightAroundEveryEighthOfACircle) {
    DoubleError error;
    for (uint64_t eighth = 0; eighth < full_circle_eighths; ++eighth) {
        for (int64_t off = -500; off <= 500; ++off) {
            error.look_at((eighth << 61) + off);
            error.look_at((eighth << 61) + (off << 40));
        }
    }
    EXPECT_LT(error.worst, double_bound) << "at phase " << error.at;
}

TEST(CosSinDouble, IsExactAtQuarters) {
    const CosSin<double> quarters[] = {{1, 0}, {0, 1}, {-1, 0}, {0, -1}};
    for (uint64_t quarter = 0; quarter < 4; ++quarter) {
        const CosSin<double> actual = cos_sin(quarter << 62);
        EXPECT_EQ(actual.cos, quarters[quarter].cos) << quarter;
        EXPECT_EQ(actual.sin, quarters[quarter].sin) << quarter;
    }
}

// --- phases ---

uint64_t exact_phase(int64_t position, uint64_t phase_step) {
    // The product modulo 2^64, in two halves so that 128 bits do not overflow.
    constexpr __int128 circle = static_cast<__int128>(1) << 64;
    const __int128 low = static_cast<__int128>(position) * static_cast<int64_t>(phase_step & 0xffffffffu);
    const __int128 high = static_cast<__int128>(position) * static_cast<int64_t>(phase_step >> 32) % (circle >> 32);
    __int128 phase = (low + high * (static_cast<__int128>(1) << 32)) % circle;
    if (phase < 0) phase += circle;
    return static_cast<uint64_t>(phase);
}

TEST(Phase, WrapsExactlyAtEveryPosition) {
    std::vector<int64_t> positions{0,
                                   1,
                                   -1,
                                   2,
                                   -2,
                                   std::numeric_limits<int32_t>::max(),
                                   std::numeric_limits<int32_t>::min(),
                                   std::numeric_limits<int64_t>::max(),
                                   std::numeric_limits<int64_t>::min(),
                                   std::numeric_limits<int64_t>::max() - 1,
                                   std::numeric_limits<int64_t>::min() + 1};
    std::vector<uint64_t> phase_steps{0, 1, 2, 2935890503282001226u, uint64_t{1} << 63, ~uint64_t{0}, 450501533306u};
    std::mt19937_64 random(11);
    for (int n = 0; n < 200; ++n) {
        positions.push_back(static_cast<int64_t>(random()));
        positions.push_back(static_cast<int64_t>(random() >> 33) - (int64_t{1} << 30));
        phase_steps.push_back(random());
    }
    for (const int64_t position : positions) {
        for (const uint64_t step : phase_steps) {
            ASSERT_EQ(phase_of(position, step), exact_phase(position, step)) << position << " * " << step;
        }
    }
}

TEST(Phase, OfSumsIsTheSumOfPhases) {
    std::mt19937_64 random(12);
    for (int n = 0; n < 1000; ++n) {
        const auto a = static_cast<int64_t>(random()) / 2;
        const auto b = static_cast<int64_t>(random()) / 2;
        const uint64_t step = random();
        EXPECT_EQ(phase_of(a + b, step), phase_of(a, step) + phase_of(b, step));
        EXPECT_EQ(phase_of(-a, step), -phase_of(a, step));
    }
}

// --- rotation ---

template <class Real>
class Rotation : public ::testing::Test {
protected:
    static constexpr Real epsilon = std::numeric_limits<Real>::epsilon();
    std::mt19937_64 random_{13};
    std::normal_distribution<Real> normal_;

    Pair<Real> random_pair() { return {normal_(random_), normal_(random_)}; }
    static Real norm(Pair<Real> x) { return std::hypot(x.first, x.second); }
};

using Reals = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Rotation, Reals);

TYPED_TEST(Rotation, PreservesTheNorm) {
    for (int n = 0; n < 20000; ++n) {
        const Pair<TypeParam> x = this->random_pair();
        const Pair<TypeParam> rotated = rotate(x, scaled_cos_sin(this->random_(), TypeParam(1), TypeParam(1)));
        ASSERT_NEAR(this->norm(rotated) / this->norm(x), TypeParam(1), 3 * this->epsilon);
    }
}

TYPED_TEST(Rotation, IsByTheAngleOfThePhase) {
    for (int n = 0; n < 2000; ++n) {
        const Pair<TypeParam> x = this->random_pair();
        const uint64_t phase = this->random_();
        const long double angle = static_cast<int64_t>(phase) * (2 * std::numbers::pi_v<long double> * 0x1p-64L);
        const Pair<TypeParam> rotated = rotate(x, scaled_cos_sin(phase, TypeParam(1), TypeParam(1)));
        const TypeParam slack = 3 * this->epsilon * this->norm(x);
        ASSERT_NEAR(rotated.first, x.first * std::cos(angle) - x.second * std::sin(angle), slack);
        ASSERT_NEAR(rotated.second, x.second * std::cos(angle) + x.first * std::sin(angle), slack);
    }
}

TYPED_TEST(Rotation, ByAQuarterIsExact) {
    const Pair<TypeParam> x{3, 4};
    const Pair<TypeParam> rotated = rotate(x, scaled_cos_sin(uint64_t{1} << 62, TypeParam(1), TypeParam(1)));
    EXPECT_EQ(rotated.first, -4);
    EXPECT_EQ(rotated.second, 3);
}

TYPED_TEST(Rotation, GainMultipliesAndDirectionNegatesTheAngle) {
    for (int n = 0; n < 2000; ++n) {
        const uint64_t phase = this->random_();
        const CosSin<TypeParam> unit = scaled_cos_sin(phase, TypeParam(1), TypeParam(1));
        const CosSin<TypeParam> forth = scaled_cos_sin(phase, TypeParam(1.25), TypeParam(1));
        const CosSin<TypeParam> back = scaled_cos_sin(phase, TypeParam(1.25), TypeParam(-1));
        ASSERT_EQ(forth.cos, TypeParam(1.25) * unit.cos);
        ASSERT_EQ(forth.sin, TypeParam(1.25) * unit.sin);
        ASSERT_EQ(back.cos, forth.cos);
        ASSERT_EQ(back.sin, -forth.sin);
    }
}

TYPED_TEST(Rotation, BackUndoesForth) {
    for (int n = 0; n < 2000; ++n) {
        const Pair<TypeParam> x = this->random_pair();
        const uint64_t phase = this->random_();
        const Pair<TypeParam> there = rotate(x, scaled_cos_sin(phase, TypeParam(1), TypeParam(1)));
        const Pair<TypeParam> again = rotate(there, scaled_cos_sin(phase, TypeParam(1), TypeParam(-1)));
        const TypeParam slack = 4 * this->epsilon * this->norm(x);
        ASSERT_NEAR(again.first, x.first, slack);
        ASSERT_NEAR(again.second, x.second, slack);
    }
}

}  // namespace
}  // namespace mrrope
