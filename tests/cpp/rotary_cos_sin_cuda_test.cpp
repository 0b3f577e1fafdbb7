#include <gtest/gtest.h>

#include <cstdint>

#include "device_case.h"
#include "device_memory.h"
#include "every_plan.h"
#include "on_gpu.h"
#include "rotary_cos_sin_case.h"
#include "rotary_plan.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

// A case on the device.
class CosSinDeviceCase {
public:
    explicit CosSinDeviceCase(CosSinCase& call) : call_(call), heads_(call.rotary()), cos_(call.cos), sin_(call.sin) {}

    RotaryCosSinArgs args() {
        const RotaryArgs heads = heads_.args();
        RotaryCosSinArgs args = call_.args();
        args.rotary.q = heads.q;
        args.rotary.k = heads.k;
        args.cos = call_.view(cos_.data());
        args.sin = call_.view(sin_.data());
        return args;
    }

    void fetch() { heads_.fetch(); }

private:
    CosSinCase& call_;
    DeviceCase heads_;
    DeviceMemory cos_, sin_;
};

void rotate_and_expect(const CosSinCaseOptions& options) {
    CosSinCase call(options);
    CosSinDeviceCase device(call);
    rotary_cos_sin_cuda(device.args(), nullptr);
    device.fetch();
    call.expect_rotated();
}

class RotaryCosSinCuda : public OnGpu {};

TEST_F(RotaryCosSinCuda, RandomCases) {
    for (uint64_t seed = 0; seed < 400; ++seed) rotate_and_expect(random_cos_sin_options(seed));
}

TEST_F(RotaryCosSinCuda, EveryKernel) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const int rotary_dim : {128, 64}) {
                for (int form = 0; form < 8; ++form) {
                    CosSinCaseOptions o;
                    o.rotary = {.dtype = dtype,
                                .pairing = pairing,
                                .batch = 2,
                                .tokens = 5,
                                .q_heads = 5,
                                .k_heads = 2,
                                .head_dim = 128,
                                .rotary_dim = rotary_dim,
                                .conjugate = rotary_dim == 64};
                    o.float32_columns = form & 1;
                    o.full_width = form & 2;
                    o.padding = form & 4 ? 3 : 0;  // unaligned
                    const RotaryShape shape = shape_of(CosSinCase(o).args().rotary);
                    for (const RotaryPlan& plan : every_plan(shape, rotary_cos_sin_kernels(shape.element_size))) {
                        SCOPED_TRACE(describe(plan));
                        CosSinCase call(o);
                        CosSinDeviceCase device(call);
                        rotary_cos_sin_cuda(device.args(), plan, nullptr);
                        device.fetch();
                        call.expect_rotated();
                    }
                }
            }
        }
    }
}

TEST_F(RotaryCosSinCuda, ManyTokens) {
    for (const int heads : {5, 32}) {
        CosSinCaseOptions o;
        o.rotary = {.dtype = DType::bfloat16, .batch = 2, .tokens = 700, .q_heads = heads, .k_heads = 8};
        o.rotary.head_dim = o.rotary.rotary_dim = 128;
        rotate_and_expect(o);
    }
}

TEST_F(RotaryCosSinCuda, SeveralLaunches) {
    CosSinCaseOptions o;
    o.rotary = {.dtype = DType::bfloat16, .batch = 3, .tokens = 7, .head_dim = 64, .rotary_dim = 32};
    CosSinCase call(o);
    CosSinDeviceCase device(call);
    const RotaryShape shape = shape_of(device.args().rotary);
    RotaryPlan planned = plan(shape, h200, rotary_cos_sin_kernels(shape.element_size));
    planned.tokens_per_launch = 3;
    rotary_cos_sin_cuda(device.args(), planned, nullptr);
    device.fetch();
    call.expect_rotated();
}

TEST_F(RotaryCosSinCuda, RotatesQueriesAndKeysInOneLaunchThatAGraphCanReplay) {
    const Stream stream;
    CosSinCaseOptions o;
    o.rotary.head_dim = o.rotary.rotary_dim = 128;
    CosSinCase call(o);
    CosSinDeviceCase device(call);
    const Recording recording(stream, [&](cudaStream_t on) { rotary_cos_sin_cuda(device.args(), on); });
    EXPECT_EQ(recording.launches(), 1u);
    recording.play(stream);
    device.fetch();
    call.expect_rotated();
}

}  // namespace
}  // namespace mrrope
