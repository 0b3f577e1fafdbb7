#include <gtest/gtest.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "device_case.h"
#include "device_memory.h"
#include "device_properties.h"
#include "learnable_rotary_case.h"
#include "learnable_rotary_plan.h"
#include "mrrope/learnable_rotary.h"
#include "on_gpu.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

// A case on the device.
class LearnableDeviceCase {
public:
    explicit LearnableDeviceCase(LearnableCase& call)
        : call_(call),
          heads_(call.rotary()),
          frequencies_(call.frequencies.bytes),
          factors_(call.factors.bytes),
          frequency_gradients_(call.frequency_gradients.bytes),
          factor_gradients_(call.factor_gradients.bytes),
          packed_tables_(call.packed_tables),
          q_gradient_(call.q_gradient.bytes),
          k_gradient_(call.k_gradient.bytes),
          sums_(call.partial_sums(table_sum_rows_cuda(gradient_args_without_sums()))) {}

    LearnableRotaryArgs args() {
        LearnableRotaryArgs args = call_.args();
        args.rotary = heads_.args();
        args.frequencies = frequencies_.data();
        args.attention_factors = factors_.data();
        args.packed_tables = reinterpret_cast<uint64_t*>(packed_tables_.data());
        return args;
    }

    void pack_tables() {
        call_.pack_tables();
        packed_tables_.upload(call_.packed_tables);
    }

    LearnableRotaryGradientArgs gradient_args() {
        LearnableRotaryGradientArgs args = gradient_args_without_sums();
        args.table_sums = reinterpret_cast<double*>(sums_.data());
        return args;
    }

    LearnableRotaryGradientArgs gradient_args_without_sums() {
        LearnableRotaryGradientArgs args = call_.gradient_args();
        args.call = this->args();
        args.call.frequencies = args.call.attention_factors = nullptr;
        if (!call_.options().wants_heads) args.call.rotary.q.out = args.call.rotary.k.out = nullptr;
        args.q.data = q_gradient_.data() + call_.q_gradient.first_byte;
        if (args.k.data != nullptr) args.k.data = k_gradient_.data() + call_.k_gradient.first_byte;
        args.frequencies = frequency_gradients_.data();
        args.attention_factors = factor_gradients_.data();
        return args;
    }

    void fetch() {
        heads_.fetch();
        frequency_gradients_.download(call_.frequency_gradients.bytes);
        factor_gradients_.download(call_.factor_gradients.bytes);
    }

private:
    LearnableCase& call_;
    DeviceCase heads_;
    DeviceMemory frequencies_, factors_, frequency_gradients_, factor_gradients_, packed_tables_;
    DeviceMemory q_gradient_, k_gradient_, sums_;
};

void rotate_and_expect(const LearnableCaseOptions& options) {
    LearnableCase call(options);
    LearnableDeviceCase device(call);
    learnable_rotary_cuda(device.args(), nullptr);
    device.fetch();
    call.expect_rotated();
}

void differentiate_and_expect(const LearnableCaseOptions& options) {
    LearnableCase call(options);
    LearnableDeviceCase device(call);
    device.pack_tables();
    learnable_rotary_gradient_cuda(device.gradient_args(), nullptr);
    device.fetch();
    call.expect_gradients();

    SCOPED_TRACE("as a GPU with one SM would: a thread has many items");
    LearnableCase again(options);
    LearnableDeviceCase again_on_device(again);
    again_on_device.pack_tables();
    const LearnableRotaryGradientArgs args = again_on_device.gradient_args();
    learnable_rotary_gradient_cuda(args, plan(shape_of(args), {.sms = 1, .pdl = current_device().pdl}), nullptr);
    again_on_device.fetch();
    again.expect_gradients();
}

class LearnableRotaryCuda : public OnGpu {};

TEST_F(LearnableRotaryCuda, RandomCallsAndGradients) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
        rotate_and_expect(random_learnable_options(seed));
        differentiate_and_expect(random_learnable_options(seed));
        if (HasFailure()) return;
    }
}

// Aligned heads of whole vectors, in each dtype and pairing; several iterations per thread, several tables.
TEST_F(LearnableRotaryCuda, LongSequences) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            LearnableCaseOptions o;
            o.rotary.dtype = dtype;
            o.rotary.pairing = pairing;
            o.rotary.tokens = 3001;
            o.rotary.q_heads = 9;
            o.rotary.k_heads = 3;
            o.rotary.head_dim = 80;
            o.rotary.rotary_dim = 64;
            for (const int tables : {3, 1}) {  // one: more rows of partial sums than the 256 of a step
                o.tables = tables;
                rotate_and_expect(o);
                differentiate_and_expect(o);
            }
            if (HasFailure()) return;
        }
    }
}

// By single components, and by whole vectors.
TEST_F(LearnableRotaryCuda, HeadsOfMoreLanesThanABlockHasThreads) {
    for (const auto& [dtype, head_dim, rotary_dim] :
         {std::tuple{DType::float32, 1300, 1202}, {DType::float64, 520, 520}}) {
        LearnableCaseOptions o;
        o.rotary.dtype = dtype;
        o.rotary.head_dim = head_dim;
        o.rotary.rotary_dim = rotary_dim;
        rotate_and_expect(o);
        differentiate_and_expect(o);
    }
}

TEST_F(LearnableRotaryCuda, GradientsAreTheSameBitsEveryTime) {
    LearnableCaseOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.tokens = 5000;
    o.rotary.q_heads = 8;
    o.rotary.k_heads = 2;
    o.rotary.head_dim = o.rotary.rotary_dim = 128;
    o.tables = 2;
    LearnableCase first(o);
    LearnableDeviceCase first_on_device(first);
    first_on_device.pack_tables();
    learnable_rotary_gradient_cuda(first_on_device.gradient_args(), nullptr);
    first_on_device.fetch();
    for (int i = 0; i < 10; ++i) {
        LearnableCase again(o);
        LearnableDeviceCase device(again);
        device.pack_tables();
        learnable_rotary_gradient_cuda(device.gradient_args(), nullptr);
        device.fetch();
        EXPECT_EQ(again.frequency_gradients.bytes, first.frequency_gradients.bytes);
        EXPECT_EQ(again.factor_gradients.bytes, first.factor_gradients.bytes);
    }
}

TEST_F(LearnableRotaryCuda, AFactorOfZeroHasAGradient) {
    LearnableCaseOptions o;
    LearnableCase call(o);
    call.factors.set(0, 0.0);
    LearnableDeviceCase device(call);
    device.pack_tables();
    learnable_rotary_gradient_cuda(device.gradient_args(), nullptr);
    device.fetch();
    call.expect_gradients();
}

TEST_F(LearnableRotaryCuda, LaunchesTwoKernelsForwardAndTwoBackward) {
    const Stream stream;
    LearnableCaseOptions o;
    o.rotary.head_dim = o.rotary.rotary_dim = 64;
    LearnableCase call(o);
    LearnableDeviceCase device(call);
    const Recording forward(stream, [&](cudaStream_t on) { learnable_rotary_cuda(device.args(), on); });
    EXPECT_EQ(forward.launches(), 2u);
    forward.play(stream);
    device.fetch();
    call.expect_rotated();
    const Recording backward(stream,
                             [&](cudaStream_t on) { learnable_rotary_gradient_cuda(device.gradient_args(), on); });
    EXPECT_EQ(backward.launches(), 2u);
    backward.play(stream);
    device.fetch();
    call.expect_gradients();
}

// By dependent launches: the backward pass starts while the kernel that writes its gradients runs.
TEST_F(LearnableRotaryCuda, ReadsGradientsThatWereJustWritten) {
    LearnableCaseOptions o;
    o.rotary.tokens = 4001;
    o.rotary.q_heads = 8;
    o.rotary.k_heads = 0;
    o.rotary.head_dim = o.rotary.rotary_dim = 64;
    const auto gradients = [&](bool waits) {
        LearnableCase call(o);
        LearnableDeviceCase device(call);
        const LearnableRotaryGradientArgs args = device.gradient_args();
        LearnableRotaryArgs writer = device.args();
        writer.rotary.q.out = const_cast<void*>(args.q.data);
        writer.rotary.q.out_strides = args.q.strides;
        learnable_rotary_cuda(writer, nullptr);
        if (waits) device.fetch();
        learnable_rotary_gradient_cuda(args, nullptr);
        device.fetch();
        return call.frequency_gradients.bytes;
    };
    const auto expected = gradients(true);
    for (int i = 0; i < 20; ++i) ASSERT_EQ(gradients(false), expected);
}

TEST_F(LearnableRotaryCuda, NothingToRotateHasNoGradient) {
    LearnableCaseOptions o;
    o.rotary.tokens = 0;
    LearnableCase call(o);
    call.frequency_gradients.set(0, 7.0);
    LearnableDeviceCase device(call);
    learnable_rotary_cuda(device.args(), nullptr);
    learnable_rotary_gradient_cuda(device.gradient_args(), nullptr);
    device.fetch();
    call.expect_gradients();
}

}  // namespace
}  // namespace mrrope
