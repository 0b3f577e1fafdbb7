#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "mrrope/frequency_table.h"
#include "table_requests.h"

namespace mrrope {
namespace {

void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts) {
    try {
        action();
        ADD_FAILURE() << "no error about " << parts.front();
    } catch (const std::invalid_argument& error) {
        const std::string text = error.what();
        EXPECT_EQ(text.rfind(parts.front(), 0), 0u) << "must open with the argument " << parts.front() << ": " << text;
        for (const std::string& part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
    }
}

struct BadRequest {
    const char* what;
    std::function<void(TableRequest&)> spoil;
    std::vector<std::string> parts;  // of the message, which starts with the first
};

class BadRequests : public ::testing::TestWithParam<BadRequest> {};

TEST_P(BadRequests, AreRefusedNamingTheArgument) {
    TableRequest request = llama(Method::yarn);
    GetParam().spoil(request);
    expect_error([&] { build_table(request); }, GetParam().parts);
}

using R = TableRequest;
INSTANTIATE_TEST_SUITE_P(
    All, BadRequests,
    ::testing::Values(
        BadRequest{"OddRotaryDim", [](R& r) { r.rotary_dim = 127; }, {"rotary_dim", "even", "127"}},
        BadRequest{"ZeroRotaryDim", [](R& r) { r.rotary_dim = 0; }, {"rotary_dim", "got 0"}},
        BadRequest{"NegativeRotaryDim", [](R& r) { r.rotary_dim = -64; }, {"rotary_dim", "-64"}},
        BadRequest{"BaseOne", [](R& r) { r.base = 1.0; }, {"base", "above 1", "got 1"}},
        BadRequest{"BaseNegative", [](R& r) { r.base = -5.0; }, {"base", "-5"}},
        BadRequest{"BaseInfinite", [](R& r) { r.base = infinity; }, {"base", "finite", "inf"}},
        BadRequest{"BaseNan", [](R& r) { r.base = not_a_number; }, {"base", "nan"}},
        BadRequest{
            "LengthZero", [](R& r) { r.original_max_position = 0; }, {"original_max_position", "positive", "got 0"}},
        BadRequest{"LengthNan", [](R& r) { r.original_max_position = not_a_number; }, {"original_max_position", "nan"}},
        BadRequest{
            "LengthInfinite", [](R& r) { r.original_max_position = infinity; }, {"original_max_position", "inf"}},
        BadRequest{"NativeScaleTooShort", [](R& r) { r.native_scale = {1.0}; }, {"native_scale", "64", "got 1"}},
        BadRequest{
            "NativeScaleZero", [](R& r) { r.native_scale.assign(64, 0.0); }, {"native_scale", "positive", "got 0"}},
        BadRequest{"NativeAttentionFactorNegative",
                   [](R& r) { r.native_attention_factor = -1.0; },
                   {"native_attention_factor", "positive", "got -1"}},
        BadRequest{"ScaleBelowOne", [](R& r) { r.scale = 0.5; }, {"scale", "1 or more", "got 0.5"}},
        BadRequest{"ScaleZero", [](R& r) { r.scale = 0.0; }, {"scale", "1 or more", "got 0"}},
        BadRequest{"ScaleNegative", [](R& r) { r.scale = -2.5; }, {"scale", "-2.5"}},
        BadRequest{"ScaleInfinite", [](R& r) { r.scale = infinity; }, {"scale", "inf"}},
        BadRequest{"ScaleNan", [](R& r) { r.scale = not_a_number; }, {"scale", "nan"}},
        BadRequest{"AlphaZero", [](R& r) { r.alpha = 0.0; }, {"alpha", "got 0"}},
        BadRequest{"BetaNan", [](R& r) { r.beta = not_a_number; }, {"beta", "nan"}},
        BadRequest{"AlphaAboveBeta", [](R& r) { r.alpha = 33.5; }, {"alpha", "beta", "33.5", "32"}},
        BadRequest{"BoundsNegative", [](R& r) { r.bounds = Bounds(-1, 5); }, {"bounds", "(-1, 5)"}},
        BadRequest{"BoundsSwapped", [](R& r) { r.bounds = Bounds(7, 5); }, {"bounds", "(7, 5)"}},
        BadRequest{"PowerMissing", [](R& r) { r.method = Method::mrrope_pow; }, {"power", "none"}},
        BadRequest{"PowerNan", [](R& r) { r = with_power(r, not_a_number); }, {"power", "finite", "nan"}},
        BadRequest{"PowerInfinite", [](R& r) { r = with_power(r, infinity); }, {"power", "finite", "inf"}},
        BadRequest{"PowerNotWanted", [](R& r) { r.power = 2.5; }, {"power", "2.5", "'yarn'"}},
        BadRequest{"AttentionFactorZero", [](R& r) { r.attention_factor = 0.0; }, {"attention_factor", "got 0"}},
        BadRequest{"AttentionFactorPastFloat32",
                   [](R& r) { r.attention_factor = 1e39; },
                   {"attention_factor", "float32's range", "got 9.9999999999999994e+38"}},
        BadRequest{"AttentionFactorNan", [](R& r) { r.attention_factor = not_a_number; }, {"attention_factor", "nan"}},
        BadRequest{"FactorsNotWanted", [](R& r) { r.factors = {1, 2}; }, {"factors", "got 2", "'yarn'"}},
        BadRequest{"RadixFactorsTooMany",
                   [](R& r) { r.method = Method::radix, r.factors.assign(64, 1.0); },
                   {"factors", "63", "got 64"}},
        BadRequest{"LongropeFactorsTooFew",
                   [](R& r) { r.method = Method::longrope, r.factors.assign(63, 1.0); },
                   {"factors", "64", "got 63"}},
        BadRequest{"FactorNegative",
                   [](R& r) { r.method = Method::longrope, r.factors.assign(64, 1.0), r.factors[9] = -3.0; },
                   {"factors", "-3", "index 9"}},
        BadRequest{"FactorNan",
                   [](R& r) { r.method = Method::radix, r.factors.assign(63, 1.0), r.factors[5] = not_a_number; },
                   {"factors", "nan", "index 5"}},
        BadRequest{"Relative", [](R& r) { r.method = Method::relative; }, {"method", "'relative'"}},
        BadRequest{"FrequencyUnderflows",
                   [](R& r) { r.method = Method::radix, r.factors.assign(63, 1e200); },
                   {"the frequency of pair 2", "base", "cumulative scale"}}),
    [](const auto& info) { return std::string(info.param.what); });

TEST(Errors, UnknownMethodListsTheKnownOnes) {
    expect_error([] { method_from_name("yarnn"); },
                 {"method must be one of rope, pi, ntk, yarn, yarn_ratio, mrrope_uni, mrrope_pro, mrrope_pow, radix, "
                  "longrope, llama3, got 'yarnn'"});
}

TEST(Errors, RelatedTablesMustHaveOneRotaryDim) {
    TableRequest small = llama(Method::rope);
    small.rotary_dim = 64;
    expect_error([&] { relative(build_table(llama(Method::rope)), build_table(small)); },
                 {"tables", "rotary_dim", "128 and 64"});
}

TEST(Errors, RelatedTablesMustNotBeTooFarApart) {
    const auto table = [](double attention_factor, double scale) {
        TableRequest request = llama(Method::pi, scale);
        request.attention_factor = attention_factor;
        return build_table(request);
    };
    const std::vector<std::string> parts = {"attention_factor of one table relative to another", "float32's range"};
    expect_error([&] { relative(table(1e30, 1.0), table(1e-30, 1.0)); }, parts);
    expect_error([&] { relative(table(1e-30, 1.0), table(1e30, 1.0)); }, parts);
    expect_error([&] { inverse(table(3e38, 1.0)); }, parts);
    const FrequencyTable far = relative(table(1.0, 1.0), table(1.0, 1e200));
    expect_error([&] { relative(table(1.0, 1e200), far); }, {"scale of one table relative to another", "got inf"});
}

struct BadTable {
    const char* what;
    std::function<void(FrequencyTable&)> spoil;
    std::vector<std::string> parts;
};

class BadTables : public ::testing::TestWithParam<BadTable> {};

TEST_P(BadTables, AreRefusedNamingTheMember) {
    FrequencyTable table = build_table(llama(Method::mrrope_pro));
    validate(table);
    GetParam().spoil(table);
    expect_error([&] { validate(table); }, GetParam().parts);
}

using T = FrequencyTable;
INSTANTIATE_TEST_SUITE_P(
    All, BadTables,
    ::testing::Values(
        BadTable{"RotaryDim", [](T& t) { t.rotary_dim = 127; }, {"rotary_dim", "127"}},
        BadTable{"InvFreqCount", [](T& t) { t.inv_freq.pop_back(); }, {"inv_freq", "64", "got 63"}},
        BadTable{"TurnsCount", [](T& t) { t.turns.push_back(0); }, {"turns", "64", "got 65"}},
        BadTable{"ScalesCount", [](T& t) { t.cumulative_scale.clear(); }, {"cumulative_scale", "64", "got 0"}},
        BadTable{"ScalesOfRelative", [](T& t) { t.method = Method::relative; }, {"cumulative_scale", "0", "got 64"}},
        BadTable{"AttentionFactor", [](T& t) { t.attention_factor = -1.0; }, {"attention_factor", "-1"}},
        BadTable{"Scale", [](T& t) { t.scale = infinity; }, {"scale", "inf"}},
        BadTable{"Base", [](T& t) { t.base = 0.5; }, {"base", "0.5"}},
        BadTable{"BaseOfAnother", [](T& t) { t.base = 1e4; }, {"inv_freq", "base", "index 1"}},
        BadTable{"Length", [](T& t) { t.original_max_position = -8.0; }, {"original_max_position", "-8"}},
        BadTable{"Bounds", [](T& t) { t.bounds = Bounds(9, 8); }, {"bounds", "(9, 8)"}},
        BadTable{"ScaleOfAnother", [](T& t) { t.cumulative_scale[40] *= 2; }, {"inv_freq", "index 40"}},
        BadTable{"CumulativeScale", [](T& t) { t.cumulative_scale[3] = 0.0; }, {"cumulative_scale", "got 0"}},
        BadTable{"InvFreqNan", [](T& t) { t.inv_freq[7] = not_a_number; }, {"inv_freq", "nan", "index 7"}},
        BadTable{"InvFreqInfinite", [](T& t) { t.inv_freq[7] = infinity; }, {"inv_freq", "inf", "index 7"}},
        BadTable{"TurnsOfAnother", [](T& t) { t.turns[5] = t.turns[6]; }, {"turns", "inv_freq", "index 5"}},
        BadTable{"TurnsSlightlyOff", [](T& t) { t.turns[0] += 1 << 14; }, {"turns", "inv_freq 1", "index 0"}},
        BadTable{"InvFreqSlightlyOff", [](T& t) { t.inv_freq[0] *= 1 + 1e-14; }, {"turns", "inv_freq", "index 0"}}),
    [](const auto& info) { return std::string(info.param.what); });

TEST(Validate, ForgivesOneRoundingOfInvFreq) {
    FrequencyTable table = build_table(llama(Method::mrrope_pro));
    for (double& frequency : table.inv_freq) frequency = std::nextafter(frequency, 2.0);
    EXPECT_NO_THROW(validate(table));
}

TEST(Validate, AcceptsRelativeTablesOfEveryPairOfMethods) {
    const Method methods[] = {Method::rope, Method::pi, Method::ntk, Method::yarn, Method::mrrope_pro, Method::llama3};
    for (const Method to : methods) {
        for (const Method from : methods) {
            EXPECT_NO_THROW(validate(relative(build_table(llama(to, 32.0)), build_table(llama(from, 3.0)))));
        }
    }
}

}  // namespace
}  // namespace mrrope
