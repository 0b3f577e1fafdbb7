#include "wide_float.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

// Literals are from mpmath with 60 digits: hi is the number rounded to double, lo the remainder rounded to double.

namespace mrrope {
namespace {

constexpr double tolerance = 1e-30;

// Exact in double, because the two numbers agree in their leading double.
double difference(WideFloat a, WideFloat b) {
    return (a.hi - b.hi) + (a.lo - b.lo);
}

double relative_error(WideFloat actual, WideFloat expected) {
    return std::abs(difference(actual, expected) / expected.hi);
}

bool is_normalized(WideFloat x) {
    return x.hi + x.lo == x.hi;
}

struct UnaryCase {
    double x;
    double hi;
    double lo;
};

struct BinaryCase {
    double x;
    double y;
    double hi;
    double lo;
};

constexpr UnaryCase exponentials[] = {
    {0x1.0000000000000p+0, 0x1.5bf0a8b145769p+1, 0x1.4d57ee2b1013ap-53},
    {-0x1.0000000000000p+0, 0x1.78b56362cef38p-2, -0x1.ca8a4270fadf5p-57},
    {0x1.0000000000000p-1, 0x1.a61298e1e069cp+0, -0x1.b4690082a4906p-55},
    {0x1.b7cdfd9d7bdbbp-34, 0x1.000000006df38p+0, -0x1.3112d8e5e6d4cp-57},
    {-0x1.79ca10c924223p-67, 0x1.0000000000000p+0, -0x1.79ca10c924223p-67},
    {0x1.0000000000000p-60, 0x1.0000000000000p+0, 0x1.0000000000000p-60},
    {0x1.4000000000000p+3, 0x1.5829dcf950560p+14, -0x1.83e055cfea4bbp-40},
    {-0x1.4000000000000p+3, 0x1.7cd79b5647c9bp-15, -0x1.8e936e2abd9dep-69},
    {0x1.62e42fefa39efp-2, 0x1.6a09e667f3bccp+0, 0x1.f68d3de197eeap-54},
    {0x1.62e42fefa39f0p-2, 0x1.6a09e667f3bcdp+0, -0x1.3ed1b76ce8a92p-55},
    {-0x1.62e42fefa39f0p-2, 0x1.6a09e667f3bccp-1, 0x1.23c2594027c9ep-55},
    {0x1.9100000000000p+6, 0x1.8c39b9134bac4p+144, 0x1.56775ec333673p+88},
    {-0x1.9100000000000p+6, 0x1.4acd31e167ebbp-145, -0x1.1e6a6d01602c6p-200},
    {0x1.4500000000000p+9, 0x1.af11c8c4dd193p+937, -0x1.008e4af8d23c8p+882},
    {-0x1.4500000000000p+9, 0x1.300ff6c7c2e28p-938, 0x1.3149289268fd6p-992},
    {0x1.6280000000000p+9, 0x1.d422d2be5dc9bp+1022, -0x1.916aa7a2c8d07p+967},
};

constexpr UnaryCase logarithms[] = {
    {0x1.0000000000000p+1, 0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56},
    {0x1.8000000000000p+1, 0x1.193ea7aad030bp+0, -0x1.a256f99caabebp-54},
    {0x1.4000000000000p+3, 0x1.26bb1bbb55516p+1, -0x1.f48ad494ea3e9p-53},
    {0x1.0000000000000p-1, -0x1.62e42fefa39efp-1, -0x1.abc9e3b39803fp-56},
    {0x1.999999999999ap-4, -0x1.26bb1bbb55515p+1, -0x1.8b752b6b15c17p-53},
    {0x1.0000000000001p+0, 0x1.fffffffffffffp-53, 0x1.5555555555554p-158},
    {0x1.fffffffffffffp-1, -0x1.0000000000000p-53, -0x1.0000000000000p-107},
    {0x1.3880000000000p+13, 0x1.26bb1bbb55516p+3, -0x1.f48ad494ea3e9p-51},
    {0x1.e848000000000p+18, 0x1.a3ea669a05c01p+3, 0x1.43d1720303e20p-51},
    {0x1.e848000000000p+19, 0x1.ba18a998fffa0p+3, 0x1.112fc120a0a22p-51},
    {0x1.0000000000000p+4, 0x1.62e42fefa39efp+1, 0x1.abc9e3b39803fp-54},
    {0x1.7e43c8800759cp+996, 0x1.5963447f87fb5p+9, 0x1.abccc0710fcd4p-46},
    {0x1.56e1fc2f8f359p-997, -0x1.5963447f87fb5p+9, -0x1.aa670d35324e6p-46},
    {0x1.23a516e82d9bap+1013, 0x1.5f24ec0a30a5fp+9, -0x1.7ce579a505828p-45},
    {0x1.fffffffffffffp+1023, 0x1.62e42fefa39efp+9, 0x1.a9c9e3b39803fp-46},
    {0x1.0000000000000p-1022, -0x1.6232bdd7abcd2p+9, -0x1.eef3fec1be37fp-46},
    {0x0.0000000000001p-1022, -0x1.74385446d71c3p+9, -0x1.8e569fa8ee781p-45},
    {0x1.d000000000000p+2, 0x1.fb22e98a1c24ep+0, 0x1.1550131db6cfbp-54},
};

constexpr BinaryCase powers[] = {
    {0x1.0000000000000p+1, 0x1.0000000000000p-1, 0x1.6a09e667f3bcdp+0, -0x1.bdd3413b26456p-54},
    {0x1.0000000000000p+1, 0x1.5555555555555p-2, 0x1.428a2f98d728bp+0, -0x1.83ec99bccda4dp-55},
    {0x1.4000000000000p+3, -0x1.0000000000000p-1, 0x1.43d136248490fp-2, -0x1.2648bb4986143p-57},
    {0x1.3880000000000p+13, -0x1.0000000000000p-6, 0x1.bb5fad00ab22cp-1, 0x1.a1cecee7dcb25p-58},
    {0x1.e848000000000p+18, -0x1.f800000000000p-1, 0x1.4985fec80a8cbp-19, 0x1.6c73194a65546p-78},
    {0x1.8000000000000p+1, 0x1.4000000000000p+5, 0x1.517168a4523fdp+63, 0x1.0800000000000p+5},
    {0x1.999999999999ap-4, 0x1.9800000000000p+4, 0x1.392d43736d218p-85, 0x1.be924dd533cf7p-140},
    {0x1.000001ad7f29bp+0, 0x1.e848000000000p+19, 0x1.1aec7b1e2b426p+0, -0x1.f1b0c89cea1e4p-55},
    {0x1.0000000000000p+6, -0x1.9000000000000p+6, 0x1.0000000000000p-600, 0x0.0p+0},
};

constexpr BinaryCase quotients[] = {
    {0x1.0000000000000p+0, 0x1.8000000000000p+1, 0x1.5555555555555p-2, 0x1.5555555555555p-56},
    {0x1.0000000000000p+1, 0x1.c000000000000p+2, 0x1.2492492492492p-2, 0x1.2492492492492p-56},
    {0x1.2a05f20000000p+33, 0x1.8000000000000p+1, 0x1.8d5d42aaaaaabp+31, -0x1.5555555555555p-23},
    {-0x1.4000000000000p+2, 0x1.6000000000000p+3, -0x1.d1745d1745d17p-2, -0x1.1745d1745d174p-56},
    {0x1.0000000000000p+0, 0x1.4f8b588e368f1p-17, 0x1.869ffffffffffp+16, 0x1.c05cb80000001p-38},
};

TEST(WideFloat, ConstantsAreRoundedToTheLastBit) {
    EXPECT_EQ(wide::two_pi.hi, 0x1.921fb54442d18p+2);
    EXPECT_EQ(wide::two_pi.lo, 0x1.1a62633145c07p-52);
    EXPECT_EQ(wide::ln2.hi, 0x1.62e42fefa39efp-1);
    EXPECT_EQ(wide::ln2.lo, 0x1.abc9e3b39803fp-56);
}

TEST(WideFloat, SumsAndProductsOfDoublesAreExact) {
    std::mt19937_64 random(1);
    std::uniform_int_distribution<int64_t> digits(-(int64_t{1} << 53), int64_t{1} << 53);
    for (int n = 0; n < 10000; ++n) {
        const int64_t a = digits(random);
        const int64_t b = digits(random);
        const WideFloat sum = wide::two_sum(static_cast<double>(a), static_cast<double>(b));
        EXPECT_EQ(static_cast<int64_t>(sum.hi) + static_cast<int64_t>(sum.lo), a + b);
        const WideFloat product = wide::two_product(static_cast<double>(a), static_cast<double>(b));
        EXPECT_TRUE(static_cast<__int128>(product.hi) + static_cast<__int128>(product.lo) ==
                    static_cast<__int128>(a) * b)
            << a << " * " << b;
        EXPECT_TRUE(is_normalized(sum) && is_normalized(product));
    }
}

TEST(WideFloat, SumKeepsWhatCancellationLeaves) {
    const WideFloat third = WideFloat(1.0) / 3.0;
    const WideFloat rest = third - WideFloat(1.0 / 3.0);
    EXPECT_EQ(rest.hi, 0x1.5555555555555p-56);
    EXPECT_EQ((WideFloat(0x1p60) + WideFloat(0x1p-40) - WideFloat(0x1p60)).hi, 0x1p-40);
}

TEST(WideFloat, ComparisonLooksAtTheLowPart) {
    EXPECT_TRUE(WideFloat(1.0, -0x1p-60) < WideFloat(1.0));
    EXPECT_FALSE(WideFloat(1.0) < WideFloat(1.0, -0x1p-60));
    EXPECT_FALSE(WideFloat(1.0) < WideFloat(1.0));
    EXPECT_TRUE(WideFloat(-2.0, 0x1p-60) < WideFloat(1.0));
}

TEST(WideFloat, Division) {
    for (const auto& [x, y, hi, lo] : quotients) {
        EXPECT_LT(relative_error(WideFloat(x) / WideFloat(y), {hi, lo}), tolerance) << x << " / " << y;
    }
}

TEST(WideFloat, Exponential) {
    for (const auto& [x, hi, lo] : exponentials) {
        EXPECT_LT(relative_error(wide::exp(x), {hi, lo}), std::max(1.0, std::abs(x) / 50.0) * tolerance) << "exp " << x;
    }
    EXPECT_EQ(wide::exp(0.0).hi, 1.0);
    EXPECT_EQ(wide::exp(0.0).lo, 0.0);
    EXPECT_EQ(wide::exp(-1e6).hi, 0.0);
}

TEST(WideFloat, Logarithm) {
    for (const auto& [x, hi, lo] : logarithms) {
        // Near 1 the error is absolute: the argument has no bits below 2^-106.
        EXPECT_LT(std::abs(difference(wide::log(x), {hi, lo})), std::max(0.01, std::abs(hi)) * tolerance)
            << "log " << x;
    }
    EXPECT_EQ(wide::log(1.0).hi, 0.0);
    EXPECT_EQ(wide::log(1.0).lo, 0.0);
}

TEST(WideFloat, Power) {
    for (const auto& [x, y, hi, lo] : powers) {
        // The argument of exp has a relative error of 2^-106, which large arguments amplify.
        const double lost = std::max({1.0, std::abs(y * std::log(x)), std::abs(y) / 100.0});
        EXPECT_LT(relative_error(wide::pow(x, y), {hi, lo}), lost * tolerance) << x << " ^ " << y;
    }
}

TEST(WideFloat, IdentitiesHoldToThirtyDigits) {
    std::mt19937_64 random(2);
    std::uniform_real_distribution<double> moderate(-30.0, 30.0);
    std::uniform_real_distribution<double> positive(0.001, 1000.0);
    std::uniform_real_distribution<double> tail(-0x1p-54, 0x1p-54);
    for (int n = 0; n < 2000; ++n) {
        const double head = positive(random);
        const WideFloat x = wide::normalized(head, head * tail(random));
        const WideFloat y = positive(random);
        const WideFloat a = moderate(random);
        const WideFloat b = moderate(random);
        ASSERT_LT(relative_error(x / y * y, x), tolerance) << x.hi;
        ASSERT_LT(relative_error((x + y) * (x + y), x * x + x * y * 2.0 + y * y), tolerance) << x.hi;
        ASSERT_LT(relative_error(wide::exp(a) * wide::exp(b), wide::exp(a + b)), tolerance) << a.hi << " " << b.hi;
        ASSERT_LT(relative_error(wide::exp(a) * wide::exp(-a), 1.0), tolerance) << a.hi;
        ASSERT_LT(relative_error(wide::exp(wide::log(x)), x), 4 * tolerance) << x.hi;
        ASSERT_LT(std::abs(difference(wide::log(x * y), wide::log(x) + wide::log(y))), 20 * tolerance) << x.hi;
        ASSERT_TRUE(is_normalized(x * y) && is_normalized(x / y) && is_normalized(x + a) &&
                    is_normalized(wide::exp(a)));
    }
}

TEST(WideFloat, SquareRootOfTwoSquaredIsTwo) {
    const WideFloat root = wide::pow(2.0, 0.5);
    EXPECT_EQ(root.hi, 0x1.6a09e667f3bcdp+0);
    EXPECT_LT(relative_error(root, {0x1.6a09e667f3bcdp+0, -0x1.bdd3413b26456p-54}), tolerance);
    EXPECT_LT(relative_error(root * root, 2.0), tolerance);
}

// --- phase steps ---

struct PhaseStepCase {
    double hi;
    double lo;
    uint64_t phase_step;
};

constexpr PhaseStepCase frequencies[] = {
    {0x1.0000000000000p+0, 0x0p+0, 2935890503282001226u},
    {0x1.0000000000000p-1, 0x0p+0, 1467945251641000613u},
    {0x1.999999999999ap-4, 0x0p+0, 293589050328200139u},
    {0x1.a36e2eb1c432dp-14, 0x0p+0, 293589050328200u},
    {0x1.b7cdfd9d7bdbbp-34, 0x0p+0, 293589050u},
    {0x1.d83c94fb6d2acp-64, 0x0p+0, 0u},
    {0x1.79ca10c924223p-67, 0x0p+0, 0u},
    {0x1.921fb54442d18p+1, 0x0p+0, 9223372036854775448u},
    {0x1.921fb54442d18p+2, 0x0p+0, 18446744073709550897u},
    {0x1.921fb54442d19p+2, 0x0p+0, 1889u},
    {0x1.921fb54442d18p+3, 0x0p+0, 18446744073709550178u},
    {0x1.9000000000000p+6, 0x0p+0, 16887889222556848410u},
    {0x1.e848000000000p+19, 0x0p+0, 17396974831248603380u},
    {-0x1.0000000000000p+0, 0x0p+0, 15510853570427550390u},
    {-0x1.a36e2eb1c432dp-14, 0x0p+0, 18446450484659223416u},
    {-0x1.921fb54442d18p+2, 0x0p+0, 719u},
    {-0x1.921fb54442d19p+2, 0x0p+0, 18446744073709549727u},
    {-0x1.d83c94fb6d2acp-64, 0x0p+0, 0u},
    {-0x1.79ca10c924223p-67, 0x0p+0, 0u},
    {-0x1.9000000000000p+6, 0x0p+0, 1558854851152703206u},
    {0x1.921fb54442d18p+0, 0x0p+0, 4611686018427387724u},
    {0x1.921fb54442d18p-1, 0x0p+0, 2305843009213693862u},
    {0x0.0p+0, 0x0p+0, 0u},
    {0x1.dcd6500000000p+29, 0x0p+0, 1695169740496205944u},
    {0x1.d1a94a2000000p+39, 0x0p+0, 16516029788636746760u},
    {0x1.d83c94fb6d2acp-63, 0x0p+0, 1u},
    {-0x1.d83c94fb6d2acp-63, 0x0p+0, 18446744073709551615u},
};

// Within 4e-6 of the midpoint between two multiples of 2^-64: a double cannot decide the rounding.
constexpr PhaseStepCase doubles_between_two_steps[] = {
    {0x1.e8a0851f68188p-3, 0x0p+0, 700466533600540434u},  {0x1.32654cda97e9fp-1, 0x0p+0, 1756922338798526712u},
    {0x1.0dd096f84aa54p-1, 0x0p+0, 1547161561691557179u}, {0x1.dcfc72f60d02ap-1, 0x0p+0, 2735115325821807767u},
    {0x1.bb6173a36583cp-1, 0x0p+0, 2542416212096753843u}, {0x1.17569374c74e3p-1, 0x0p+0, 1601770179477930964u},
};

// (n + 1/2 -+ 2^-20) * 2^-64 revolutions, around carries between the 32-bit halves of the result.
constexpr PhaseStepCase around_rounding_edges[] = {
    {0x1.921f83004c290p-63, -0x1.f85380360d4b7p-118, 0u},
    {0x1.921fe788397a1p-63, -0x1.9e22f304dbb2dp-118, 1u},
    {0x1.2d97bb6234730p-61, 0x1.389b064784db2p-117, 1u},
    {0x1.2d97d4842fc74p-61, 0x1.596cd3380769ep-115, 2u},
    {0x1.921fb545d4f10p-31, 0x1.da756d704996bp-85, 2147483648u},
    {0x1.921fb545d4f17p-31, -0x1.038f3e4b89511p-85, 2147483649u},
    {0x1.921fb54379c19p-30, 0x1.4ad99f7d6a495p-87, 4294967295u},
    {0x1.921fb54379c1cp-30, 0x1.74b1bc2387aaap-85, 4294967296u},
    {0x1.921fb5450be14p-30, 0x1.7a6be850c7ab9p-84, 4294967296u},
    {0x1.921fb5450be18p-30, -0x1.f4966d8d21c85p-84, 4294967297u},
    {0x1.921fb543de499p-29, -0x1.5e21346f867b3p-83, 8589934591u},
    {0x1.921fb543de49ap-29, 0x1.d4bb41430995cp-84, 8589934592u},
    {0x1.921fb54442d2bp+0, 0x1.b54cfe3700200p-55, 4611686018427400249u},
    {0x1.921fb54442d2bp+0, 0x1.b54cfe9b880d5p-55, 4611686018427400250u},
    {0x1.921fb54442d18p+1, 0x1.1ac6eb1205d38p-53, 9223372036854775808u},
    {0x1.921fb54442d18p+1, 0x1.1ac6eb2b27cedp-53, 9223372036854775809u},
    {0x1.921fb542b0b1dp+2, -0x1.b704a9662d492p-55, 18446744069414584319u},
    {0x1.921fb542b0b1dp+2, -0x1.b704a901a55bdp-55, 18446744069414584320u},
    {0x1.921fb54442d18p+2, 0x1.1a301f3454b94p-52, 18446744073709551615u},
    {0x1.921fb54442d18p+2, 0x1.1a301f40e5b6fp-52, 0u},
    {0x1.0c152382d7366p+2, -0x1.ee79d48cfcd6bp-52, 12297829382473034410u},
    {0x1.0c152382d7366p+2, -0x1.ee79d4806bd90p-52, 12297829382473034411u},
};

// n revolutions, exactly or plus or minus 2^-66 (rounds to zero) or 2^-60 (16 units).
constexpr PhaseStepCase around_whole_revolutions[] = {
    {0x1.921fb54442d18p+2, 0x1.1a62633145c07p-52, 0u},
    {0x1.921fb54442d18p+2, 0x1.1a7b852c9a04ap-52, 0u},
    {0x1.921fb54442d18p+2, 0x1.1a494135f17c4p-52, 0u},
    {0x1.921fb54442d18p+2, 0x1.20aae20656cbbp-52, 16u},
    {0x1.921fb54442d18p+2, 0x1.1419e45c34b52p-52, 18446744073709551600u},
    {-0x1.921fb54442d18p+2, -0x1.1a62633145c07p-52, 0u},
    {-0x1.921fb54442d18p+2, -0x1.1a494135f17c4p-52, 0u},
    {-0x1.921fb54442d18p+2, -0x1.1a7b852c9a04ap-52, 0u},
    {-0x1.921fb54442d18p+2, -0x1.1419e45c34b52p-52, 16u},
    {-0x1.921fb54442d18p+2, -0x1.20aae20656cbbp-52, 18446744073709551600u},
    {0x1.2d97c7f3321d2p+4, 0x1.a79394c9e8a0ap-51, 0u},
    {0x1.2d97c7f3321d2p+4, 0x1.a7a025c792c2cp-51, 0u},
    {0x1.2d97c7f3321d2p+4, 0x1.a78703cc3e7e9p-51, 0u},
    {0x1.2d97c7f3321d2p+4, 0x1.aab7d43471265p-51, 16u},
    {0x1.2d97c7f3321d2p+4, 0x1.a46f555f601b0p-51, 18446744073709551600u},
    {0x1.88b2f704a940ap+12, -0x1.2c3beb21e1e21p-42, 0u},
    {0x1.88b2f704a940ap+12, -0x1.2c3be4d9630d0p-42, 0u},
    {0x1.88b2f704a940ap+12, -0x1.2c3bf16a60b72p-42, 0u},
    {0x1.88b2f704a940ap+12, -0x1.2c3a59022c9ddp-42, 16u},
    {0x1.88b2f704a940ap+12, -0x1.2c3d7d4197265p-42, 18446744073709551600u},
    {-0x1.88b2f704a940ap+12, 0x1.2c3beb21e1e21p-42, 0u},
    {-0x1.88b2f704a940ap+12, 0x1.2c3bf16a60b72p-42, 0u},
    {-0x1.88b2f704a940ap+12, 0x1.2c3be4d9630d0p-42, 0u},
    {-0x1.88b2f704a940ap+12, 0x1.2c3d7d4197265p-42, 16u},
    {-0x1.88b2f704a940ap+12, 0x1.2c3a59022c9ddp-42, 18446744073709551600u},
};

template <class Cases>
void expect_phase_steps(const Cases& cases) {
    for (const auto& [hi, lo, expected] : cases) {
        EXPECT_EQ(wide::phase_step({hi, lo}), expected) << std::hexfloat << hi << " + " << lo;
    }
}

TEST(PhaseStep, OfKnownFrequencies) {
    expect_phase_steps(frequencies);
}

TEST(PhaseStep, RoundsDoublesBetweenTwoSteps) {
    expect_phase_steps(doubles_between_two_steps);
}

TEST(PhaseStep, RoundsToNearest) {
    expect_phase_steps(around_rounding_edges);
}

TEST(PhaseStep, WrapsAtWholeRevolutions) {
    expect_phase_steps(around_whole_revolutions);
}

TEST(PhaseStep, OfNegatedAnglesIsNegated) {
    std::mt19937_64 random(3);
    std::uniform_real_distribution<double> exponent(-40.0, 12.0);
    for (int n = 0; n < 10000; ++n) {
        const double radians = std::exp(exponent(random));
        ASSERT_EQ(wide::phase_step(radians) + wide::phase_step(-radians), 0u) << std::hexfloat << radians;
    }
}

TEST(PhaseStep, OfHugeAnglesIsDefined) {
    // Beyond 2^42 revolutions 106 bits cannot hold the 64 bits of the fraction, but the result must not depend on the
    // machine.
    for (const double radians : {0x1p60, 0x1p100, 1e300, 0x1.fffffffffffffp1023}) {
        EXPECT_EQ(wide::phase_step(radians) + wide::phase_step(-radians), 0u) << radians;
    }
    EXPECT_EQ(wide::phase_step(0x1p200), 0u);
}

}  // namespace
}  // namespace mrrope
