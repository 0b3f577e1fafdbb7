#include "qkv_rotary_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>

namespace mrrope {
namespace {

constexpr QkvDevice h200{.has_wgmma = true, .multiprocessors = 132};

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

bool is_fused(const QkvRotaryShape& shape, const QkvDevice& device = h200) {
    return plan_qkv_rotary(shape, device).kernel != QkvRotaryPlan::unfused;
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
        const QkvRotaryPlan plan = plan_qkv_rotary(shape, h200);
        if (plan.kernel == QkvRotaryPlan::unfused) return;
        ++fused;
        ASSERT_GE(plan.kernel, 0);
        ASSERT_LT(plan.kernel, qkv_kernel_count);
        ASSERT_EQ(qkv_kernels[plan.kernel].pairing, shape.pairing);
        ASSERT_TRUE(can_fuse(shape, h200));
        ASSERT_TRUE(plan.swizzle == 1 || plan.swizzle == 2 || plan.swizzle == 4 || plan.swizzle == 8) << plan.swizzle;
    });
    EXPECT_GT(fused, 0);
}

// What the epilogue takes for granted: a visit lies in columns that turn alike, and holds both of every pair.
TEST(QkvRotaryPlan, FusedHeadsFitWhatIsVisitedAtOnce) {
    for_each_shape([&](const QkvRotaryShape& shape) {
        if (!can_fuse(shape, h200)) return;
        const int columns = columns_at_a_time(shape.pairing);
        for (int start = 0; start < shape.outputs; start += columns) {
            for (int column = start; column < start + columns && column < shape.outputs; ++column) {
                const int component = column % shape.head_dim;
                if (shape.pairing == Pairing::interleaved) {
                    // All of a visit rotates, or none of it.
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

TEST(QkvRotaryPlan, TilesHoldWholeVisits) {
    for (const QkvKernel& kernel : qkv_kernels) {
        EXPECT_EQ(qkv_tile % columns_at_a_time(kernel.pairing), 0) << describe(kernel);
    }
}

// What the rotation of accumulators takes for granted: a tile is one head's rotated part or lies outside of all of
// them, and a component's partner is 64 further on.
TEST(QkvRotaryPlan, TransposedTilesHoldWholeRotations) {
    for (const QkvKernel& kernel : qkv_kernels) {
        if (!kernel.transposed) continue;
        EXPECT_EQ(kernel.pairing, Pairing::halves) << describe(kernel);
        EXPECT_EQ(kernel.tile_tokens % 32, 0) << describe(kernel);
        int taken = 0;
        for_each_shape([&](const QkvRotaryShape& shape) {
            if (!can_fuse(shape, h200) || !takes(kernel, shape)) return;
            ++taken;
            ASSERT_EQ(shape.rotary_dim / 2, 64);
            ASSERT_EQ(shape.head_dim % qkv_tile, 0);
        });
        EXPECT_GT(taken, 0) << describe(kernel);
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

// As measured; what is slower fused is done apart.
TEST(QkvRotaryPlan, IsFusedWhereThatIsFaster) {
    for (const auto of : {llama, qwen, llama_70b}) {
        for (const int64_t rows : {2048, 8192, 32768})
            EXPECT_TRUE(is_fused(of(rows))) << of(rows).outputs << " " << rows;
        for (const int64_t rows : {1, 16, 64, 256, 512})
            EXPECT_FALSE(is_fused(of(rows))) << of(rows).outputs << " " << rows;
    }
}

// A last round that leaves much of the chip idle costs as much as a full one.
TEST(QkvRotaryPlan, IsApartWhereTheLastRoundIsNearlyEmpty) {
    QkvRotaryShape shape = llama(512);
    for (const auto& [heads, fused] : {std::pair{30, false}, {31, true}, {33, true}, {34, false}}) {
        shape.outputs = heads * 128;
        EXPECT_EQ(tiles_of(qkv_kernels[0], shape, 1), 4 * heads);
        EXPECT_EQ(is_fused(shape), fused) << heads;
    }
}

TEST(QkvRotaryPlan, TakesTheTilesThatLeaveLeastIdle) {
    const auto tokens = [](const QkvRotaryShape& shape) {
        return qkv_kernels[plan_qkv_rotary(shape, h200).kernel].tile_tokens;
    };
    EXPECT_EQ(tokens(llama(2048)), 128);      // 6 rounds of 128, or 5 of 160
    EXPECT_EQ(tokens(llama(8192)), 160);      // 24 or 19
    EXPECT_EQ(tokens(qwen(2048)), 160);       // 3 or 2
    EXPECT_EQ(tokens(qwen(32768)), 128);      // 39 or 32
    EXPECT_EQ(tokens(llama_70b(8192)), 160);  // 5 or 4, which are as much: the wider
    QkvRotaryShape short_rotation = qwen(8192);
    short_rotation.rotary_dim = 64;
    EXPECT_EQ(tokens(short_rotation), 128);
}

// As was fastest; groups of tiles that are not whole must not cost a round.
TEST(QkvRotaryPlan, WalksThroughTilesTogetherThatAreThere) {
    const auto swizzle = [](const QkvRotaryShape& shape) { return plan_qkv_rotary(shape, h200).swizzle; };
    EXPECT_EQ(swizzle(llama(2048)), 2);
    EXPECT_EQ(swizzle(llama(8192)), 4);
    EXPECT_EQ(swizzle(llama(32768)), 2);
    EXPECT_EQ(swizzle(qwen(2048)), 1);
    EXPECT_EQ(swizzle(qwen(32768)), 4);
    EXPECT_EQ(swizzle(llama_70b(8192)), 1);
    EXPECT_EQ(swizzle(llama_70b(32768)), 1);
}

// Whatever the number of rows: counted as CUTLASS does, by hand.
TEST(QkvRotaryPlan, LeavesLittleIdleOfWhatIsReallyScheduled) {
    int fused = 0;
    for (const auto of : {llama, qwen, llama_70b}) {
        for (int64_t rows = 257; rows < 20000; rows += 7) {
            const QkvRotaryShape shape = of(rows);
            const QkvRotaryPlan plan = plan_qkv_rotary(shape, h200);
            if (plan.kernel == QkvRotaryPlan::unfused) continue;
            ++fused;
            const QkvKernel& kernel = qkv_kernels[plan.kernel];
            int64_t m = (rows + kernel.tile_tokens - 1) / kernel.tile_tokens;
            int64_t n = shape.outputs / 128;
            if (kernel.transposed) std::swap(m, n);
            while (m % (2 * plan.swizzle) != 0) ++m;
            while (n % plan.swizzle != 0) ++n;
            const double taken = static_cast<double>((m * n + 131) / 132 * kernel.tile_tokens);
            ASSERT_LE(taken, 1.08 * static_cast<double>(rows * shape.outputs) / (128 * 132)) << rows;
        }
    }
    EXPECT_GT(fused, 5000);
}

TEST(QkvRotaryPlan, WhatNoKernelTakesIsDoneApart) {
    const auto with = [](auto change) {
        QkvRotaryShape shape = llama(8192);
        change(shape);
        return shape;
    };
    EXPECT_FALSE(is_fused(llama(8192), {.has_wgmma = false, .multiprocessors = 108}));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.dtype = DType::float32; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.aligned = false; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.inputs = 4100; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.inputs = 0; })));  // would wait for a product that nobody begins
    EXPECT_FALSE(is_fused(with([](auto& s) { s.head_dim = s.rotary_dim = 96; })));
    EXPECT_FALSE(is_fused(with([](auto& s) { s.rotary_dim = 96; })));
    EXPECT_TRUE(is_fused(with([](auto& s) { s.rotary_dim = 64; })));
    EXPECT_TRUE(is_fused(with([](auto& s) { s.dtype = DType::float16; })));
    EXPECT_TRUE(is_fused(with([](auto& s) {
        s.head_dim = s.rotary_dim = 96;
        s.pairing = Pairing::interleaved;
    })));
}

TEST(QkvRotaryPlan, TilesThatHangOverTheEdgeCount) {
    constexpr QkvKernel wide{Pairing::halves, /*transposed=*/true, 160};
    EXPECT_EQ(tiles_of({Pairing::halves}, llama(1), 1), 2 * 48);  // a cluster has two
    EXPECT_EQ(tiles_of({Pairing::halves}, llama(129), 1), 2 * 48);
    EXPECT_EQ(tiles_of({Pairing::halves}, llama(1408), 1), 12 * 48);
    EXPECT_EQ(tiles_of({Pairing::halves}, llama(1408), 4), 16 * 48);
    EXPECT_EQ(tiles_of({Pairing::halves}, llama(8192), 8), 64 * 48);
    EXPECT_EQ(tiles_of(wide, llama(8192), 4), 52 * 48);
    EXPECT_EQ(tiles_of(wide, llama_70b(2048), 1), 13 * 10);
    EXPECT_EQ(tiles_of(wide, llama_70b(2048), 2), 14 * 12);
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
