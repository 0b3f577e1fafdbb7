#include "mrrope/float8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "float8_elements.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr float infinity = std::numeric_limits<float>::infinity();

class Float8 : public ::testing::TestWithParam<StoredAs> {
protected:
    StoredAs format() const { return GetParam(); }
    double value_of(int bits) const { return value_of_float8(static_cast<uint8_t>(bits), format()); }
    int largest_bits() const { return float8_format(format()).largest_bits; }
    int bits_of(float x) const { return float8_bits(x, format()); }
    void expect_nearest(float x) const { ASSERT_EQ(bits_of(x), static_cast<int>(nearest_float8(x, format()))) << x; }
};

INSTANTIATE_TEST_SUITE_P(, Float8, ::testing::ValuesIn(both_float8),
                         [](const auto& info) { return info.param == StoredAs::float8_e5m2 ? "e5m2" : "e4m3"; });

TEST_P(Float8, KeepsWhatItCanHold) {
    for (int bits = 0; bits < 256; ++bits) {
        if (!std::isfinite(value_of(bits))) continue;
        EXPECT_EQ(bits_of(static_cast<float>(value_of(bits))), bits) << value_of(bits);
    }
}

TEST_P(Float8, RoundsToTheNearestAndTiesToEven) {
    for (int bits = 0; bits < largest_bits(); ++bits) {
        const auto middle = static_cast<float>((value_of(bits) + value_of(bits + 1)) / 2);
        for (const float sign : {1.0f, -1.0f}) {
            expect_nearest(sign * middle);
            expect_nearest(sign * std::nextafter(middle, 0.0f));
            expect_nearest(sign * std::nextafter(middle, infinity));
        }
    }
    std::mt19937 random(1);
    for (int i = 0; i < 100000 && !HasFatalFailure(); ++i) {
        const auto bits = static_cast<uint32_t>(random());
        const float x = std::bit_cast<float>(bits);
        if (!std::isnan(x)) expect_nearest(x);
        expect_nearest(std::ldexp(static_cast<float>(static_cast<int32_t>(bits)), -22));
    }
}

TEST_P(Float8, SaturatesAndKeepsNaN) {
    EXPECT_EQ(Float8Range::of(format()).largest, largest_finite(format()));
    const auto largest = static_cast<float>(largest_finite(format()));
    for (const float x : {largest, largest * 1.035f, largest * 1.0625f, largest * 1.1f, 1e10f, FLT_MAX, infinity}) {
        EXPECT_EQ(bits_of(x), largest_bits()) << x;
        EXPECT_EQ(bits_of(-x), largest_bits() | 0x80) << x;
    }
    EXPECT_EQ(bits_of(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
    EXPECT_EQ(bits_of(0.0f), 0x00);
    EXPECT_EQ(bits_of(-0.0f), 0x80);
}

// The result must not depend on the last bits of the reciprocal.
TEST_P(Float8, ScalesAsDivisionDoes) {
    std::mt19937 random(2);
    std::uniform_real_distribution<float> exponents(-8.0f, 8.0f);
    for (int i = 0; i < 200000; ++i) {
        const float scale = std::exp2(exponents(random));
        const float any = scale * 1.4f * Float8Range::of(format()).largest * std::sin(static_cast<float>(i));
        // The float nearest to the midpoint of two float8 values.
        const int bits = static_cast<int>(random() % largest_bits());
        const auto tie = static_cast<float>((value_of(bits) + value_of(bits + 1)) / 2 * scale);
        for (const float x : {any, tie, -tie, std::nextafter(tie, 0.0f), std::nextafter(tie, infinity)}) {
            const float reciprocal = 1.0f / scale;
            for (const float r : {reciprocal, std::nextafter(reciprocal, 0.0f), std::nextafter(reciprocal, infinity)}) {
                const Float8Scale by{scale, r};
                ASSERT_EQ(bits_of(by.divide(x)), bits_of(x / scale)) << x << " / " << scale;
            }
        }
    }
}

TEST_P(Float8, ScaledInfinityAndNaNStayThat) {
    for (const float scale : {0.01f, 1.0f, 100.0f}) {
        const Float8Scale by{scale, 1.0f / scale};
        EXPECT_EQ(bits_of(by.divide(infinity)), largest_bits());
        EXPECT_EQ(bits_of(by.divide(-infinity)), largest_bits() | 0x80);
        EXPECT_EQ(bits_of(by.divide(FLT_MAX)), largest_bits());
        EXPECT_TRUE(std::isnan(by.divide(std::numeric_limits<float>::quiet_NaN())));
    }
}

TEST(Float8Scales, FromTheSmallestNormalToTheLargestWithANormalInverse) {
    for (const float scale : {0x1p-126f, 1.0f, -1.0f, 0x1p126f}) {
        EXPECT_TRUE(is_float8_scale(scale)) << scale;
        EXPECT_EQ(nan_unless_float8_scale(scale, 3.0f), 3.0f) << scale;
    }
    for (const float scale : {0.0f, 0x1p-127f, FLT_TRUE_MIN, 0x1.000002p126f, 0x1p127f, FLT_MAX, infinity,
                              std::numeric_limits<float>::quiet_NaN()}) {
        EXPECT_FALSE(is_float8_scale(scale)) << scale;
        EXPECT_TRUE(std::isnan(nan_unless_float8_scale(scale, 3.0f))) << scale;
    }
}

TEST_P(Float8, TheComputedScaleMapsTheLargestMagnitudeToTheLargestValue) {
    std::mt19937 random(3);
    for (int i = 0; i < 100000; ++i) {
        const float x = std::abs(std::bit_cast<float>(static_cast<uint32_t>(random())));
        if (!std::isfinite(x)) continue;
        const float scale = Float8Range::of(format()).scale_of(x);
        const double exact = std::fmax(static_cast<double>(x) / largest_finite(format()), 0x1p-126);
        ASSERT_LE(std::abs(scale - exact), exact * 0x1p-24) << x;  // correctly rounded
        const Float8Scale by{scale, 1.0f / scale};
        if (scale > FLT_MIN) {
            ASSERT_EQ(bits_of(by.divide(x)), largest_bits()) << x;
        }
    }
}

TEST_P(Float8, TheComputedScaleAndItsInverseAreFinite) {
    for (const float x : {0.0f, FLT_TRUE_MIN, FLT_MIN, FLT_MAX, infinity}) {
        const float scale = Float8Range::of(format()).scale_of(x);
        EXPECT_TRUE(std::isfinite(scale) && std::isfinite(1.0f / scale)) << x;
        const Float8Scale by{scale, 1.0f / scale};
        EXPECT_EQ(bits_of(by.divide(0.0f)), 0);
        EXPECT_LE(bits_of(by.divide(x)), largest_bits()) << x;
    }
    for (const float x : {0.0f, FLT_TRUE_MIN, std::numeric_limits<float>::quiet_NaN()}) {
        EXPECT_EQ(Float8Range::of(format()).scale_of(x), FLT_MIN) << x;
    }
}

}  // namespace
}  // namespace mrrope
