#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>

#include "mla_rotary_case.h"
#include "mrrope/mla_rotary.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void rotate_and_expect(const MlaOptions& options) {
    MlaRotaryCase forward(options);
    mla_rotary_cpu(forward.args());
    forward.expect_written();
    MlaRotaryGradientCase gradient(options);
    mla_rotary_gradient_cpu(gradient.args());
    gradient.expect_written();
}

TEST(MlaRotaryCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 500 && !HasFailure(); ++seed) rotate_and_expect(random_mla_options(seed));
}

TEST(MlaRotaryCpu, HeadsOfDeepSeekOfEveryDTypeAndPairing) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const bool conjugate : {false, true}) {
                MlaOptions o;
                o.rotary.dtype = dtype;
                o.rotary.pairing = pairing;
                o.rotary.conjugate = conjugate;
                o.rotary.q_heads = o.rotary.k_heads = 16;
                o.rotary.head_dim = o.rotary.rotary_dim = 64;
                o.nope_dim = 128;
                rotate_and_expect(o);
                if (HasFailure()) return;
            }
        }
    }
}

TEST(MlaRotaryCpu, EveryTokenHasItsTable) {
    for (const TableFor table_for : {TableFor::each_sequence, TableFor::each_index}) {
        MlaOptions o;
        o.rotary.batch = 3;
        o.rotary.tables = {.table_for = table_for, .count = 4};
        rotate_and_expect(o);
    }
}

TEST(MlaRotaryCpu, ManyTokensOnAllCores) {
    MlaOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.batch = 2;
    o.rotary.tokens = 700;
    o.rotary.k_heads = 5;
    o.rotary.head_dim = o.rotary.rotary_dim = 64;
    rotate_and_expect(o);
}

TEST(MlaRotaryCpu, NothingToDo) {
    for (const auto& [batch, tokens, q_heads, k_heads, nope_dim] : {std::tuple{0, 3, 2, 1, 4},
                                                                    {2, 0, 2, 1, 4},
                                                                    {2, 3, 0, 0, 4},
                                                                    {2, 3, 2, 0, 4},
                                                                    {2, 3, 0, 2, 4},
                                                                    {2, 3, 2, 2, 0}}) {
        MlaOptions o;
        o.rotary.batch = batch;
        o.rotary.tokens = tokens;
        o.rotary.q_heads = q_heads;
        o.rotary.k_heads = k_heads;
        o.nope_dim = nope_dim;
        rotate_and_expect(o);
    }
}

TEST(MlaRotaryCpu, TheGradientDoesNotDependOnTheNumberOfCores) {
    MlaOptions o;
    o.rotary.dtype = DType::float16;
    o.rotary.tokens = 300;
    o.rotary.k_heads = 7;
    MlaRotaryGradientCase on_one(o);
    MlaRotaryGradientCase on_all(o);
    mla_rotary_gradient_cpu(on_one.args(), [](int64_t count, int64_t, const RangeBody& body) { body(0, count); });
    mla_rotary_gradient_cpu(on_all.args());
    EXPECT_TRUE(on_one.buffers()[3]->bytes == on_all.buffers()[3]->bytes);
}

}  // namespace
}  // namespace mrrope
