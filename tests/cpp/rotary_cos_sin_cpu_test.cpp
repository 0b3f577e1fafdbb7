#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <tuple>

#include "rotary_cos_sin_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void rotate_and_expect(const CosSinCaseOptions& options) {
    CosSinCase call(options);
    rotary_cos_sin_cpu(call.args());
    call.expect_rotated();
}

TEST(RotaryCosSinCpu, RandomCases) {
    for (uint64_t seed = 0; seed < 400; ++seed) rotate_and_expect(random_cos_sin_options(seed));
}

TEST(RotaryCosSinCpu, EveryDtypePairingAndWidth) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const bool full_width : {true, false}) {
                CosSinCaseOptions o;
                o.rotary = {.dtype = dtype, .pairing = pairing, .batch = 2, .head_dim = 128, .rotary_dim = 64};
                o.full_width = full_width;
                rotate_and_expect(o);
                o.float32_columns = true;
                rotate_and_expect(o);
            }
        }
    }
}

// More pairs and more tokens than a tile of cosines has.
TEST(RotaryCosSinCpu, SeveralTiles) {
    CosSinCaseOptions o;
    o.rotary = {.dtype = DType::bfloat16, .batch = 2, .tokens = 150, .head_dim = 600, .rotary_dim = 524};
    o.padding = 3;
    rotate_and_expect(o);
}

TEST(RotaryCosSinCpu, SlicesGiveWhatTheWholeGives) {
    CosSinCaseOptions o;
    o.rotary = {.dtype = DType::float16, .batch = 3, .tokens = 5, .head_dim = 32, .rotary_dim = 24};
    for (const bool broadcast : {false, true}) {
        o.broadcast_batch = broadcast;
        CosSinCase call(o);
        for (int64_t batch = 0; batch < 3; ++batch) {
            for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 2}, {2, 3}}) {
                rotary_cos_sin_cpu(slice(call.args(), batch, 1, first, count));
            }
        }
        call.expect_rotated();
    }
}

TEST(RotaryCosSinCpu, NothingToDo) {
    for (const auto& [batch, tokens] : {std::pair<int64_t, int64_t>{0, 3}, {2, 0}}) {
        CosSinCaseOptions o;
        o.rotary.batch = batch;
        o.rotary.tokens = tokens;
        rotate_and_expect(o);
    }
}

}  // namespace
}  // namespace mrrope
