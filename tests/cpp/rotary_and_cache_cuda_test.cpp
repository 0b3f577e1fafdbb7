#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "cache_device_case.h"
#include "device_memory.h"
#include "mrrope/rotary_and_cache.h"
#include "on_gpu.h"
#include "plans_with_kernel.h"
#include "qk_norm_rotary_and_cache_plan.h"
#include "rotary_and_cache_case.h"
#include "rotary_and_cache_plan.h"
#include "token_slots.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

class RotaryAndCacheCuda : public OnGpu {
protected:
    static void write_and_expect(const CacheOptions& options) {
        RotaryAndCacheCase cache(options);
        CacheDeviceCase device(cache);
        rotary_and_cache_cuda(device.args(), nullptr);
        device.fetch();
        cache.expect_written();
    }

    // By the kernels that only rotate.
    static void write_by_every_kernel_and_expect(const CacheOptions& options, int aligned_vector) {
        RotaryAndCacheCase same(options);
        const RotaryAndCacheShape shape = shape_of(CacheDeviceCase(same).args());
        ASSERT_EQ(shape.aligned_vector, aligned_vector);
        for (const RotaryPlan& plan : plans_with_kernel(shape)) {
            RotaryAndCacheCase cache(options);
            CacheDeviceCase device(cache);
            rotary_and_cache_cuda(device.args(), plan, nullptr);
            device.fetch();
            SCOPED_TRACE(describe_vectors(plan));
            cache.expect_written();
        }
    }

    // By the kernel that norms.
    static void write_and_expect(const CacheOptions& options, int heads_per_thread) {
        RotaryAndCacheCase cache(options);
        CacheDeviceCase device(cache);
        const QkNormRotaryAndCacheArgs args{device.args()};
        qk_norm_rotary_and_cache_cuda(args, plan_with(shape_of(args), current_device(), heads_per_thread), nullptr);
        device.fetch();
        SCOPED_TRACE(heads_per_thread);
        cache.expect_written();
    }
};

// --- against the reference that rotary_and_cache_cpu is tested against

TEST_F(RotaryAndCacheCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) write_and_expect(random_cache_options(seed));
}

TEST_F(RotaryAndCacheCuda, EveryCacheOfEveryDTypeAndPairing) {
    for (const DType dtype : all_dtypes) {
        for (CacheOptions o : every_cache(dtype)) {
            for (const Pairing pairing : both_pairings) {
                o.rotary.pairing = pairing;
                o.rotary.in_place = pairing == Pairing::halves;
                write_and_expect(o);
                if (HasFailure()) return;
            }
        }
    }
}

// Full vectors of two heads with a remainder, and of a single head; half vectors and single components; one table and
// several.
TEST_F(RotaryAndCacheCuda, EveryKernelThatOnlyRotates) {
    for (const DType dtype : all_dtypes) {
        for (const StoredAs cached_as : every_stored_as) {
            if (is_float8(cached_as) && dtype == DType::float64) continue;
            for (const Pairing pairing : both_pairings) {
                for (const TableFor table_for : {TableFor::all, TableFor::each_index}) {
                    for (const auto& [q_heads, k_heads] : {std::pair{5, 3}, {1, 1}}) {
                        CacheOptions o;
                        o.rotary.dtype = dtype;
                        o.rotary.pairing = pairing;
                        o.rotary.tokens = 11;
                        o.rotary.q_heads = q_heads;
                        o.rotary.k_heads = k_heads;
                        o.rotary.head_dim = o.rotary.rotary_dim = 512;
                        o.rotary.in_place = true;
                        o.rotary.tables = {.table_for = table_for, .count = 4};
                        o.cached_as = cached_as;
                        o.scale_for = is_float8(cached_as) ? ScaleFor::each_head : ScaleFor::none;
                        write_by_every_kernel_and_expect(o, full_vector(size_of(dtype)));
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

TEST_F(RotaryAndCacheCuda, HeadTablesByEveryKernelThatOnlyRotates) {
    for (const DType dtype : all_dtypes) {
        for (const StoredAs cached_as : every_stored_as) {
            if (is_float8(cached_as) && dtype == DType::float64) continue;
            for (const auto& [tables, q_per_table, k_per_table, has_query_factors] :
                 {std::tuple{3, 3, 1, false}, {2, 5, 3, true}, {1, 3, 2, true}}) {
                for (const TableFor table_for : {TableFor::all, TableFor::each_index}) {
                    CacheOptions o;
                    o.rotary.dtype = dtype;
                    o.rotary.tokens = 11;
                    o.rotary.q_heads = tables * q_per_table;
                    o.rotary.k_heads = tables * k_per_table;
                    o.rotary.head_dim = o.rotary.rotary_dim = 512;
                    o.rotary.in_place = true;
                    o.rotary.tables = {
                        .table_for = table_for, .count = 4, .heads = tables, .has_query_factors = has_query_factors};
                    o.cached_as = cached_as;
                    o.scale_for = is_float8(cached_as) ? ScaleFor::each_head : ScaleFor::none;
                    write_by_every_kernel_and_expect(o, full_vector(size_of(dtype)));
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// Heads of half vectors, of quarter vectors, and with a tail of quarter vectors.
TEST_F(RotaryAndCacheCuda, HeadsThatAreNotMadeOfFullVectors) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
        for (CacheOptions o : every_cache(dtype)) {
            for (const Pairing pairing : both_pairings) {
                for (const auto& [head_dim, rotary_dim] : {std::pair{120, 120}, {100, 100}, {100, 64}}) {
                    o.rotary.pairing = pairing;
                    o.rotary.head_dim = head_dim;
                    o.rotary.rotary_dim = rotary_dim;
                    write_by_every_kernel_and_expect(o, head_dim == 120 ? 8 : 4);
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// A full vector of one head, and half vectors of two.
TEST_F(RotaryAndCacheCuda, PlansWithoutAKernelAreRefused) {
    CacheOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.head_dim = o.rotary.rotary_dim = 128;
    RotaryAndCacheCase cache(o);
    CacheDeviceCase device(cache);
    const RotaryAndCacheArgs args = device.args();
    for (const auto& [vector, heads_per_thread] : {std::pair{8, 1}, {4, 2}}) {
        const RotaryPlan plan = plan_with(shape_of(args), vector, heads_per_thread);
        EXPECT_THROW(rotary_and_cache_cuda(args, plan, nullptr), std::logic_error);
    }
}

// Every number of heads per thread, with a remainder, and single components.
TEST_F(RotaryAndCacheCuda, EveryPlanOfTheKernelThatNorms) {
    for (const DType dtype : all_dtypes) {
        for (const StoredAs cached_as : every_stored_as) {
            if (is_float8(cached_as) && dtype == DType::float64) continue;
            for (const Pairing pairing : both_pairings) {
                for (const auto& [heads_per_thread, aligned] : {std::pair{1, true}, {2, true}, {8, true}, {1, false}}) {
                    CacheOptions o;
                    o.rotary.dtype = dtype;
                    o.rotary.pairing = pairing;
                    o.rotary.q_heads = 15;
                    o.rotary.k_heads = 9;
                    o.rotary.head_dim = o.rotary.rotary_dim = 128;
                    o.rotary.in_place = true;
                    o.rotary.in.misalignment = aligned ? 0 : 1;
                    o.cached_as = cached_as;
                    o.scale_for = is_float8(cached_as) ? ScaleFor::each_head : ScaleFor::none;
                    write_and_expect(o, heads_per_thread);
                    if (HasFailure()) return;
                }
            }
        }
    }
}

TEST_F(RotaryAndCacheCuda, PartialRotationWritesTheTail) {
    for (const DType dtype : all_dtypes) {
        for (CacheOptions o : every_cache(dtype)) {
            for (const auto& [head_dim, rotary_dim] : {std::pair{96, 32}, {80, 64}, {17, 16}, {100, 2}}) {
                o.rotary.head_dim = head_dim;
                o.rotary.rotary_dim = rotary_dim;
                o.rotary.in_place = head_dim == 80;
                write_and_expect(o);
                if (HasFailure()) return;
            }
        }
    }
}

// Rounding to float8 is an instruction on the GPU and integer arithmetic on the CPU; both must give the same bits.
TEST_F(RotaryAndCacheCuda, ValuesInFloat8AreWhatTheCpuWrites) {
    for (const auto& [dtype, cached_as] : {std::pair{DType::float32, StoredAs::float8_e4m3},
                                           {DType::float16, StoredAs::float8_e4m3},
                                           {DType::bfloat16, StoredAs::float8_e4m3},
                                           {DType::float32, StoredAs::float8_e5m2},
                                           {DType::float16, StoredAs::float8_e5m2},
                                           {DType::bfloat16, StoredAs::float8_e5m2}}) {
        CacheOptions o;
        o.rotary.dtype = dtype;
        o.rotary.tokens = 200;
        o.rotary.k_heads = 4;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.cached_as = cached_as;
        o.scale_for = ScaleFor::each_head;
        o.blocks = 60;
        RotaryAndCacheCase on_cpu(o);
        RotaryAndCacheCase on_gpu(o);
        // Including infinity and NaN.
        for (RotaryAndCacheCase* cache : {&on_cpu, &on_gpu}) {
            for (int64_t token = 0; token < 3; ++token) {
                std::byte* head = cache->v().bytes.data() + cache->v().byte_of(0, token, 1);
                write_infinity(dtype, head);
                std::memset(head + size_of(dtype), 0xff, size_of(dtype));
            }
            cache->v().before = cache->v().bytes;
        }
        rotary_and_cache_cpu(on_cpu.args());
        CacheDeviceCase device(on_gpu);
        rotary_and_cache_cuda(device.args(), nullptr);
        device.fetch();
        const std::vector<std::byte>& cpu = on_cpu.value_cache().bytes;
        const std::vector<std::byte>& gpu = on_gpu.value_cache().bytes;
        ASSERT_EQ(cpu.size(), gpu.size());
        for (size_t i = 0; i < cpu.size(); ++i) {
            const double expected = value_of_float8(static_cast<uint8_t>(cpu[i]), cached_as);
            const double actual = value_of_float8(static_cast<uint8_t>(gpu[i]), cached_as);
            ASSERT_TRUE(cpu[i] == gpu[i] || (std::isnan(expected) && std::isnan(actual)))
                << actual << " instead of " << expected << " at " << i;
        }
    }
}

// --- streams and launches

TEST_F(RotaryAndCacheCuda, WritesAllInOneLaunchThatAGraphCanReplayWithOtherSlots) {
    const Stream stream;
    for (const bool paged : {false, true}) {
        CacheOptions o;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.paged = paged;
        RotaryAndCacheCase cache(o);
        CacheDeviceCase device(cache);
        const Recording recording(stream, [&](cudaStream_t on) { rotary_and_cache_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 1u);
        cache.slots() = {2, -1, 0};
        device.upload_slots();
        check(cudaDeviceSynchronize());
        recording.play(stream);
        device.fetch();
        cache.expect_written();
    }
}

// By programmatic dependent launch a kernel may start while the preceding one still runs; every
// call rotates q further from where the last one left it.
TEST_F(RotaryAndCacheCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const int64_t tokens : {1, 300}) {
        CacheOptions o;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.tokens = tokens;
        o.rotary.head_dim = o.rotary.rotary_dim = 128;
        o.rotary.in_place = true;
        o.blocks = 100;
        RotaryAndCacheCase separate(o);
        RotaryAndCacheCase overlapping(o);
        CacheDeviceCase separate_on_device(separate);
        CacheDeviceCase overlapping_on_device(overlapping);
        for (int i = 0; i < 50; ++i) {
            rotary_and_cache_cuda(separate_on_device.args(), nullptr);
            check(cudaDeviceSynchronize());
        }
        for (int i = 0; i < 50; ++i) rotary_and_cache_cuda(overlapping_on_device.args(), nullptr);
        separate_on_device.fetch();
        overlapping_on_device.fetch();
        EXPECT_TRUE(overlapping.rotary().q().in.bytes == separate.rotary().q().in.bytes) << tokens;
        EXPECT_TRUE(overlapping.key_cache().bytes == separate.key_cache().bytes) << tokens;
        EXPECT_TRUE(overlapping.value_cache().bytes == separate.value_cache().bytes) << tokens;
    }
}

TEST_F(RotaryAndCacheCuda, NothingToDoLaunchesNothing) {
    const Stream stream;
    for (const auto& [batch, tokens, q_heads, k_heads] : {std::tuple{0, 3, 2, 1}, {2, 0, 2, 1}, {2, 3, 0, 0}}) {
        CacheOptions o;
        o.rotary.batch = batch;
        o.rotary.tokens = tokens;
        o.rotary.q_heads = q_heads;
        o.rotary.k_heads = k_heads;
        RotaryAndCacheCase cache(o);
        CacheDeviceCase device(cache);
        const Recording recording(stream, [&](cudaStream_t on) { rotary_and_cache_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 0u) << describe(o);
    }
}

TEST_F(RotaryAndCacheCuda, QueriesAloneKeysAloneAndACacheWithoutSlots) {
    for (const auto& [q_heads, k_heads, blocks, block_size] :
         {std::tuple{2, 0, 3, 4}, {0, 2, 3, 4}, {2, 1, 0, 4}, {2, 1, 3, 0}}) {
        CacheOptions o;
        o.rotary.q_heads = q_heads;
        o.rotary.k_heads = k_heads;
        o.blocks = blocks;
        o.block_size = block_size;
        write_and_expect(o);
    }
}

// Slots on a GPU are not validated: out-of-range ones must be skipped.
TEST_F(RotaryAndCacheCuda, SlotsOutOfRangeAreSkipped) {
    for (const bool paged : {false, true}) {
        for (const bool wide : {false, true}) {
            CacheOptions o;
            o.rotary.batch = 2;
            o.rotary.tokens = 4;
            o.paged = paged;
            o.slots_are_int64 = wide;
            RotaryAndCacheCase cache(o);
            cache.slots() = three_slots_among_five_out_of_range(o);
            CacheDeviceCase device(cache);
            rotary_and_cache_cuda(device.args(), nullptr);
            device.fetch();
            cache.expect_written();
        }
    }
}

// --- offsets

TEST_F(RotaryAndCacheCuda, BlocksMoreThanTwoToThe31ElementsApart) {
    constexpr int64_t far_stride = (int64_t{1} << 31) + 64;
    for (const StoredAs cached_as : every_stored_as) {
        CacheOptions o;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.tokens = 2;
        o.rotary.q_heads = 1;
        o.rotary.k_heads = 1;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.cached_as = cached_as;
        o.blocks = 2;
        o.block_size = 1;
        RotaryAndCacheCase cache(o);
        cache.slots() = {1, 0};
        CacheBuffer& near = cache.key_cache();
        const size_t bytes = (far_stride + 64) * near.element_size;
        size_t available = 0;
        size_t total = 0;
        check(cudaMemGetInfo(&available, &total));
        if (available < bytes + (size_t{1} << 28)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";
        CacheDeviceCase device(cache);
        const DeviceMemory far(bytes);
        RotaryAndCacheArgs args = device.args();
        args.k.view.out = far.data();
        args.k.view.out_strides.batch = far_stride;
        rotary_and_cache_cuda(args, nullptr);
        device.fetch();
        for (int64_t block = 0; block < 2; ++block) {
            check(cudaMemcpy(near.bytes.data() + near.byte_of(block, 0, 0),
                             far.data() + block * far_stride * near.element_size, 64 * near.element_size,
                             cudaMemcpyDeviceToHost));
        }
        cache.expect_written();
    }
}

TEST_F(RotaryAndCacheCuda, ConjugateIsRefusedAndNothingIsWritten) {
    for (const int rotary_dim : {16, 8}) {  // by either kernel
        CacheOptions o;
        o.rotary.conjugate = true;
        o.rotary.rotary_dim = rotary_dim;
        RotaryAndCacheCase cache(o);
        CacheDeviceCase device(cache);
        EXPECT_THROW(rotary_and_cache_cuda(device.args(), nullptr), std::invalid_argument);
        device.fetch();
        cache.rotary().q().out.expect_untouched();
        EXPECT_EQ(cache.key_cache().bytes, cache.key_cache().before);
        EXPECT_EQ(cache.value_cache().bytes, cache.value_cache().before);
    }
}

}  // namespace
}  // namespace mrrope
