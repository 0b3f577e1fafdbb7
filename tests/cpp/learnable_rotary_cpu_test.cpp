#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <random>
#include <vector>

#include "learnable_rotary_case.h"
#include "mrrope/learnable_rotary.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void in_one_range(int64_t count, int64_t, const RangeBody& body) {
    if (count > 0) body(0, count);
}

void one_by_one_backwards(int64_t count, int64_t, const RangeBody& body) {
    for (int64_t i = count; i-- > 0;) body(i, i + 1);
}

void differentiate(LearnableCase& call, const ParallelFor& parallel_for = in_one_range) {
    call.pack_tables();
    LearnableRotaryGradientArgs args = call.gradient_args();
    std::vector<double> sums = call.partial_sums(table_sum_rows_cpu(args));
    args.table_sums = sums.data();
    learnable_rotary_gradient_cpu(args, parallel_for);
}

// --- phase steps

// In 2^-64 revolutions, from -2^63 to 2^63.
long double exact_step(double radians) {
    const long double turns = static_cast<long double>(radians) / (2 * std::numbers::pi_v<long double>);
    return std::ldexp(turns - std::round(turns), 64);
}

TEST(PhaseStep, IsTheNearest) {
    std::mt19937_64 random(1);
    std::uniform_real_distribution<double> exponent(-60.0, 12.0);
    for (int i = 0; i < 100000; ++i) {
        const double radians = std::exp2(exponent(random)) * (random() % 2 == 0 ? 1 : -1);
        const long double turns = std::abs(radians) / (2 * std::numbers::pi_v<long double>);
        // Half a step, and the reference's own rounding: on x86 a long double has 64 bits, and up to 2^10 revolutions
        // are subtracted.
        const long double allowed = 0.5L + 1e-6L + 4 * std::ldexp(std::max(turns, 0.5L), 64 - LDBL_MANT_DIG);
        const long double error =
            static_cast<long double>(static_cast<int64_t>(phase_step_of(radians))) - exact_step(radians);
        ASSERT_LE(std::abs(std::remainder(error, std::ldexp(1.0L, 64))), allowed) << radians;
    }
}

TEST(PhaseStep, OfFrequenciesThatAreRevolutions) {
    EXPECT_EQ(phase_step_of(0.0), 0u);
    EXPECT_EQ(phase_step_of(-0.0), 0u);
    // The double nearest to pi is less than pi by 1.22e-16, or 360 steps of 2^-64 revolutions.
    EXPECT_EQ(phase_step_of(std::numbers::pi), (uint64_t{1} << 63) - 360);
    EXPECT_EQ(phase_step_of(-std::numbers::pi), (uint64_t{1} << 63) + 360);
    EXPECT_EQ(phase_step_of(2 * std::numbers::pi), 0 - uint64_t{719});
    for (const double wrong : {0x1p50, -0x1p50, HUGE_VAL, -HUGE_VAL, std::nan("")}) EXPECT_FALSE(is_frequency(wrong));
    EXPECT_TRUE(is_frequency(-0x1.fffffffffffffp49));
}

TEST(PhaseStep, FactorsThatCannotBePackedAreNan) {
    for (const double factor : {0.0, 5e-324, 1.0, 1.7, HUGE_VAL}) {
        EXPECT_EQ(factor_of(attention_factor_word(factor, true)), factor);
        EXPECT_TRUE(std::isnan(factor_of(attention_factor_word(factor, false))));
    }
    EXPECT_EQ(factor_of(attention_factor_word(-0.0, true)), 0.0);
    for (const double factor : {-5e-324, -1.0, -HUGE_VAL, std::nan(""), -std::nan("")}) {
        EXPECT_TRUE(std::isnan(factor_of(attention_factor_word(factor, true)))) << factor;
    }
}

// --- the op

TEST(LearnableRotaryCpu, RandomCalls) {
    for (uint64_t seed = 0; seed < 300; ++seed) {
        LearnableCase call(random_learnable_options(seed));
        learnable_rotary_cpu(call.args(), in_one_range);
        call.expect_rotated();
        if (HasFailure()) return;
    }
}

TEST(LearnableRotaryCpu, RandomGradients) {
    for (uint64_t seed = 1000; seed < 1300; ++seed) {
        LearnableCase call(random_learnable_options(seed));
        differentiate(call);
        call.expect_gradients();
        if (HasFailure()) return;
    }
}

TEST(LearnableRotaryCpu, HeadsWiderThanATileOfPairs) {
    for (const Pairing pairing : both_pairings) {
        LearnableCaseOptions o;
        o.rotary.pairing = pairing;
        o.rotary.head_dim = 700;
        o.rotary.rotary_dim = 640;
        LearnableCase forward(o);
        learnable_rotary_cpu(forward.args());
        forward.expect_rotated();
        LearnableCase backward(o);
        differentiate(backward);
        backward.expect_gradients();
    }
}

TEST(LearnableRotaryCpu, GradientsDoNotDependOnTheThreads) {
    LearnableCaseOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.tokens = 301;
    o.rotary.q_heads = 4;
    o.rotary.k_heads = 2;
    o.tables = 2;
    LearnableCase first(o), second(o), third(o);
    differentiate(first);
    differentiate(second, one_by_one_backwards);
    differentiate(third, on_all_cores);
    for (const LearnableCase* other : {&second, &third}) {
        EXPECT_EQ(other->frequency_gradients.bytes, first.frequency_gradients.bytes);
        EXPECT_EQ(other->factor_gradients.bytes, first.factor_gradients.bytes);
    }
}

TEST(LearnableRotaryCpu, AFactorOfZeroHasAGradient) {
    LearnableCaseOptions o;
    LearnableCase call(o);
    call.factors.set(0, 0.0);
    differentiate(call);
    call.expect_gradients();
    EXPECT_NE(call.factor_gradients.at(0), 0.0);
}

TEST(LearnableRotaryCpu, WhatIsNoFrequencyGivesNan) {
    for (const double wrong : {HUGE_VAL, std::nan("")}) {
        LearnableCase call(LearnableCaseOptions{});
        call.frequencies.set(3, wrong);
        learnable_rotary_cpu(call.args());
        EXPECT_TRUE(std::isnan(element_at(DType::float32, call.rotary().q().out.head(0, 0, 0) + 3 * 4)));
    }
}

TEST(LearnableRotaryCpu, ANegativeFactorGivesNan) {
    LearnableCase call(LearnableCaseOptions{});
    call.factors.set(0, -0.5);
    learnable_rotary_cpu(call.args());
    EXPECT_TRUE(std::isnan(element_at(DType::float32, call.rotary().q().out.head(0, 0, 0))));
    differentiate(call);
    EXPECT_TRUE(std::isnan(element_at(DType::float32, call.rotary().q().out.head(0, 0, 0))));
    EXPECT_TRUE(std::isnan(call.frequency_gradients.at(0)));
}

TEST(LearnableRotaryCpu, NothingToRotateHasNoGradient) {
    LearnableCaseOptions o;
    o.rotary.tokens = 0;
    LearnableCase call(o);
    call.frequency_gradients.set(0, 7.0);
    differentiate(call);
    for (int i = 0; i < call.half(); ++i) EXPECT_EQ(call.frequency_gradients.at(i), 0.0);
    EXPECT_EQ(call.factor_gradients.at(0), 0.0);
}

}  // namespace
}  // namespace mrrope
