#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_case.h"
#include "device_memory.h"
#include "every_plan.h"
#include "launch_slices.h"
#include "mrrope/launch_log.h"
#include "mrrope/rotary.h"
#include "on_gpu.h"
#include "rotary_case.h"
#include "rotary_plan.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

class RotaryCuda : public OnGpu {
protected:
    // Both are within one rounding of the same reference, so they differ by at most one unit in the last place.
    static void expect_as_on_cpu(RotaryCase& on_gpu) {
        const CaseOptions& options = on_gpu.options();
        SCOPED_TRACE(describe(options));
        RotaryCase on_cpu(options);
        rotary_cpu(on_cpu.args());
        const Format format = format_of(options.dtype);
        for (const bool is_q : {true, false}) {
            const HeadBuffer& gpu = on_gpu.output(is_q ? on_gpu.q() : on_gpu.k());
            const HeadBuffer& cpu = on_cpu.output(is_q ? on_cpu.q() : on_cpu.k());
            gpu.for_each_head([&](int64_t batch, int64_t token, int head) {
                for (int at = 0; at < options.head_dim; ++at) {
                    const auto value = [&](const HeadBuffer& heads) {
                        return element_at(options.dtype,
                                          heads.head(batch, token, head) + int64_t{at} * size_of(options.dtype));
                    };
                    const double expected = value(cpu);
                    const double slack = std::ldexp(std::abs(expected), 1 - format.significant_bits) +
                                         2 * 6.0 * options.attention_factor * format.arithmetic_error;
                    ASSERT_NEAR(value(gpu), expected, slack) << batch << " " << token << " " << head << " " << at;
                }
            });
            gpu.expect_untouched_outside_heads();
        }
    }

    static void rotate_and_expect(const CaseOptions& options) {
        RotaryCase rotary(options);
        DeviceCase device(rotary);
        rotary_cuda(device.args(), nullptr);
        device.fetch();
        rotary.expect_rotated();
    }

    static void rotate_by_every_kernel_and_expect(const CaseOptions& options) {
        for (const RotaryPlan& plan : every_plan(RotaryCase(options).args())) {
            SCOPED_TRACE(describe(plan));
            RotaryCase rotary(options);
            DeviceCase device(rotary);
            rotary_cuda(device.args(), plan, nullptr);
            device.fetch();
            rotary.expect_rotated();
        }
    }
};

// --- against the reference that rotary_cpu is tested against

TEST_F(RotaryCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 250 && !HasFailure(); ++seed) rotate_and_expect(random_options(seed));
}

TEST_F(RotaryCuda, FastHeadDims) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const int head_dim : {64, 80, 96, 120, 128, 192, 256, 512}) {
                CaseOptions o;
                o.dtype = dtype;
                o.pairing = pairing;
                o.q_heads = 4;
                o.k_heads = 2;
                o.head_dim = o.rotary_dim = head_dim;
                o.in_place = head_dim % 64 == 0;
                rotate_and_expect(o);
                o.tokens = 700;
                // float64 is for gradient checks, not for speed: it is rotated by single components.
                ASSERT_EQ(plan(shape_of(RotaryCase(o).args()), h200).vector > 1, dtype != DType::float64);
                rotate_and_expect(o);
            }
        }
    }
}

TEST_F(RotaryCuda, ManyTokensOfFewAndOfManyHeads) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const auto& [tokens, heads, head_dim] :
                 {std::tuple{1030, 3, 512}, {260, 9, 64}, {5, 40, 64}, {270, 1, 256}}) {
                for (const int64_t misalignment : {0, 1}) {
                    CaseOptions o;
                    o.dtype = dtype;
                    o.pairing = pairing;
                    o.tokens = tokens;
                    o.q_heads = heads;
                    o.k_heads = 0;
                    o.head_dim = o.rotary_dim = head_dim;
                    o.in_place = true;
                    o.in.misalignment = misalignment;
                    RotaryCase rotary(o);
                    DeviceCase device(rotary);
                    rotary_cuda(device.args(), nullptr);
                    device.fetch();
                    expect_as_on_cpu(rotary);
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// Vectors of every size and single components; every number of heads per thread, with a remainder; every lookup.
TEST_F(RotaryCuda, EveryKernel) {
    constexpr int many_tables = 20;
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const int64_t misalignment : {0, 1}) {
                for (const int64_t rows : {0, 3}) {
                    for (const auto& [table_for, tables] : {std::pair{TableFor::all, 1},
                                                            {TableFor::each_index, 4},
                                                            {TableFor::each_index, many_tables}}) {
                        CaseOptions o;
                        o.dtype = dtype;
                        o.pairing = pairing;
                        o.tokens = 37;
                        o.q_heads = 5;
                        o.k_heads = 2;
                        o.head_dim = o.rotary_dim = 128;
                        o.in_place = true;
                        o.in.misalignment = misalignment;
                        o.position_rows = rows;
                        o.tables = {.table_for = table_for, .count = tables};
                        rotate_by_every_kernel_and_expect(o);
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

// Groups of one to five heads per table, which leave remainders to two, three and five heads per thread.
TEST_F(RotaryCuda, HeadTablesByEveryKernel) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const auto& [tables, q_per_table, k_per_table, has_query_factors] : {std::tuple{3, 1, 0, false},
                                                                                      {8, 4, 1, true},
                                                                                      {3, 3, 1, true},
                                                                                      {2, 1, 1, false},
                                                                                      {2, 2, 3, true},
                                                                                      {1, 3, 2, true}}) {
                for (const TableFor table_for : {TableFor::all, TableFor::each_sequence, TableFor::each_index}) {
                    for (const int64_t rows : {0, 3}) {
                        for (const int64_t misalignment : {0, 1}) {
                            CaseOptions o;
                            o.dtype = dtype;
                            o.pairing = pairing;
                            o.batch = 2;
                            o.tokens = 7;
                            o.q_heads = tables * q_per_table;
                            o.k_heads = tables * k_per_table;
                            o.head_dim = 80;
                            o.rotary_dim = 64;
                            o.in.misalignment = misalignment;
                            o.position_rows = rows;
                            o.tables = {.table_for = table_for,
                                        .count = 3,
                                        .padding = misalignment,
                                        .heads = tables,
                                        .has_query_factors = has_query_factors};
                            rotate_by_every_kernel_and_expect(o);
                            if (HasFailure()) return;
                        }
                    }
                }
            }
        }
    }
}

// Enough tokens for the plans of prefill, and for slices. On an H200, 300 tokens go five heads per thread.
TEST_F(RotaryCuda, HeadTablesOfManyTokens) {
    for (const auto& [tokens, tables, q_per_table, head_dim] :
         {std::tuple{2000, 8, 4, 128}, {2000, 3, 3, 64}, {300, 8, 4, 128}}) {
        CaseOptions o;
        o.dtype = DType::bfloat16;
        o.tokens = tokens;
        o.q_heads = tables * q_per_table;
        o.k_heads = tables;
        o.head_dim = o.rotary_dim = head_dim;
        o.tables.heads = tables;
        for (const bool has_query_factors : {false, true}) {
            o.tables.has_query_factors = has_query_factors;
            ASSERT_GT(plan(shape_of(RotaryCase(o).args()), current_device()).heads_per_thread, 1);
            rotate_and_expect(o);
        }
    }
}

// A token is rotated to the same bits by every kernel, so the rest of its batch does not matter.
TEST_F(RotaryCuda, AllKernelsGiveTheSameBits) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const auto& [table_for, head_tables, has_query_factors] : {std::tuple{TableFor::all, 1, false},
                                                                            {TableFor::each_index, 1, false},
                                                                            {TableFor::each_index, 1, true},
                                                                            {TableFor::all, 2, false}}) {
                CaseOptions o;
                o.dtype = dtype;
                o.pairing = pairing;
                o.tokens = 64;
                o.q_heads = 8;
                o.k_heads = 2;
                o.head_dim = o.rotary_dim = 128;
                o.attention_factor = 1.3;
                o.in_place = true;
                o.tables = {
                    .table_for = table_for, .count = 4, .heads = head_tables, .has_query_factors = has_query_factors};
                std::vector<std::byte> first;
                for (const RotaryPlan& plan : every_plan(RotaryCase(o).args())) {
                    RotaryCase rotary(o);
                    DeviceCase device(rotary);
                    rotary_cuda(device.args(), plan, nullptr);
                    device.fetch();
                    if (first.empty()) first = rotary.q().in.bytes;
                    EXPECT_EQ(rotary.q().in.bytes, first) << describe(plan) << ", " << describe(o);
                }
            }
        }
    }
}

// With one and several heads per thread, and with a remainder.
TEST_F(RotaryCuda, PartialRotationCopiesTheTail) {
    for (const DType dtype : all_dtypes) {
        for (const auto& [head_dim, rotary_dim] :
             {std::pair{128, 64}, {96, 32}, {80, 64}, {17, 16}, {100, 2}, {256, 16}}) {
            for (const bool in_place : {false, true}) {
                CaseOptions o;
                o.dtype = dtype;
                o.head_dim = head_dim;
                o.rotary_dim = rotary_dim;
                o.in_place = in_place;
                rotate_by_every_kernel_and_expect(o);
            }
        }
    }
}

TEST_F(RotaryCuda, UnalignedPointersAndOddStrides) {
    for (const DType dtype : all_dtypes) {
        for (int64_t misalignment = 0; misalignment < 8; ++misalignment) {
            CaseOptions o;
            o.dtype = dtype;
            o.head_dim = o.rotary_dim = 64;
            o.in = {.order = "bhs", .padding = misalignment % 3, .misalignment = misalignment};
            o.out = {.order = "bsh", .misalignment = 7 - misalignment};
            rotate_and_expect(o);
        }
    }
}

// --- several tables and positions with rows

TEST_F(RotaryCuda, ChosenTablesAndPositionRows) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const TableFor table_for : {TableFor::all, TableFor::each_sequence, TableFor::each_index}) {
                for (const int64_t rows : {0, 1, 3}) {
                    for (const int64_t misalignment : {0, 1}) {
                        CaseOptions o;
                        o.dtype = dtype;
                        o.pairing = pairing;
                        o.batch = 3;
                        o.q_heads = 3;
                        o.k_heads = 2;
                        o.head_dim = 80;
                        o.rotary_dim = 64;
                        o.in.misalignment = misalignment;
                        o.position_rows = rows;
                        o.tables = {.table_for = table_for, .count = 3, .padding = misalignment};
                        rotate_by_every_kernel_and_expect(o);
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

// Indices on a GPU are not validated: out-of-range ones must be clamped to the tables.
TEST_F(RotaryCuda, IndicesOutOfRangeStayWithinTheTables) {
    for (const auto& [rows, head_tables] : {std::pair{0, 1}, {0, 2}, {2, 1}, {2, 2}}) {
        CaseOptions o;
        o.tokens = 6;
        o.k_heads = 2;
        o.position_rows = rows;
        o.tables = {.table_for = TableFor::each_index, .count = 3, .heads = head_tables};
        for (const RotaryPlan& plan : every_plan(RotaryCase(o).args())) {
            SCOPED_TRACE(describe(plan));
            RotaryCase rotary(o);
            std::vector<int32_t>& indices = rotary.indices().words();
            std::fill(indices.begin(), indices.end(), 2);
            const std::vector<int32_t> in_range = indices;
            const int32_t wrong[] = {
                3, -1, 1 << 20, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), 1000};
            std::copy(std::begin(wrong), std::end(wrong), indices.begin());
            DeviceCase device(rotary);
            indices = in_range;
            rotary_cuda(device.args(), plan, nullptr);
            device.fetch();
            rotary.expect_rotated();
        }
    }
}

TEST_F(RotaryCuda, RowsOutOfRangeStayWithinThePositions) {
    constexpr uint64_t one_in_every_byte = 0x0101010101010101;
    for (const auto& [head_dim, rows] : {std::pair{128, 3}, {128, 5}, {6, 3}}) {  // vectors, then single components
        for (const int wrong_row : {5, 127}) {
            for (const bool negated : {false, true}) {  // negated tables have negated words, whose sign is ignored
                CaseOptions o;
                o.head_dim = o.rotary_dim = head_dim;
                o.position_rows = rows;
                RotaryCase rotary(o);
                const auto first = rotary.tables().words().begin() + rotary.tables().first_row_word();
                const uint64_t wrong = one_in_every_byte * wrong_row;
                std::fill_n(first, o.rotary_dim / 2, negated ? 0 - wrong : wrong);
                DeviceCase device(rotary);
                std::fill_n(first, o.rotary_dim / 2, one_in_every_byte * (rows - 1));
                rotary_cuda(device.args(), nullptr);
                device.fetch();
                SCOPED_TRACE(std::to_string(wrong_row) + (negated ? " negated" : ""));
                rotary.expect_rotated();
                if (HasFailure()) return;
            }
        }
    }
}

// --- streams and launches

TEST_F(RotaryCuda, RotatesQueriesAndKeysInOneLaunchThatAGraphCanReplay) {
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
TEST_F(RotaryCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const auto& [table_for, head_tables] :
         {std::pair{TableFor::all, 1}, {TableFor::each_index, 1}, {TableFor::each_index, 2}}) {
        for (const int64_t tokens : {1, 700}) {
            CaseOptions o;
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
TEST_F(RotaryCuda, IndicesThatThePrecedingKernelWrites) {
    constexpr int dim = 128;
    constexpr int64_t heads_before = 20000;
    constexpr int32_t tables = 4;
    const DeviceMemory positions(std::vector<int64_t>(1, 0));
    const DeviceMemory table(
        packed(build_table({.method = Method::rope, .rotary_dim = dim, .base = 1e4, .original_max_position = 4096})));
    for (const auto& [tokens, head_tables] : {std::pair{1, 1}, {1, 2}, {40, 1}, {40, 2}, {700, 1}, {700, 2}}) {
        CaseOptions o;
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
TEST_F(RotaryCuda, TheLogNamesOpShapeAndKernel) {
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

TEST_F(RotaryCuda, EmptyTensorsLaunchNothing) {
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

TEST_F(RotaryCuda, SlicesGiveWhatOneLaunchGives) {
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
    size_t available = 0;
    size_t total = 0;
    check(cudaMemGetInfo(&available, &total));
    return available >= bytes + (size_t{1} << 28);
}

TEST_F(RotaryCuda, IndicesTwoToThe31ElementsApart) {
    constexpr int64_t tokens = 3;
    constexpr int32_t far_stride = 1 << 30;
    constexpr size_t bytes = ((tokens - 1) * far_stride + 1) * sizeof(int32_t);
    if (!has_room_for(bytes)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";

    CaseOptions o;
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

TEST_F(RotaryCuda, TokensMoreThanTwoToThe31ElementsApart) {
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
