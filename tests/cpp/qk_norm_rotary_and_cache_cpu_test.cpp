#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "mrrope/qk_norm_rotary_and_cache.h"
#include "qk_norm_rotary_and_cache_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void store_and_expect(const NormCacheOptions& options) {
    NormCacheCase norm(options);
    qk_norm_rotary_and_cache_cpu(norm.args());
    norm.expect_stored();
}

TEST(QkNormRotaryAndCacheCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 600 && !HasFailure(); ++seed) store_and_expect(random_norm_cache_options(seed));
}

TEST(QkNormRotaryAndCacheCpu, EveryKindOfHeads) {
    for_each_kind_of_norm_and_cache(store_and_expect);
}

TEST(QkNormRotaryAndCacheCpu, HeadsOfZerosHaveAFiniteScale) {
    for (const StoredAs stored_as : both_float8) {
        NormCacheOptions o;
        o.q_stored_as = stored_as;
        o.q_scale = QScale::computed;
        NormCacheCase norm(o);
        HeadBuffer& q = norm.cache().rotary().q().in;
        std::fill(q.bytes.begin(), q.bytes.end(), std::byte{0});
        q.before = q.bytes;
        qk_norm_rotary_and_cache_cpu(norm.args());
        norm.expect_stored();
        for (const float scale : norm.computed_scales()) EXPECT_EQ(scale, 0x1p-126f);
    }
}

TEST(QkNormRotaryAndCacheCpu, DoesEveryTokenOnceInAnyOrder) {
    NormCacheOptions o;
    o.cache.rotary.batch = 3;
    o.cache.rotary.tokens = 7;
    o.cache.rotary.in_place = true;
    o.cache.blocks = 10;
    o.has_gate = true;
    NormCacheCase norm(o);
    qk_norm_rotary_and_cache_cpu(norm.args(), [](int64_t count, int64_t, const RangeBody& body) {
        EXPECT_EQ(count, 21);
        for (int64_t at = count; at > 0; at -= 3) body(at - 3, at);
    });
    norm.expect_stored();
}

TEST(QkNormRotaryAndCacheCpu, NothingToDo) {
    for (const auto& [batch, tokens, q_heads, k_heads] :
         {std::tuple{0, 3, 2, 1}, {2, 0, 2, 1}, {2, 3, 0, 0}, {2, 3, 2, 0}, {2, 3, 0, 2}}) {
        for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
            NormCacheOptions o;
            o.cache.rotary.batch = batch;
            o.cache.rotary.tokens = tokens;
            o.cache.rotary.q_heads = q_heads;
            o.cache.rotary.k_heads = k_heads;
            o.over = over;
            o.has_gate = true;
            store_and_expect(o);
        }
    }
}

TEST(Slice, StepsThroughGateFloat8QAndScales) {
    NormCacheOptions o;
    o.cache.rotary.batch = 4;
    o.cache.rotary.tokens = 5;
    o.cache.rotary.dtype = DType::bfloat16;
    o.q_stored_as = StoredAs::float8_e4m3;
    o.q_scale = QScale::computed;
    o.has_gate = true;
    NormCacheCase norm(o);
    const QkNormRotaryAndCacheArgs whole = norm.args();
    const QkNormRotaryAndCacheArgs part = slice(whole, 2, 1, 3, 2);
    EXPECT_EQ(part.rotary.batch, 1);
    EXPECT_EQ(part.rotary.tokens, 2);
    EXPECT_EQ(part.rotary.q.in, norm.cache().rotary().q().in.head(2, 3, 0));
    EXPECT_EQ(part.rotary.q.out, norm.float8_q().bytes.data() + norm.float8_q().byte_of(2, 3, 0));
    EXPECT_EQ(part.k.view.in, norm.cache().k().head(2, 3, 0));
    EXPECT_EQ(part.gate.in, norm.gate().head(2, 3, 0));
    EXPECT_EQ(part.gate.out, part.gate.in);
    EXPECT_EQ(part.q_scale_out - whole.q_scale_out,
              2 * whole.q_scale_out_strides.batch + 3 * whole.q_scale_out_strides.token);
    EXPECT_EQ(part.q_weight, whole.q_weight);
}

}  // namespace
}  // namespace mrrope
