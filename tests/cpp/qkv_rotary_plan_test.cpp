#include "qkv_rotary_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "accumulator_layout.h"
#include "devices.h"

namespace mrrope {
namespace {

using testing::h200;

QkvRotaryShape llama(int64_t rows) {
    return {.rows = rows,
            .inputs = 4096,
            .outputs = 6144,
            .head_dim = 128,
            .rotary_dim = 128,
            .dtype = DType::bfloat16,
            .pairing = Pairing::halves,
            .aligned = true};
}

bool is_fused(const QkvRotaryShape& shape, const Device& device = h200) {
    return plan(shape, device).kernel != QkvRotaryPlan::unfused;
}

template <class F>
void for_each_shape(F&& f) {
    for (const Pairing pairing : {Pairing::halves, Pairing::interleaved}) {
        for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
            for (const int head_dim : {32, 64, 80, 96, 128, 192, 256}) {
                for (const int rotary_dim : {16, 20, 32, 64, 96, 128}) {
                    if (rotary_dim > head_dim) continue;
                    for (const int heads : {3, 10, 20, 48}) {
                        for (const int inputs : {64, 100, 2048, 8192}) {
                            for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{129}, int64_t{4096},
                                                       int64_t{100000}, int64_t{1} << 40}) {
                                for (const bool aligned : {false, true}) {
                                    f(QkvRotaryShape{.rows = rows,
                                                     .inputs = inputs,
                                                     .outputs = heads * head_dim,
                                                     .head_dim = head_dim,
                                                     .rotary_dim = rotary_dim,
                                                     .dtype = dtype,
                                                     .pairing = pairing,
                                                     .aligned = aligned});
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(QkvRotaryPlan, EveryPlanNamesAKernelOfItsPairingThatCanDoIt) {
    int fused = 0;
    for_each_shape([&](const QkvRotaryShape& shape) {
        const QkvRotaryPlan planned = plan(shape, h200);
        if (planned.kernel == QkvRotaryPlan::unfused) return;
        ++fused;
        ASSERT_GE(planned.kernel, 0);
        ASSERT_LT(planned.kernel, qkv_kernel_count);
        ASSERT_EQ(qkv_kernels[planned.kernel].pairing, shape.pairing);
        ASSERT_TRUE(can_fuse(shape, h200));
        ASSERT_TRUE(planned.swizzle == 1 || planned.swizzle == 2 || planned.swizzle == 4 || planned.swizzle == 8)
            << planned.swizzle;
    });
    EXPECT_GT(fused, 0);
}

// The epilogue relies on it: a visit in `interleaved` pairing is rotated as a whole or not at all, and one in `halves`
// pairing holds both components of every pair.
TEST(QkvRotaryPlan, FusedHeadsFitEpilogueVisits) {
    for_each_shape([&](const QkvRotaryShape& shape) {
        if (!can_fuse(shape, h200)) return;
        const int columns = epilogue_columns(shape.pairing);
        for (int start = 0; start < shape.outputs; start += columns) {
            for (int column = start; column < start + columns && column < shape.outputs; ++column) {
                const int component = column % shape.head_dim;
                if (shape.pairing == Pairing::interleaved) {
                    ASSERT_EQ(component < shape.rotary_dim, start % shape.head_dim < shape.rotary_dim);
                } else if (component < shape.rotary_dim) {
                    const int half = shape.rotary_dim / 2;
                    const int partner = component < half ? column + half : column - half;
                    ASSERT_EQ(partner / columns, start / columns);
                    ASSERT_EQ(half % 8, 0);
                }
            }
        }
    });
}

TEST(QkvRotaryPlan, TilesAreMadeOfWholeVisits) {
    for (const QkvKernel& kernel : qkv_kernels) {
        EXPECT_EQ(qkv_tile % epilogue_columns(kernel.pairing), 0) << describe(kernel);
    }
}

// The transposed epilogue relies on it: a tile is one head's rotated part or outside of all of them, and partners are
// 64 components apart.
TEST(QkvRotaryPlan, TransposedTilesHoldWholeRotations) {
    for (const QkvKernel& kernel : qkv_kernels) {
        if (!kernel.transposed) continue;
        EXPECT_EQ(kernel.pairing, Pairing::halves) << describe(kernel);
        EXPECT_EQ(kernel.tile_tokens % 32, 0) << describe(kernel);
        int supported = 0;
        for_each_shape([&](const QkvRotaryShape& shape) {
            if (!can_fuse(shape, h200) || !supports(kernel, shape)) return;
            ++supported;
            ASSERT_EQ(shape.rotary_dim / 2, 64);
            ASSERT_EQ(shape.head_dim % qkv_tile, 0);
        });
        EXPECT_GT(supported, 0) << describe(kernel);
    }
}

TEST(QkvRotaryPlan, KernelsHaveNamesOfTheirOwn) {
    std::set<std::string> names;
    for (const QkvKernel& kernel : qkv_kernels) names.insert(describe(kernel));
    EXPECT_EQ(names.size(), size_t{qkv_kernel_count});
}

QkvRotaryShape qwen(int64_t rows) {
    QkvRotaryShape shape = llama(rows);
    shape.inputs = 2048;
    shape.outputs = 2560;
    return shape;
}

QkvRotaryShape llama_70b(int64_t rows) {
    QkvRotaryShape shape = llama(rows);
    shape.inputs = 8192;
    shape.outputs = 1280;
    return shape;
}

// As measured.
TEST(QkvRotaryPlan, IsFusedWhereThatIsFaster) {
    for (const auto of : {llama, qwen, llama_70b}) {
        for (const int64_t rows : {2048, 8192, 32768})
            EXPECT_TRUE(is_fused(of(rows))) << of(rows).outputs << " " << rows;
        for (const int64_t rows : {1, 16, 64, 256, 512})
            EXPECT_FALSE(is_fused(of(rows))) << of(rows).outputs << " " << rows;
    }
}

// Wave quantization: a partial last wave costs as much as a full one.
TEST(QkvRotaryPlan, IsNotFusedWhereTheLastWaveIsNearlyEmpty) {
    QkvRotaryShape shape = llama(512);
    for (const auto& [heads, fused] : {std::pair{30, false}, {31, true}, {33, true}, {34, false}}) {
        shape.outputs = heads * 128;
        EXPECT_EQ(scheduled_tiles(qkv_kernels[0], shape, 1), 4 * heads);
        EXPECT_EQ(is_fused(shape), fused) << heads;
    }
}

TEST(QkvRotaryPlan, TakesTheTilesThatLeaveLeastIdle) {
    const auto tokens = [](const QkvRotaryShape& shape) { return qkv_kernels[plan(shape, h200).kernel].tile_tokens; };
    EXPECT_EQ(tokens(llama(2048)), 128);      // 6 waves of 128, or 5 of 160
    EXPECT_EQ(tokens(llama(8192)), 160);      // 24 or 19
    EXPECT_EQ(tokens(qwen(2048)), 160);       // 3 or 2
    EXPECT_EQ(tokens(qwen(32768)), 128);      // 39 or 32
    EXPECT_EQ(tokens(llama_70b(8192)), 160);  // 5 or 4, which cost the same: the wider tile
    QkvRotaryShape short_rotation = qwen(8192);
    short_rotation.rotary_dim = 64;
    EXPECT_EQ(tokens(short_rotation), 128);
}

// The fastest as measured, unless its padding costs a wave.
TEST(QkvRotaryPlan, SwizzleCostsNoWave) {
    const auto swizzle = [](const QkvRotaryShape& shape) { return plan(shape, h200).swizzle; };
    EXPECT_EQ(swizzle(llama(2048)), 2);
    EXPECT_EQ(swizzle(llama(8192)), 4);
    EXPECT_EQ(swizzle(llama(32768)), 2);
    EXPECT_EQ(swizzle(qwen(2048)), 1);
    EXPECT_EQ(swizzle(qwen(32768)), 4);
    EXPECT_EQ(swizzle(llama_70b(8192)), 1);
    EXPECT_EQ(swizzle(llama_70b(32768)), 1);
}

// For any number of rows; CUTLASS's rounding of tiles is computed here independently.
TEST(QkvRotaryPlan, LeavesFewSmsIdle) {
    int fused = 0;
    for (const auto of : {llama, qwen, llama_70b}) {
        for (int64_t rows = 257; rows < 20000; rows += 7) {
            const QkvRotaryShape shape = of(rows);
            const QkvRotaryPlan planned = plan(shape, h200);
            if (planned.kernel == QkvRotaryPlan::unfused) continue;
            ++fused;
            const QkvKernel& kernel = qkv_kernels[planned.kernel];
            int64_t m = (rows + kernel.tile_tokens - 1) / kernel.tile_tokens;
            int64_t n = shape.outputs / 128;
            if (kernel.transposed) std::swap(m, n);
            while (m % (2 * planned.swizzle) != 0) ++m;
            while (n % planned.swizzle != 0) ++n;
            const double cost = static_cast<double>((m * n + 131) / 132 * kernel.tile_tokens);
            ASSERT_LE(cost, 1.08 * static_cast<double>(rows * shape.outputs) / (128 * 132)) << rows;
        }
    }
    EXPECT_GT(fused, 5000);
}

TEST(QkvRotaryPlan, FallsBackWhereNoKernelSupportsTheShape) {
    const auto with = [](auto change) {
        QkvRotaryShape shape = llama(8192);
        change(shape);
        return shape;
    };
    EXPECT_FALSE(is_fused(llama(8192), testing::a100));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.dtype = DType::float32; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.aligned = false; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.inputs = 4100; })));
    EXPECT_FALSE(
        is_fused(with([](auto& s) { s.inputs = 0; })));  // the main loop would wait for a product that is never started
    EXPECT_FALSE(is_fused(with([](auto& s) { s.head_dim = s.rotary_dim = 96; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.rotary_dim = 96; })));
    EXPECT_TRUE(is_fused(with([](auto& s) { s.rotary_dim = 64; })));
    EXPECT_TRUE(is_fused(with([](auto& s) { s.dtype = DType::float16; })));
    EXPECT_TRUE(is_fused(with([](auto& s) {
        s.head_dim = s.rotary_dim = 96;
        s.pairing = Pairing::interleaved;
    })));
}

TEST(QkvRotaryPlan, CountsTilePadding) {
    constexpr QkvKernel wide{Pairing::halves, /*transposed=*/true, 160};
    EXPECT_EQ(scheduled_tiles({Pairing::halves}, llama(1), 1), 2 * 48);  // clusters of two
    EXPECT_EQ(scheduled_tiles({Pairing::halves}, llama(129), 1), 2 * 48);
    EXPECT_EQ(scheduled_tiles({Pairing::halves}, llama(1408), 1), 12 * 48);
    EXPECT_EQ(scheduled_tiles({Pairing::halves}, llama(1408), 4), 16 * 48);
    EXPECT_EQ(scheduled_tiles({Pairing::halves}, llama(8192), 8), 64 * 48);
    EXPECT_EQ(scheduled_tiles(wide, llama(8192), 4), 52 * 48);
    EXPECT_EQ(scheduled_tiles(wide, llama_70b(2048), 1), 13 * 10);
    EXPECT_EQ(scheduled_tiles(wide, llama_70b(2048), 2), 14 * 12);
}

// --- accumulator layout of the epilogues

constexpr int quad_lanes = 4;  // threads that share a row

TEST(Accumulators, CoverEveryColumnOnce) {
    for (const int columns : {32, 128}) {
        std::set<std::pair<int, int>> seen;
        for (int quad_lane = 0; quad_lane < quad_lanes; ++quad_lane) {
            for (int i = 0; i < columns / 8 * AccumulatorLayout::per_group; ++i) {
                const auto place = std::pair(AccumulatorLayout::row(i), AccumulatorLayout::column(quad_lane, i));
                EXPECT_LT(place.first, 2);
                EXPECT_LT(place.second, columns);
                EXPECT_TRUE(seen.insert(place).second) << place.first << " " << place.second;
            }
        }
        EXPECT_EQ(seen.size(), size_t{2} * columns);
    }
}

TEST(Accumulators, OfInterleavedPairsAreNeighbours) {
    std::set<std::pair<int, int>> seen;
    for (int quad_lane = 0; quad_lane < quad_lanes; ++quad_lane) {
        for (int group = 0; group < epilogue_columns(Pairing::interleaved) / 8; ++group) {
            for (int row = 0; row < 2; ++row) {
                const int first = InterleavedAccumulators::first(group, row);
                const int pair = InterleavedAccumulators::pair(quad_lane, group);
                for (const int odd : {0, 1}) {
                    EXPECT_EQ(AccumulatorLayout::row(first + odd), row);
                    EXPECT_EQ(AccumulatorLayout::column(quad_lane, first + odd), 2 * pair + odd);
                }
                EXPECT_TRUE(seen.insert({row, pair}).second);
            }
        }
    }
    EXPECT_EQ(seen.size(), size_t{2} * epilogue_columns(Pairing::interleaved) / 2);
}

template <int distance>
void expect_halves() {
    using Layout = HalvesAccumulators<distance>;
    constexpr int blocks = epilogue_columns(Pairing::halves) / Layout::columns;
    std::set<std::pair<int, int>> seen;
    for (int quad_lane = 0; quad_lane < quad_lanes; ++quad_lane) {
        for (int block = 0; block < blocks; ++block) {
            for (int group = 0; group < distance; ++group) {
                for (int j = 0; j < AccumulatorLayout::per_group; ++j) {
                    const int first = Layout::first(block, group, j);
                    const int second = Layout::second(block, group, j);
                    const int pair = Layout::first_pair(quad_lane, group) + j % 2;
                    EXPECT_EQ(AccumulatorLayout::row(first), j / 2);
                    EXPECT_EQ(AccumulatorLayout::row(second), j / 2);
                    EXPECT_EQ(AccumulatorLayout::column(quad_lane, first), block * Layout::columns + pair);
                    EXPECT_EQ(AccumulatorLayout::column(quad_lane, second),
                              block * Layout::columns + pair + Layout::columns / 2);
                    EXPECT_TRUE(seen.insert({j / 2, block * Layout::columns + pair}).second);
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), size_t{2} * epilogue_columns(Pairing::halves) / 2);
}

TEST(Accumulators, OfHalvesAreHalfARotationApart) {
    expect_halves<8>();  // rotary_dim 128
    expect_halves<4>();  // rotary_dim 64: two heads per visit
}

TEST(Accumulators, TransposedCoverEveryComponentOfEveryToken) {
    using Layout = TransposedAccumulators;
    constexpr int tokens = 160;
    std::set<std::pair<int, int>> seen;
    for (int thread = 0; thread < 128; ++thread) {
        const int lane = thread % 32;
        for (int group = 0; group < tokens / 8; ++group) {
            for (const int odd : {0, 1}) {
                const int token = AccumulatorLayout::column(lane % 4, group * AccumulatorLayout::per_group + odd);
                EXPECT_EQ(32 * Layout::batch_of(group) + Layout::holder(lane, group, odd), token);
                for (const int lower : {0, 1}) {
                    const int component = Layout::first_component(thread) + Layout::component_offset(lower, 0);
                    EXPECT_LT(component, 64);
                    EXPECT_EQ(Layout::component_offset(lower, 1) - Layout::component_offset(lower, 0), 64);
                    EXPECT_TRUE(seen.insert({token, component}).second);
                }
            }
        }
    }
    EXPECT_EQ(seen.size(), size_t{tokens} * 64);
}

TEST(QkvRotaryPlan, RowsAreAlignedOnlyIfAllOfThemAre) {
    QkvRotaryArgs args;
    args.x = reinterpret_cast<void*>(4096);
    args.weight = reinterpret_cast<void*>(8192);
    args.x_stride = args.weight_stride = args.inputs = 4096;
    args.batch = 2;
    args.tokens = 4;
    args.q_heads = 32;
    args.kv_heads = 8;
    args.head_dim = args.rotary_dim = 128;
    EXPECT_TRUE(shape_of(args).aligned);
    EXPECT_EQ(shape_of(args).rows, 8);
    EXPECT_EQ(shape_of(args).outputs, 6144);
    args.x_stride = 4097;
    EXPECT_FALSE(shape_of(args).aligned);
    args.x_stride = 4096;
    args.weight = reinterpret_cast<void*>(8194);
    EXPECT_FALSE(shape_of(args).aligned);
}

}  // namespace
}  // namespace mrrope
