#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "device_case.h"
#include "device_memory.h"
#include "every_plan.h"
#include "launch_slices.h"
#include "mrrope/frequency_table.h"
#include "mrrope/launch_log.h"
#include "mrrope/rotary.h"
#include "on_gpu.h"
#include "rotary_case.h"
#include "rotary_plan.h"

// Streams, overlapping launches, the log, slices and far offsets. Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

class RotaryLaunchesCuda : public OnGpu {};

TEST_F(RotaryLaunchesCuda, RotatesQueriesAndKeysInOneLaunchThatAGraphCanReplay) {
    const Stream stream;
    CaseOptions o;
    o.head_dim = 96;
    o.rotary_dim = 64;
    RotaryCase rotary(o);
    DeviceCase device(rotary);
    const Recording recording(stream, [&](cudaStream_t on) { rotary_cuda(device.args(), on); });
    EXPECT_EQ(recording.launches(), 1u);
    recording.play(stream);
    device.fetch();
    rotary.expect_rotated();
}

// By programmatic dependent launch a kernel may start while the preceding one still runs.
TEST_F(RotaryLaunchesCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const auto& [dtype, table_for, head_tables] : {std::tuple{DType::float32, TableFor::all, 1},
                                                        {DType::float32, TableFor::each_index, 1},
                                                        {DType::bfloat16, TableFor::all, 1},
                                                        {DType::bfloat16, TableFor::each_index, 1},
                                                        {DType::bfloat16, TableFor::each_index, 2}}) {
        for (const int64_t tokens : {1, 700}) {
            CaseOptions o;
            o.dtype = dtype;
            o.tokens = tokens;
            o.q_heads = 8;
            o.k_heads = 2;
            o.head_dim = o.rotary_dim = 128;
            o.in_place = true;
            o.tables = {.table_for = table_for, .count = 4, .heads = head_tables};
            for (const RotaryPlan& plan : every_plan(RotaryCase(o).args())) {
                SCOPED_TRACE(describe(plan) + ", " + describe(o));
                RotaryCase separate(o);
                RotaryCase overlapping(o);
                DeviceCase separate_on_device(separate);
                DeviceCase overlapping_on_device(overlapping);
                for (int i = 0; i < 50; ++i) {
                    rotary_cuda(separate_on_device.args(), plan, nullptr);
                    check(cudaDeviceSynchronize());
                }
                for (int i = 0; i < 50; ++i) rotary_cuda(overlapping_on_device.args(), plan, nullptr);
                separate_on_device.fetch();
                overlapping_on_device.fetch();
                EXPECT_TRUE(overlapping.q().in.bytes == separate.q().in.bytes);
                EXPECT_TRUE(overlapping.k().in.bytes == separate.k().in.bytes);
            }
        }
    }
}

// A speculated index must be verified: the preceding kernel writes the indices while this one has already started. The
// writer is a rotation by the angle 0 of floats with the bits of the indices, long enough to write them late. Until
// then they name a table that none of them names afterwards.
TEST_F(RotaryLaunchesCuda, IndicesThatThePrecedingKernelWrites) {
    constexpr int dim = 128;
    constexpr int64_t heads_before = 20000;
    constexpr int32_t tables = 4;
    const DeviceMemory positions(std::vector<int64_t>(1, 0));
    const DeviceMemory table(
        packed(build_table({.method = Method::rope, .rotary_dim = dim, .base = 1e4, .original_max_position = 4096})));
    for (const auto& [dtype, tokens, head_tables] : {std::tuple{DType::float32, 1, 1},
                                                     {DType::float32, 700, 1},
                                                     {DType::bfloat16, 1, 1},
                                                     {DType::bfloat16, 1, 2},
                                                     {DType::bfloat16, 40, 1},
                                                     {DType::bfloat16, 40, 2},
                                                     {DType::bfloat16, 700, 1},
                                                     {DType::bfloat16, 700, 2}}) {
        CaseOptions o;
        o.dtype = dtype;
        o.tokens = tokens;
        o.q_heads = 8;
        o.k_heads = 2;
        o.head_dim = o.rotary_dim = dim;
        o.tables = {.table_for = TableFor::each_index, .count = tables, .heads = head_tables};
        RotaryCase rotary(o);
        std::vector<int32_t>& indices = rotary.indices().words();
        for (int32_t& index : indices) index %= tables - 1;
        std::vector<int32_t> source(heads_before * dim, 0);
        std::copy(indices.begin(), indices.end(), source.end() - static_cast<int64_t>(indices.size()));
        const DeviceMemory written_from(source);
        const DeviceMemory written(source);
        const HeadStrides strides{.batch = 0, .token = dim, .head = dim};
        RotaryArgs before;
        before.q = {.in = written_from.data(),
                    .out = written.data(),
                    .heads = 1,
                    .in_strides = strides,
                    .out_strides = strides};
        before.positions = {.data = positions.data(), .token_stride = 0};
        before.table = table.as<uint64_t>();
        before.batch = 1;
        before.tokens = heads_before;
        before.head_dim = before.rotary_dim = dim;
        before.dtype = DType::float32;
        for (const RotaryPlan& plan : every_plan(rotary.args())) {
            SCOPED_TRACE(describe(plan));
            DeviceCase device(rotary);
            RotaryArgs args = device.args();
            args.choice.index = written.as<int32_t>() + (source.size() - indices.size());
            const Stream stream;
            const Recording recording(stream, [&](cudaStream_t on) {
                rotary_cuda(before, on);
                rotary_cuda(args, plan, on);
            });
            // Repeated, since the first time loads the kernels, without overlap.
            for (int i = 0; i < 4; ++i) {
                check(cudaMemsetAsync(written.data(), 0x7f, source.size() * sizeof(int32_t), stream));
                recording.play(stream);
                device.fetch();
                rotary.expect_rotated();
                if (HasFailure()) return;
            }
        }
    }
}

// Slices are launches of one call.
TEST_F(RotaryLaunchesCuda, TheLogNamesOpShapeAndKernel) {
    CaseOptions o;
    o.dtype = DType::bfloat16;
    o.tokens = 5;
    o.q_heads = 4;
    o.k_heads = 2;
    o.head_dim = o.rotary_dim = 64;
    RotaryCase rotary(o);
    DeviceCase device(rotary);
    RotaryPlan planned = plan(shape_of(device.args()), current_device());
    planned.tokens_per_launch = 3;
    collect_launches(true);
    rotary_cuda(device.args(), planned, nullptr);
    const std::vector<std::string> lines = collect_launches(false);
    rotary_cuda(device.args(), planned, nullptr);
    ASSERT_EQ(lines.size(), 2u * static_cast<size_t>(o.batch));
    for (const std::string& line : lines) {
        EXPECT_NE(line.find("rotary: " + std::to_string(o.batch) +
                            " x 5 tokens, heads 4/2 of 64, bfloat16, halves -> "
                            "rotary_kernel<bfloat16_t, "),
                  std::string::npos)
            << line;
    }
    EXPECT_TRUE(collect_launches(false).empty());
}

TEST_F(RotaryLaunchesCuda, EmptyTensorsLaunchNothing) {
    const Stream stream;
    for (const auto& [batch, tokens, heads] : {std::tuple{0, 5, 2}, {2, 0, 2}, {2, 5, 0}, {0, 0, 0}}) {
        RotaryArgs args;
        args.batch = batch;
        args.tokens = tokens;
        args.q.heads = heads;
        args.head_dim = args.rotary_dim = 64;
        const Recording recording(stream, [&](cudaStream_t on) { rotary_cuda(args, on); });
        EXPECT_EQ(recording.launches(), 0u) << batch << " " << tokens << " " << heads;
    }
}

// --- offsets

TEST_F(RotaryLaunchesCuda, SlicesGiveWhatOneLaunchGives) {
    for (uint64_t seed = 500; seed < 530; ++seed) {
        const CaseOptions options = random_options(seed);
        RotaryCase whole(options);
        DeviceCase whole_on_device(whole);
        rotary_cuda(whole_on_device.args(), nullptr);
        whole_on_device.fetch();

        RotaryCase sliced(options);
        DeviceCase sliced_on_device(sliced);
        const int64_t tokens_per_launch = std::min<int64_t>(2, options.tokens);
        for_each_launch(sliced_on_device.args(), tokens_per_launch,
                        [](const RotaryArgs& part) { rotary_cuda(part, nullptr); });
        sliced_on_device.fetch();
        EXPECT_TRUE(sliced.output(sliced.q()).bytes == whole.output(whole.q()).bytes) << describe(options);
        EXPECT_TRUE(sliced.output(sliced.k()).bytes == whole.output(whole.k()).bytes) << describe(options);
    }
}

bool has_room_for(size_t bytes) {
    size_t available = 0, total = 0;
    check(cudaMemGetInfo(&available, &total));
    return available >= bytes + (size_t{1} << 28);
}

TEST_F(RotaryLaunchesCuda, IndicesTwoToThe31ElementsApart) {
    constexpr int64_t tokens = 3;
    constexpr int32_t far_stride = 1 << 30;
    constexpr size_t bytes = ((tokens - 1) * far_stride + 1) * sizeof(int32_t);
    if (!has_room_for(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";

    CaseOptions o;
    o.dtype = DType::bfloat16;
    o.tokens = tokens;
    o.tables = {.table_for = TableFor::each_index, .count = 4};
    RotaryCase rotary(o);
    const DeviceMemory far(bytes);
    for (int64_t t = 0; t < tokens; ++t) {
        const int32_t* near = rotary.indices().words().data() + t * rotary.indices().token_stride();
        check(cudaMemcpy(far.data() + t * far_stride * sizeof(int32_t), near, sizeof(int32_t), cudaMemcpyHostToDevice));
    }
    for (const RotaryPlan& plan : every_plan(rotary.args())) {
        SCOPED_TRACE(describe(plan));
        DeviceCase device(rotary);
        RotaryArgs args = device.args();
        args.choice.index = far.as<int32_t>();
        args.choice.token_stride = far_stride;
        rotary_cuda(args, plan, nullptr);
        device.fetch();
        rotary.expect_rotated();
    }
}

TEST_F(RotaryLaunchesCuda, TokensMoreThanTwoToThe31ElementsApart) {
    constexpr int dim = 64;
    constexpr int64_t far_stride = (int64_t{1} << 31) + 8;
    constexpr size_t bytes = 2 * (far_stride + dim);
    if (!has_room_for(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";

    CaseOptions o;
    o.dtype = DType::bfloat16;
    o.tokens = 2;
    o.q_heads = 1;
    o.k_heads = 0;
    o.head_dim = o.rotary_dim = dim;
    o.in_place = true;
    RotaryCase rotary(o);
    DeviceCase near(rotary);
    const DeviceMemory far(bytes);
    const HeadBuffer& buffer = rotary.q().in;
    const auto token_in_buffer = [&](int64_t t) { return buffer.first_byte + t * dim * 2; };
    for (const int64_t tokens_per_launch : {2, 1}) {
        for (int64_t t = 0; t < 2; ++t) {
            check(cudaMemcpy(far.data() + t * far_stride * 2, rotary.q().in.before.data() + token_in_buffer(t), dim * 2,
                             cudaMemcpyHostToDevice));
        }
        RotaryArgs args = near.args();
        args.q.in = args.q.out = far.data();
        args.q.in_strides.token = args.q.out_strides.token = far_stride;
        for_each_launch(args, tokens_per_launch, [](const RotaryArgs& part) { rotary_cuda(part, nullptr); });
        rotary.q().in.bytes = rotary.q().in.before;
        for (int64_t t = 0; t < 2; ++t) {
            check(cudaMemcpy(rotary.q().in.bytes.data() + token_in_buffer(t), far.data() + t * far_stride * 2, dim * 2,
                             cudaMemcpyDeviceToHost));
        }
        rotary.expect_rotated();
    }
}

}  // namespace
}  // namespace mrrope
