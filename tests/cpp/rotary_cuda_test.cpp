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
    for (const auto& [dtype, rows, head_tables] : {std::tuple{DType::float32, 0, 1},
                                                   {DType::bfloat16, 0, 1},
                                                   {DType::bfloat16, 0, 2},
                                                   {DType::bfloat16, 2, 1},
                                                   {DType::bfloat16, 2, 2}}) {
        CaseOptions o;
        o.dtype = dtype;
        o.tokens = 6;
        o.q_heads = 8;
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
                o.dtype = DType::bfloat16;
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

}  // namespace
}  // namespace mrrope
