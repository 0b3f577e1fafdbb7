#include "mrrope/frequency_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <vector>

#include "table_requests.h"

namespace mrrope {
namespace {

using Real = long double;

Real plain_frequency(const TableRequest& request, int i) {
    return std::pow(Real(request.base), Real(-2 * i) / request.rotary_dim);
}

Real rotations(const TableRequest& request, Real pair) {
    const Real theta = std::pow(Real(request.base), -2 * pair / request.rotary_dim);
    return request.original_max_position * theta / (2 * std::numbers::pi_v<Real>);
}

using ScaleOfPair = std::function<Real(int)>;

void expect_scales(const TableRequest& request, const ScaleOfPair& expected) {
    // One rounding to double, and the error of an 80-bit long double power.
    constexpr Real tolerance = 1.13e-16L;
    const FrequencyTable table = build_table(request);
    ASSERT_EQ(table.inv_freq.size(), static_cast<size_t>(request.rotary_dim / 2));
    ASSERT_EQ(table.cumulative_scale.size(), table.inv_freq.size());
    ASSERT_EQ(table.turns.size(), table.inv_freq.size());
    for (int i = 0; i < table.pairs(); ++i) {
        SCOPED_TRACE(std::string(method_name(request.method)) + ", pair " + std::to_string(i));
        const Real scale = expected(i);
        const Real frequency = plain_frequency(request, i) / scale;
        EXPECT_LE(std::abs(table.cumulative_scale[i] - scale), tolerance * scale)
            << table.cumulative_scale[i] << " for " << static_cast<double>(scale);
        EXPECT_LE(std::abs(table.inv_freq[i] - frequency), tolerance * frequency)
            << table.inv_freq[i] << " for " << static_cast<double>(frequency);
        const Real revolutions = std::ldexp(static_cast<Real>(table.turns[i]), -64);
        const Real wanted = frequency / (2 * std::numbers::pi_v<Real>);
        EXPECT_LE(std::abs(revolutions - (wanted - std::floor(wanted))), 1e-18L * std::max<Real>(1, wanted))
            << table.turns[i];
    }
    EXPECT_NO_THROW(validate(table));
}

Real yarn_mix(Real ramp, Real scale) {
    return 1 / (ramp / scale + (1 - ramp));
}

// --- methods ---

TEST(Methods, RopeKeepsEveryFrequency) {
    expect_scales(llama(Method::rope), [](int) { return 1; });
}

TEST(Methods, PiSlowsEveryPairByTheScale) {
    expect_scales(llama(Method::pi), [](int) { return 16; });
}

TEST(Methods, NtkRaisesTheBase) {
    expect_scales(llama(Method::ntk), [](int i) { return std::pow(Real(16), Real(2 * i) / 126); });
    const TableRequest request = llama(Method::ntk);
    const FrequencyTable table = build_table(request);
    const Real raised_base = request.base * std::pow(Real(16), Real(128) / 126);
    EXPECT_NEAR(table.inv_freq[40], static_cast<double>(std::pow(raised_base, Real(-80) / 128)), 1e-19);
    EXPECT_DOUBLE_EQ(table.cumulative_scale.back(), 16.0);
}

TEST(Methods, YarnRampsOverThePairIndex) {
    expect_scales(llama(Method::yarn),
                  [](int i) { return yarn_mix(std::clamp((i - 18) / Real(17), Real(0), Real(1)), 16); });
    EXPECT_EQ(build_table(llama(Method::yarn)).bounds, Bounds(18, 35));
}

TEST(Methods, YarnRatioRampsOverTheRotations) {
    const TableRequest request = llama(Method::yarn_ratio);
    expect_scales(request, [&](int i) {
        return yarn_mix(std::clamp((32 - rotations(request, i)) / Real(31), Real(0), Real(1)), 16);
    });
}

TEST(Methods, YarnRatioTakesBoundsAsTheRotationsOfThosePairs) {
    const TableRequest request = with_bounds(llama(Method::yarn_ratio), {10, 30});
    const Real fast = rotations(request, 10);
    const Real slow = rotations(request, 30);
    expect_scales(request, [&](int i) {
        if (i <= 10) return Real(1);
        if (i >= 30) return Real(16);
        return yarn_mix((fast - rotations(request, i)) / (fast - slow), 16);
    });
}

TEST(Methods, Llama3IsTheRatioRampWithoutTemperature) {
    TableRequest request = llama(Method::llama3, 8.0);
    request.beta = 4.0;
    expect_scales(request, [&](int i) {
        const Real wavelength = 2 * std::numbers::pi_v<Real> / plain_frequency(request, i);
        const Real length = request.original_max_position;
        if (wavelength < length / 4) return Real(1);
        if (wavelength > length / 1) return Real(8);
        const Real smooth = (length / wavelength - 1) / (4 - 1);
        return 1 / ((1 - smooth) / 8 + smooth);
    });
    EXPECT_EQ(build_table(request).attention_factor, 1.0);
}

TEST(Methods, MrropeUniSpreadsTheScaleEvenly) {
    expect_scales(llama(Method::mrrope_uni),
                  [](int i) { return std::pow(Real(16), std::clamp(i - 18, 0, 17) / Real(17)); });
}

TEST(Methods, MrropeProSpreadsTheScaleProgressively) {
    expect_scales(llama(Method::mrrope_pro), [](int i) {
        const int k = std::clamp(i - 18, 0, 17);
        return std::pow(Real(16), Real(k * (k + 1)) / (17 * 18));
    });
}

TEST(Methods, MrropePowSpreadsTheScaleByAnyPower) {
    for (const double power : {2.0, 0.5, -0.5, 1.75, -3.0, 10.0, 1e-9}) {
        SCOPED_TRACE(power);
        expect_scales(with_power(llama(Method::mrrope_pow), power), [&](int i) {
            Real below = 0;
            Real all = 0;
            for (int j = 1; j <= 17; ++j) {
                const Real share = std::pow(Real(j), Real(power));
                all += share;
                if (j <= i - 18) below += share;
            }
            return std::pow(Real(16), below / all);
        });
    }
}

TEST(Methods, PowersZeroAndOneAreUniAndPro) {
    EXPECT_EQ(build_table(with_power(llama(Method::mrrope_pow), 0.0)).turns,
              build_table(llama(Method::mrrope_uni)).turns);
    EXPECT_EQ(build_table(with_power(llama(Method::mrrope_pow), 1.0)).turns,
              build_table(llama(Method::mrrope_pro)).turns);
}

TEST(Methods, RadixMultipliesItsFactors) {
    TableRequest request = llama(Method::radix);
    for (int j = 0; j < 63; ++j) request.factors.push_back(1.0 + j / 640.0);
    expect_scales(request, [&](int i) {
        Real product = 1;
        for (int j = 0; j < i; ++j) product *= request.factors[j];
        return product;
    });
    const FrequencyTable table = build_table(request);
    const std::vector<double> factors = table.radix_factors();
    ASSERT_EQ(factors.size(), 63u);
    for (int j = 0; j < 63; ++j) EXPECT_NEAR(factors[j], request.factors[j], 1e-15);
}

TEST(Methods, LongropeTakesTheCumulativeScalesAsTheyAre) {
    TableRequest request = llama(Method::longrope);
    for (int i = 0; i < 64; ++i) request.factors.push_back(1.0 + i * i / 100.0);
    expect_scales(request, [&](int i) { return request.factors[i]; });
    EXPECT_EQ(build_table(request).cumulative_scale, request.factors);
}

TEST(Methods, RadixFactorsOfATableRebuildIt) {
    const FrequencyTable pro = build_table(llama(Method::mrrope_pro));
    TableRequest request = llama(Method::radix);
    request.factors = pro.radix_factors();
    const FrequencyTable rebuilt = build_table(request);
    for (int i = 0; i < 64; ++i) EXPECT_NEAR(rebuilt.inv_freq[i] / pro.inv_freq[i], 1.0, 1e-14) << i;
}

TEST(Methods, PhaseStepsAreRoundedCorrectly) {
    struct Expected {
        int pair;
        uint64_t rope;
        uint64_t pro;
    };
    // mpmath, 60 digits.
    constexpr Expected expected[] = {
        {0, 2935890503282001226u, 2935890503282001226u},
        {1, 2391627000689282720u, 2391627000689282720u},
        {17, 89939598963010509u, 89939598963010509u},
        {18, 73266347321414578u, 73266347321414578u},
        {19, 59684029189743607u, 58612206206591390u},
        {25, 17441333892503051u, 10500690769312118u},
        {34, 2755256523560537u, 234332845323525u},
        {35, 2244479447788084u, 140279965486755u},
        {63, 7208024532904u, 450501533306u},
    };
    const FrequencyTable rope = build_table(llama(Method::rope));
    const FrequencyTable pro = build_table(llama(Method::mrrope_pro));
    for (const auto& [pair, rope_step, pro_step] : expected) {
        EXPECT_EQ(rope.turns[pair], rope_step) << pair;
        EXPECT_EQ(pro.turns[pair], pro_step) << pair;
    }
}

TEST(Methods, NamesRoundTrip) {
    for (const MethodTraits& traits : methods()) {
        EXPECT_STREQ(method_name(traits.method), traits.name);
        EXPECT_EQ(method_from_name(traits.name), traits.method);
    }
    EXPECT_EQ(methods().size(), static_cast<size_t>(Method::relative));
    EXPECT_EQ(method_from_name("relative"), Method::relative);
    EXPECT_STREQ(method_name(Method::mrrope_pro), "mrrope_pro");
    EXPECT_STREQ(method_name(Method::relative), "relative");
}

// --- attention factor ---

TEST(AttentionFactor, IsTheTemperatureOfYarnAndMrrope) {
    const double temperature = 0.1 * std::log(16.0) + 1.0;
    for (const Method method : {Method::yarn, Method::yarn_ratio, Method::mrrope_uni, Method::mrrope_pro}) {
        EXPECT_DOUBLE_EQ(build_table(llama(method)).attention_factor, temperature) << method_name(method);
    }
    EXPECT_DOUBLE_EQ(build_table(with_power(llama(Method::mrrope_pow), 2.0)).attention_factor, temperature);
    for (const Method method : {Method::rope, Method::pi, Method::ntk, Method::llama3}) {
        EXPECT_EQ(build_table(llama(method)).attention_factor, 1.0) << method_name(method);
    }
    TableRequest longrope = llama(Method::longrope);
    longrope.factors.assign(64, 2.0);
    EXPECT_EQ(build_table(longrope).attention_factor, 1.0);
}

TEST(AttentionFactor, OfTheRequestOverridesTheDefault) {
    for (const Method method : {Method::rope, Method::yarn, Method::mrrope_pro}) {
        TableRequest request = llama(method);
        request.attention_factor = 1.25;
        EXPECT_EQ(build_table(request).attention_factor, 1.25);
    }
}

// --- bounds and edges ---

TEST(Bounds, FollowAlphaAndBeta) {
    const auto pair = [](double length, double rotations, double base, double dim) {
        return dim * std::log(length / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
    };
    TableRequest request = llama(Method::mrrope_pro);
    request.alpha = 2.0;
    request.beta = 20.0;
    const Bounds expected(std::floor(pair(8192, 20, 5e5, 128)), std::ceil(pair(8192, 2, 5e5, 128)));
    EXPECT_EQ(build_table(request).bounds, expected);
    EXPECT_EQ(build_table(with_bounds(request, {3, 5})).bounds, Bounds(3, 5));
}

TEST(Bounds, LowerOneIsClampedToTheFirstPair) {
    TableRequest request{.method = Method::mrrope_uni, .rotary_dim = 64, .original_max_position = 128, .scale = 4};
    const FrequencyTable table = build_table(request);  // no pair makes 32 rotations in 128 tokens
    ASSERT_EQ(table.bounds->first, 0);
    ASSERT_GT(table.bounds->second, 0);
    const Real steps = table.bounds->second;
    expect_scales(request, [&](int i) { return std::pow(Real(4), std::min<Real>(i, steps) / steps); });
}

TEST(Bounds, BothAreClampedWhereNoPairMakesARotation) {
    TableRequest request{.method = Method::yarn, .rotary_dim = 64, .original_max_position = 3, .scale = 4};
    EXPECT_EQ(build_table(request).bounds, Bounds(0, 0));
    expect_scales(request, [](int i) { return i == 0 ? 1 : 4; });
}

TEST(Bounds, UpperOneMayLieBeyondTheLastPair) {
    TableRequest request{
        .method = Method::mrrope_pro, .rotary_dim = 64, .base = 100, .original_max_position = 8192, .scale = 8};
    const FrequencyTable table = build_table(request);
    const auto [low, high] = *table.bounds;
    ASSERT_GT(high, 31);
    ASSERT_LE(high, 63);
    const Real steps = high - low;
    expect_scales(request, [&, low = low](int i) {
        const Real k = std::max(i - low, 0);
        return std::pow(Real(8), k * (k + 1) / (steps * (steps + 1)));
    });
    EXPECT_LT(table.cumulative_scale.back(), 8.0);
}

TEST(Bounds, UpperOneIsClampedToTheRotaryDimension) {
    TableRequest request{
        .method = Method::yarn, .rotary_dim = 64, .base = 1.5, .original_max_position = 1e9, .scale = 8};
    EXPECT_EQ(build_table(request).bounds, Bounds(63, 63));
    expect_scales(request, [](int) { return 1; });
}

TEST(Bounds, BothBeyondTheLastPairKeepEveryFrequency) {
    for (const Method method : {Method::yarn, Method::yarn_ratio, Method::mrrope_uni, Method::mrrope_pro}) {
        expect_scales(with_bounds(llama(method), {64, 100}), [](int) { return 1; });
    }
}

TEST(Bounds, CoincidingOnesMakeOneStep) {
    const auto step = [](int i) { return i <= 20 ? 1 : 16; };
    for (const Method method :
         {Method::yarn, Method::yarn_ratio, Method::llama3, Method::mrrope_uni, Method::mrrope_pro}) {
        expect_scales(with_bounds(llama(method), {20, 20}), step);
    }
    expect_scales(with_power(with_bounds(llama(Method::rope), {20, 20}), -2.5), step);
    expect_scales(with_bounds(llama(Method::mrrope_pro), {0, 0}), [](int i) { return i == 0 ? 1 : 16; });
}

TEST(Edges, ScaleOneIsPlainRope) {
    const FrequencyTable rope = build_table(llama(Method::rope, 1.0));
    for (const Method method : {Method::pi, Method::ntk, Method::yarn, Method::yarn_ratio, Method::mrrope_uni,
                                Method::mrrope_pro, Method::llama3}) {
        const FrequencyTable table = build_table(llama(method, 1.0));
        EXPECT_EQ(table.turns, rope.turns) << method_name(method);
        EXPECT_EQ(table.inv_freq, rope.inv_freq) << method_name(method);
        EXPECT_EQ(table.cumulative_scale, std::vector<double>(64, 1.0)) << method_name(method);
        EXPECT_EQ(table.attention_factor, 1.0) << method_name(method);
    }
}

TEST(Edges, OnePair) {
    for (const Method method : {Method::rope, Method::ntk, Method::yarn, Method::mrrope_uni, Method::mrrope_pro}) {
        const FrequencyTable table =
            build_table({.method = method, .rotary_dim = 2, .original_max_position = 4096, .scale = 4});
        EXPECT_EQ(table.inv_freq, std::vector<double>{1.0}) << method_name(method);
        EXPECT_EQ(table.turns, std::vector<uint64_t>{2935890503282001226u}) << method_name(method);
        EXPECT_TRUE(table.radix_factors().empty());
    }
    EXPECT_EQ(build_table({.method = Method::pi, .rotary_dim = 2, .original_max_position = 4096, .scale = 4}).inv_freq,
              std::vector<double>{0.25});
    EXPECT_EQ(build_table({.method = Method::radix, .rotary_dim = 2, .original_max_position = 9}).turns.size(), 1u);
}

TEST(Edges, ExtremePowersPutTheWholeScaleIntoOneStep) {
    for (const double power : {1000.0, 12345.678, 1e308}) {
        SCOPED_TRACE(power);
        const FrequencyTable late = build_table(with_power(llama(Method::mrrope_pow), power));
        const FrequencyTable early = build_table(with_power(llama(Method::mrrope_pow), -power));
        for (int i = 0; i < 64; ++i) {
            // 16^((16/17)^1000) is 1 to 26 digits.
            EXPECT_DOUBLE_EQ(late.cumulative_scale[i], i < 35 ? 1.0 : 16.0) << i;
            EXPECT_DOUBLE_EQ(early.cumulative_scale[i], i <= 18 ? 1.0 : 16.0) << i;
        }
        EXPECT_NO_THROW(validate(late));
        EXPECT_NO_THROW(validate(early));
    }
}

TEST(Edges, HugeBases) {
    for (const double base : {1e300, 1e305}) {
        TableRequest request = llama(Method::rope);
        request.rotary_dim = 8;
        request.base = base;
        expect_scales(request, [](int) { return 1; });
    }
}

TEST(Edges, FrequenciesAboveOneRevolutionPerPositionWrap) {
    TableRequest request = llama(Method::longrope);
    request.factors.assign(64, 1.0 / 100.0);
    expect_scales(request, [&](int) { return Real(request.factors[0]); });
}

// --- extending native frequencies ---

std::vector<TableRequest> every_method(double scale) {
    std::vector<TableRequest> requests;
    for (const Method method : {Method::rope, Method::pi, Method::ntk, Method::yarn, Method::yarn_ratio,
                                Method::mrrope_uni, Method::mrrope_pro, Method::llama3}) {
        requests.push_back(llama(method, scale));
    }
    requests.push_back(with_power(llama(Method::mrrope_pow, scale), 2.0));
    requests.push_back(with_bounds(llama(Method::yarn_ratio, scale), {10, 30}));
    TableRequest radix = llama(Method::radix, scale);
    for (int i = 0; i < 63; ++i) radix.factors.push_back(1.0 + 0.01 * i);
    requests.push_back(radix);
    return requests;
}

TEST(Native, PlainFrequenciesChangeNothing) {
    for (TableRequest request : every_method(16.0)) {
        const FrequencyTable plain = build_table(request);
        request.native_scale.assign(64, 1.0);
        const FrequencyTable table = build_table(request);
        EXPECT_EQ(table.bounds, plain.bounds) << method_name(request.method);
        EXPECT_EQ(table.turns, plain.turns) << method_name(request.method);
        EXPECT_EQ(table.attention_factor, plain.attention_factor);
    }
}

TEST(Native, AnotherOrderIsKept) {
    for (TableRequest request : every_method(16.0)) {
        const FrequencyTable plain = build_table(request);
        // Pair i has the frequency of pair 63 - i.
        for (int i = 0; i < 64; ++i) {
            request.native_scale.push_back(
                static_cast<double>(plain_frequency(request, i) / plain_frequency(request, 63 - i)));
        }
        const FrequencyTable table = build_table(request);
        EXPECT_EQ(table.bounds, plain.bounds) << method_name(request.method);
        for (int i = 0; i < 64; ++i) {
            EXPECT_NEAR(table.inv_freq[i] / plain.inv_freq[63 - i], 1.0, 1e-14) << method_name(request.method) << i;
        }
    }
}

TEST(Native, BoundsCountRevolutionsOfTheModelsOwnFrequencies) {
    TableRequest request = llama(Method::mrrope_uni, 4.0);
    request.original_max_position = 131072;
    for (int i = 0; i < 64; ++i) request.native_scale.push_back(i < 20 ? 1.0 : 8.0);
    const FrequencyTable table = build_table(request);
    const auto revolutions = [&](int i) {
        return 131072 * plain_frequency(request, i) / request.native_scale[i] / (2 * std::numbers::pi_v<Real>);
    };
    const auto [low, high] = *table.bounds;
    EXPECT_GE(revolutions(low), 32);
    EXPECT_LT(revolutions(low + 1), 32);
    EXPECT_LE(revolutions(high), 1);
    EXPECT_GT(revolutions(high - 1), 1);
    for (int i = 0; i < 64; ++i) {
        const Real share = static_cast<Real>(std::clamp(i - low, 0, high - low)) / (high - low);
        const Real expected = request.native_scale[i] * std::pow(Real(4), share);
        EXPECT_NEAR(table.cumulative_scale[i] / expected, 1.0, 1e-15) << i;
    }
    EXPECT_NO_THROW(validate(table));
}

TEST(Native, AttentionFactorsMultiply) {
    TableRequest request = llama(Method::yarn, 4.0);
    request.native_attention_factor = 1.25;
    EXPECT_DOUBLE_EQ(build_table(request).attention_factor, 1.25 * (0.1 * std::log(4.0) + 1.0));
    request.attention_factor = 1.5;
    EXPECT_EQ(build_table(request).attention_factor, 1.5);
}

// --- relative tables ---

TEST(Relative, IsTheDifferenceOfAngles) {
    const FrequencyTable from = build_table(llama(Method::yarn, 4.0));
    const FrequencyTable to = build_table(llama(Method::mrrope_pro, 16.0));
    const FrequencyTable table = relative(to, from);
    EXPECT_EQ(table.method, Method::relative);
    EXPECT_EQ(table.rotary_dim, 128);
    EXPECT_EQ(table.scale, 4.0);
    EXPECT_DOUBLE_EQ(table.attention_factor, to.attention_factor / from.attention_factor);
    EXPECT_TRUE(table.cumulative_scale.empty());
    EXPECT_TRUE(table.radix_factors().empty());
    EXPECT_FALSE(table.bounds.has_value());
    for (int i = 0; i < 64; ++i) {
        EXPECT_EQ(table.turns[i] + from.turns[i], to.turns[i]);
        EXPECT_NEAR(table.inv_freq[i], to.inv_freq[i] - from.inv_freq[i], 0x1p-52);  // each below 1, each rounded
    }
    EXPECT_NO_THROW(validate(table));
}

TEST(Relative, Composes) {
    const FrequencyTable a = build_table(llama(Method::rope));
    const FrequencyTable b = build_table(llama(Method::yarn));
    const FrequencyTable c = build_table(llama(Method::mrrope_uni));
    const FrequencyTable a_to_b = relative(b, a);
    const FrequencyTable b_to_c = relative(c, b);
    const FrequencyTable a_to_c = relative(c, a);
    for (int i = 0; i < 64; ++i) EXPECT_EQ(a_to_b.turns[i] + b_to_c.turns[i], a_to_c.turns[i]);
    EXPECT_DOUBLE_EQ(a_to_b.attention_factor * b_to_c.attention_factor, a_to_c.attention_factor);
}

// Phase steps drop whole revolutions per position; inv_freq of the difference must match what is left.
TEST(Relative, OfTablesWithHugeFrequenciesIsValid) {
    const auto slowed = [](double scale) {
        TableRequest request = llama(Method::longrope);
        request.factors.assign(64, scale);
        return build_table(request);
    };
    for (const double scale : {0.001, 0.004, 0.02, 0.2}) {
        EXPECT_NO_THROW(validate(relative(slowed(scale * 1.0001), slowed(scale)))) << scale;
    }
}

TEST(Relative, ToItselfIsTheIdentity) {
    const FrequencyTable table = build_table(llama(Method::mrrope_pro));
    const FrequencyTable identity = relative(table, table);
    EXPECT_EQ(identity.turns, std::vector<uint64_t>(64, 0));
    EXPECT_EQ(identity.attention_factor, 1.0);
}

TEST(Inverse, NegatesAnglesAndInvertsTheAttentionFactor) {
    const FrequencyTable table = build_table(llama(Method::mrrope_pro));
    const FrequencyTable undo = inverse(table);
    for (int i = 0; i < 64; ++i) {
        EXPECT_EQ(undo.turns[i] + table.turns[i], 0u);
        EXPECT_NEAR(undo.inv_freq[i], -table.inv_freq[i], 0x1p-53);
    }
    EXPECT_DOUBLE_EQ(undo.attention_factor * table.attention_factor, 1.0);
    EXPECT_EQ(undo.method, Method::relative);
    EXPECT_NO_THROW(validate(undo));
    EXPECT_EQ(inverse(undo).turns, table.turns);
}

TEST(Packed, IsThePhaseStepsAndTheAttentionFactor) {
    const FrequencyTable table = build_table(llama(Method::mrrope_pro));
    const std::vector<uint64_t> words = packed(table);
    ASSERT_EQ(words.size(), 65u);
    EXPECT_TRUE(std::equal(table.turns.begin(), table.turns.end(), words.begin()));
    EXPECT_EQ(std::bit_cast<double>(words.back()), table.attention_factor);
}

}  // namespace
}  // namespace mrrope
