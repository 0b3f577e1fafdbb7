#include "mrrope/float8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "float8_elements.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr float infinity = std::numeric_limits<float>::infinity();

void expect_nearest(float x) {
    ASSERT_EQ(static_cast<int>(float8_e4m3_bits(x)), static_cast<int>(nearest_float8(x))) << x;
}

TEST(Float8, KeepsWhatItCanHold) {
    for (int bits = 0; bits < 256; ++bits) {
        const double value = value_of_float8(static_cast<uint8_t>(bits));
        if (std::isnan(value)) continue;
        EXPECT_EQ(static_cast<int>(float8_e4m3_bits(static_cast<float>(value))), bits) << value;
    }
}

TEST(Float8, RoundsToTheNearestAndTiesToEven) {
    for (int bits = 0; bits < 0x7e; ++bits) {
        const double below = value_of_float8(static_cast<uint8_t>(bits));
        const double above = value_of_float8(static_cast<uint8_t>(bits + 1));
        const auto middle = static_cast<float>((below + above) / 2);
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

TEST(Float8, SaturatesAndKeepsNaN) {
    for (const float x : {448.0f, 463.99f, 464.0f, 480.0f, 1e10f, std::numeric_limits<float>::max(), infinity}) {
        EXPECT_EQ(float8_e4m3_bits(x), 0x7e) << x;
        EXPECT_EQ(float8_e4m3_bits(-x), 0xfe) << x;
    }
    EXPECT_EQ(float8_e4m3_bits(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
    EXPECT_EQ(float8_e4m3_bits(0.0f), 0x00);
    EXPECT_EQ(float8_e4m3_bits(-0.0f), 0x80);
}

// The result must not depend on the last bits of the reciprocal.
TEST(Float8, ScalesAsDivisionDoes) {
    std::mt19937 random(2);
    std::uniform_real_distribution<float> exponents(-8.0f, 8.0f);
    for (int i = 0; i < 200000; ++i) {
        const float scale = std::exp2(exponents(random));
        const float any = scale * 600.0f * std::sin(static_cast<float>(i));
        // The float nearest to the midpoint of two float8 values.
        const int bits = static_cast<int>(random() % 0x7e);
        const double below = value_of_float8(static_cast<uint8_t>(bits));
        const double above = value_of_float8(static_cast<uint8_t>(bits + 1));
        const auto tie = static_cast<float>((below + above) / 2 * scale);
        for (const float x : {any, tie, -tie, std::nextafter(tie, 0.0f), std::nextafter(tie, infinity)}) {
            const float reciprocal = 1.0f / scale;
            for (const float r : {reciprocal, std::nextafter(reciprocal, 0.0f), std::nextafter(reciprocal, infinity)}) {
                const Float8Scale by{scale, r};
                ASSERT_EQ(float8_e4m3_bits(by.divide(x)), float8_e4m3_bits(x / scale)) << x << " / " << scale;
            }
        }
    }
}

TEST(Float8, ScaledInfinityAndNaNStayThat) {
    for (const float scale : {0.01f, 1.0f, 100.0f}) {
        const Float8Scale by{scale, 1.0f / scale};
        EXPECT_EQ(float8_e4m3_bits(by.divide(infinity)), 0x7e);
        EXPECT_EQ(float8_e4m3_bits(by.divide(-infinity)), 0xfe);
        EXPECT_EQ(float8_e4m3_bits(by.divide(std::numeric_limits<float>::max())), 0x7e);
        EXPECT_TRUE(std::isnan(by.divide(std::numeric_limits<float>::quiet_NaN())));
    }
}

}  // namespace
}  // namespace mrrope
