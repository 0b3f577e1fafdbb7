#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "device_memory.h"
#include "mla_device_case.h"
#include "mla_rotary_plan.h"
#include "mrrope/mla_rotary.h"
#include "on_gpu.h"
#include "plans_with_kernel.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

class MlaRotaryCuda : public OnGpu {
protected:
    static void rotate_and_expect(const MlaOptions& options) {
        run<MlaRotaryCase>(options, [](const MlaRotaryArgs& args) { mla_rotary_cuda(args, nullptr); });
        run<MlaRotaryGradientCase>(options,
                                   [](const MlaRotaryGradientArgs& args) { mla_rotary_gradient_cuda(args, nullptr); });
    }

    static void rotate_by_every_kernel_and_expect(const MlaOptions& options, int aligned_vector) {
        for (const MlaRotaryPlan& plan : plans_of<MlaRotaryCase>(options, aligned_vector)) {
            SCOPED_TRACE(describe_vectors(plan));
            run<MlaRotaryCase>(options, [&](const MlaRotaryArgs& args) { mla_rotary_cuda(args, plan, nullptr); });
        }
        for (const MlaRotaryPlan& plan : plans_of<MlaRotaryGradientCase>(options, aligned_vector)) {
            SCOPED_TRACE("gradient, " + describe_vectors(plan));
            run<MlaRotaryGradientCase>(
                options, [&](const MlaRotaryGradientArgs& args) { mla_rotary_gradient_cuda(args, plan, nullptr); });
        }
    }

private:
    template <class Case>
    static std::vector<MlaRotaryPlan> plans_of(const MlaOptions& options, int aligned_vector) {
        Case host(options);
        const MlaRotaryShape shape = shape_of(MlaDeviceCase<Case>(host).args());
        EXPECT_EQ(shape.aligned_vector, aligned_vector);
        return plans_with_kernel(shape);
    }

    template <class Case, class Op>
    static void run(const MlaOptions& options, Op&& op) {
        Case host(options);
        MlaDeviceCase<Case> device(host);
        op(device.args());
        device.fetch();
        host.expect_written();
    }
};

// --- against the reference that mla_rotary_cpu is tested against

TEST_F(MlaRotaryCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) rotate_and_expect(random_mla_options(seed));
}

// Full vectors of two heads with a remainder, and of a single head; half vectors and single components; one table and
// several.
TEST_F(MlaRotaryCuda, EveryKernel) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const TableFor table_for : {TableFor::all, TableFor::each_index}) {
                for (const auto& [q_heads, k_heads] : {std::pair{5, 3}, {1, 1}}) {
                    MlaOptions o;
                    o.rotary.dtype = dtype;
                    o.rotary.pairing = pairing;
                    o.rotary.tokens = 11;
                    o.rotary.q_heads = q_heads;
                    o.rotary.k_heads = k_heads;
                    o.rotary.head_dim = o.rotary.rotary_dim = 128;
                    o.nope_dim = 96;
                    o.rotary.tables = {.table_for = table_for, .count = 4};
                    rotate_by_every_kernel_and_expect(o, full_vector(size_of(dtype)));
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// Of half vectors: the rope part, or both.
TEST_F(MlaRotaryCuda, HeadsThatAreNotMadeOfFullVectors) {
    for (const Pairing pairing : both_pairings) {
        for (const auto& [rotary_dim, nope_dim] : {std::pair{120, 64}, {56, 100}}) {
            MlaOptions o;
            o.rotary.dtype = DType::bfloat16;
            o.rotary.pairing = pairing;
            o.rotary.q_heads = 3;
            o.rotary.k_heads = 2;
            o.rotary.head_dim = o.rotary.rotary_dim = rotary_dim;
            o.nope_dim = nope_dim;
            rotate_by_every_kernel_and_expect(o, nope_dim == 64 ? 8 : 4);
        }
    }
}

// A full vector of one head, and half vectors of a gradient.
TEST_F(MlaRotaryCuda, PlansWithoutAKernelAreRefused) {
    MlaOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.head_dim = o.rotary.rotary_dim = 64;
    MlaRotaryCase forward(o);
    MlaDeviceCase<MlaRotaryCase> forward_on_device(forward);
    const MlaRotaryArgs args = forward_on_device.args();
    EXPECT_THROW(mla_rotary_cuda(args, plan_with(shape_of(args), 8, 1), nullptr), std::logic_error);
    MlaRotaryGradientCase gradient(o);
    MlaDeviceCase<MlaRotaryGradientCase> gradient_on_device(gradient);
    const MlaRotaryGradientArgs gradient_args = gradient_on_device.args();
    EXPECT_THROW(mla_rotary_gradient_cuda(gradient_args, plan_with(shape_of(gradient_args), 4, 1), nullptr),
                 std::logic_error);
}

TEST_F(MlaRotaryCuda, HeadsOfDeepSeek) {
    for (const int heads : {16, 128}) {
        MlaOptions o;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.pairing = Pairing::interleaved;
        o.rotary.batch = 2;
        o.rotary.tokens = 9;
        o.rotary.q_heads = o.rotary.k_heads = heads;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.nope_dim = 128;
        rotate_and_expect(o);
    }
}

// Lanes that divide a warp add up by shuffles; others, such as the 3 of 48 components, do not.
TEST_F(MlaRotaryCuda, SumsOfAnyNumberOfHeadsAndLanes) {
    for (const int rotary_dim : {2, 16, 48, 64, 96, 512}) {
        for (const int k_heads : {1, 2, 7, 33, 130}) {
            MlaOptions o;
            o.rotary.dtype = DType::bfloat16;
            o.rotary.tokens = 5;
            o.rotary.q_heads = 1;
            o.rotary.k_heads = k_heads;
            o.rotary.head_dim = o.rotary.rotary_dim = rotary_dim;
            rotate_and_expect(o);
            if (HasFailure()) return;
        }
    }
}

TEST_F(MlaRotaryCuda, TheGradientIsTheSameEveryTime) {
    MlaOptions o;
    o.rotary.dtype = DType::float32;
    o.rotary.tokens = 50;
    o.rotary.k_heads = 128;
    o.rotary.head_dim = o.rotary.rotary_dim = 64;
    MlaRotaryGradientCase first(o);
    MlaRotaryGradientCase second(o);
    for (MlaRotaryGradientCase* gradient : {&first, &second}) {
        MlaDeviceCase<MlaRotaryGradientCase> device(*gradient);
        mla_rotary_gradient_cuda(device.args(), nullptr);
        device.fetch();
    }
    EXPECT_TRUE(first.buffers()[3]->bytes == second.buffers()[3]->bytes);
}

// --- streams and launches

TEST_F(MlaRotaryCuda, OneLaunchEachThatAGraphCanReplay) {
    const Stream stream;
    const MlaOptions o;
    MlaRotaryCase forward(o);
    MlaDeviceCase<MlaRotaryCase> forward_on_device(forward);
    const Recording rotation(stream, [&](cudaStream_t on) { mla_rotary_cuda(forward_on_device.args(), on); });
    EXPECT_EQ(rotation.launches(), 1u);
    rotation.play(stream);
    forward_on_device.fetch();
    forward.expect_written();
    MlaRotaryGradientCase gradient(o);
    MlaDeviceCase<MlaRotaryGradientCase> gradient_on_device(gradient);
    const Recording backward(stream, [&](cudaStream_t on) { mla_rotary_gradient_cuda(gradient_on_device.args(), on); });
    EXPECT_EQ(backward.launches(), 1u);
    backward.play(stream);
    gradient_on_device.fetch();
    gradient.expect_written();
}

HeadsView backwards(const HeadsView& view) {
    return {.in = view.out,
            .out = const_cast<void*>(view.in),
            .heads = view.heads,
            .in_strides = view.out_strides,
            .out_strides = view.in_strides};
}

// A gradient that reads what the call of `args` writes, and writes what it reads, except k_nope. It turns the same way:
// turned back, q would be what it was, and a read that comes too early would not show.
MlaRotaryGradientArgs gradient_into_inputs_of(const MlaRotaryArgs& args) {
    MlaRotaryGradientArgs gradient{.rotary = args.rotary, .q_nope = args.q_nope};
    for (HeadsView* view : {&gradient.rotary.q, &gradient.rotary.k, &gradient.q_nope.view}) *view = backwards(*view);
    return gradient;
}

// By programmatic dependent launch a kernel may start while the preceding one still runs; every call reads what the
// last one wrote. The gradient adds up the key's heads: with many of them it would overflow.
TEST_F(MlaRotaryCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const int64_t tokens : {1, 300}) {
        MlaOptions o;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.tokens = tokens;
        o.rotary.q_heads = 16;
        o.rotary.k_heads = 2;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.nope_dim = 128;
        MlaRotaryCase separate(o);
        MlaRotaryCase overlapping(o);
        MlaDeviceCase<MlaRotaryCase> separate_on_device(separate);
        MlaDeviceCase<MlaRotaryCase> overlapping_on_device(overlapping);
        for (int i = 0; i < 25; ++i) {
            mla_rotary_cuda(separate_on_device.args(), nullptr);
            check(cudaDeviceSynchronize());
            mla_rotary_gradient_cuda(gradient_into_inputs_of(separate_on_device.args()), nullptr);
            check(cudaDeviceSynchronize());
        }
        for (int i = 0; i < 25; ++i) {
            mla_rotary_cuda(overlapping_on_device.args(), nullptr);
            mla_rotary_gradient_cuda(gradient_into_inputs_of(overlapping_on_device.args()), nullptr);
        }
        separate_on_device.fetch();
        overlapping_on_device.fetch();
        for (size_t i = 0; i < separate.buffers().size(); ++i) {
            EXPECT_TRUE(overlapping.buffers()[i]->bytes == separate.buffers()[i]->bytes) << i << ", " << tokens;
        }
    }
}

TEST_F(MlaRotaryCuda, NothingToDoLaunchesNothing) {
    const Stream stream;
    for (const auto& [batch, tokens, q_heads, k_heads] : {std::tuple{0, 3, 2, 1}, {2, 0, 2, 1}, {2, 3, 0, 0}}) {
        MlaOptions o;
        o.rotary.batch = batch;
        o.rotary.tokens = tokens;
        o.rotary.q_heads = q_heads;
        o.rotary.k_heads = k_heads;
        MlaRotaryCase forward(o);
        const Recording rotation(stream, [&](cudaStream_t on) { mla_rotary_cuda(forward.args(), on); });
        EXPECT_EQ(rotation.launches(), 0u) << describe(o);
        MlaRotaryGradientCase gradient(o);
        const Recording backward(stream, [&](cudaStream_t on) { mla_rotary_gradient_cuda(gradient.args(), on); });
        EXPECT_EQ(backward.launches(), 0u) << describe(o);
    }
}

TEST_F(MlaRotaryCuda, QueriesAloneKeysAloneAndHeadsWithoutACopiedPart) {
    for (const auto& [q_heads, k_heads, nope_dim] : {std::tuple{2, 0, 32}, {0, 2, 32}, {2, 2, 0}}) {
        MlaOptions o;
        o.rotary.q_heads = q_heads;
        o.rotary.k_heads = k_heads;
        o.nope_dim = nope_dim;
        rotate_and_expect(o);
    }
}

}  // namespace
}  // namespace mrrope
