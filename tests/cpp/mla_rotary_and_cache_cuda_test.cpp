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

#include "device_memory.h"
#include "mla_device_case.h"
#include "mla_rotary_plan.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "on_gpu.h"
#include "plans_with_kernel.h"
#include "token_slots.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

class MlaRotaryAndCacheCuda : public OnGpu {
protected:
    static void write_and_expect(const MlaCacheOptions& options) {
        MlaRotaryAndCacheCase cache(options);
        MlaCacheDeviceCase device(cache);
        mla_rotary_and_cache_cuda(device.args(), nullptr);
        device.fetch();
        cache.expect_written();
    }

    static void write_by_every_kernel_and_expect(const MlaCacheOptions& options, int aligned_vector) {
        MlaRotaryAndCacheCase same(options);
        const MlaRotaryShape shape = shape_of(MlaCacheDeviceCase(same).args());
        ASSERT_EQ(shape.aligned_vector, aligned_vector);
        for (const MlaRotaryPlan& plan : plans_with_kernel(shape)) {
            MlaRotaryAndCacheCase cache(options);
            MlaCacheDeviceCase device(cache);
            mla_rotary_and_cache_cuda(device.args(), plan, nullptr);
            device.fetch();
            SCOPED_TRACE(describe_vectors(plan));
            cache.expect_written();
        }
    }
};

// --- against the reference that mla_rotary_and_cache_cpu is tested against

TEST_F(MlaRotaryAndCacheCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) write_and_expect(random_mla_cache_options(seed));
}

TEST_F(MlaRotaryAndCacheCuda, EveryCacheOfEveryDTypeAndPairing) {
    for (const DType dtype : all_dtypes) {
        for (MlaCacheOptions o : every_mla_cache(dtype)) {
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
TEST_F(MlaRotaryAndCacheCuda, EveryKernel) {
    for (const DType dtype : all_dtypes) {
        for (const StoredAs cached_as : every_stored_as) {
            if (is_float8(cached_as) && dtype == DType::float64) continue;
            for (const Pairing pairing : both_pairings) {
                for (const TableFor table_for : {TableFor::all, TableFor::each_index}) {
                    for (const int q_heads : {7, 1}) {
                        MlaCacheOptions o;
                        o.rotary.dtype = dtype;
                        o.rotary.pairing = pairing;
                        o.rotary.tokens = 11;
                        o.rotary.q_heads = q_heads;
                        o.rotary.head_dim = o.rotary.rotary_dim = 256;
                        o.rotary.in_place = true;
                        o.rotary.tables = {.table_for = table_for, .count = 4};
                        o.latent_dim = 256;
                        o.cached_as = cached_as;
                        o.has_scale = is_float8(cached_as);
                        write_by_every_kernel_and_expect(o, full_vector(size_of(dtype)));
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

TEST_F(MlaRotaryAndCacheCuda, RowsThatAreNotMadeOfFullVectors) {
    for (const StoredAs cached_as : every_stored_as) {
        for (const Pairing pairing : both_pairings) {
            for (const auto& [rotary_dim, latent_dim] : {std::pair{120, 64}, {64, 100}}) {
                MlaCacheOptions o;
                o.rotary.dtype = DType::bfloat16;
                o.rotary.pairing = pairing;
                o.rotary.q_heads = 3;
                o.rotary.head_dim = o.rotary.rotary_dim = rotary_dim;
                o.latent_dim = latent_dim;
                o.cached_as = cached_as;
                write_by_every_kernel_and_expect(o, latent_dim == 64 ? 8 : 4);
            }
        }
    }
}

TEST_F(MlaRotaryAndCacheCuda, PlansWithoutAKernelAreRefused) {
    MlaCacheOptions o;
    o.rotary.dtype = DType::bfloat16;
    o.rotary.head_dim = o.rotary.rotary_dim = 64;
    MlaRotaryAndCacheCase cache(o);
    MlaCacheDeviceCase device(cache);
    const MlaRotaryAndCacheArgs args = device.args();
    const int full = 8;
    EXPECT_THROW(mla_rotary_and_cache_cuda(args, plan_with(shape_of(args), full, 1), nullptr), std::logic_error);
}

TEST_F(MlaRotaryAndCacheCuda, RowsOfDeepSeek) {
    for (const StoredAs cached_as : every_stored_as) {
        for (const int q_heads : {16, 128}) {
            for (const int64_t tokens : {1, 40}) {
                MlaCacheOptions o;
                o.rotary.dtype = DType::bfloat16;
                o.rotary.pairing = Pairing::interleaved;
                o.rotary.tokens = tokens;
                o.rotary.q_heads = q_heads;
                o.rotary.head_dim = o.rotary.rotary_dim = 64;
                o.rotary.in = {.padding = 128};  // the rope parts of heads of 192
                o.rotary.in_place = true;
                o.latent_dim = 512;
                o.cached_as = cached_as;
                o.has_scale = is_float8(cached_as);
                o.blocks = 3;
                o.block_size = 64;
                write_and_expect(o);
            }
        }
    }
}

// Rounding to float8 is an instruction on the GPU and integer arithmetic on the CPU; both must give the same bits.
TEST_F(MlaRotaryAndCacheCuda, LatentsInFloat8AreWhatTheCpuWrites) {
    for (const auto& [dtype, cached_as] : {std::pair{DType::float32, StoredAs::float8_e4m3},
                                           {DType::float32, StoredAs::float8_e5m2},
                                           {DType::float16, StoredAs::float8_e4m3},
                                           {DType::bfloat16, StoredAs::float8_e5m2}}) {
        MlaCacheOptions o;
        o.rotary.dtype = dtype;
        o.rotary.tokens = 100;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.latent_dim = 512;
        o.cached_as = cached_as;
        o.has_scale = true;
        o.blocks = 30;
        MlaRotaryAndCacheCase on_cpu(o);
        MlaRotaryAndCacheCase on_gpu(o);
        // Including infinity and NaN.
        for (MlaRotaryAndCacheCase* cache : {&on_cpu, &on_gpu}) {
            for (int64_t token = 0; token < 3; ++token) {
                std::byte* row = cache->latent().bytes.data() + cache->latent().byte_of(0, token, 0);
                write_infinity(dtype, row);
                std::memset(row + size_of(dtype), 0xff, size_of(dtype));
            }
        }
        mla_rotary_and_cache_cpu(on_cpu.args());
        MlaCacheDeviceCase device(on_gpu);
        mla_rotary_and_cache_cuda(device.args(), nullptr);
        device.fetch();
        for (int64_t row = 0; row < o.blocks * o.block_size; ++row) {
            const int64_t byte = on_cpu.cache().byte_of(row / o.block_size, row % o.block_size);
            for (int at = 0; at < o.latent_dim; ++at) {
                const std::byte cpu = on_cpu.cache().bytes[byte + at];
                const std::byte gpu = on_gpu.cache().bytes[byte + at];
                const double expected = value_of_float8(static_cast<uint8_t>(cpu), cached_as);
                const double actual = value_of_float8(static_cast<uint8_t>(gpu), cached_as);
                ASSERT_TRUE(cpu == gpu || (std::isnan(expected) && std::isnan(actual)))
                    << actual << " instead of " << expected << " at " << at << " of row " << row;
            }
        }
    }
}

// --- streams and launches

TEST_F(MlaRotaryAndCacheCuda, WritesAllInOneLaunchThatAGraphCanReplayWithOtherSlots) {
    const Stream stream;
    for (const bool paged : {false, true}) {
        MlaCacheOptions o;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.paged = paged;
        MlaRotaryAndCacheCase cache(o);
        MlaCacheDeviceCase device(cache);
        const Recording recording(stream, [&](cudaStream_t on) { mla_rotary_and_cache_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 1u);
        cache.slots() = {2, -1, 0};
        device.upload_slots();
        recording.play(stream);
        device.fetch();
        cache.expect_written();
    }
}

// By programmatic dependent launch a kernel may start while the preceding one still runs; every call rotates q further
// from where the last one left it.
TEST_F(MlaRotaryAndCacheCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const int64_t tokens : {1, 300}) {
        MlaCacheOptions o;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.tokens = tokens;
        o.rotary.q_heads = 16;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.rotary.in_place = true;
        o.blocks = 100;
        MlaRotaryAndCacheCase separate(o);
        MlaRotaryAndCacheCase overlapping(o);
        MlaCacheDeviceCase separate_on_device(separate);
        MlaCacheDeviceCase overlapping_on_device(overlapping);
        for (int i = 0; i < 50; ++i) {
            mla_rotary_and_cache_cuda(separate_on_device.args(), nullptr);
            check(cudaDeviceSynchronize());
        }
        for (int i = 0; i < 50; ++i) mla_rotary_and_cache_cuda(overlapping_on_device.args(), nullptr);
        separate_on_device.fetch();
        overlapping_on_device.fetch();
        EXPECT_TRUE(overlapping.rotary().q().in.bytes == separate.rotary().q().in.bytes) << tokens;
        EXPECT_TRUE(overlapping.cache().bytes == separate.cache().bytes) << tokens;
    }
}

TEST_F(MlaRotaryAndCacheCuda, NothingToDoLaunchesNothing) {
    const Stream stream;
    for (const auto& [batch, tokens] : {std::tuple{0, 3}, {2, 0}}) {
        MlaCacheOptions o;
        o.rotary.batch = batch;
        o.rotary.tokens = tokens;
        MlaRotaryAndCacheCase cache(o);
        const Recording recording(stream, [&](cudaStream_t on) { mla_rotary_and_cache_cuda(cache.args(), on); });
        EXPECT_EQ(recording.launches(), 0u) << describe(o);
    }
}

TEST_F(MlaRotaryAndCacheCuda, RowsAloneRowsWithoutALatentAndACacheWithoutSlots) {
    for (const auto& [q_heads, latent_dim, blocks, block_size] :
         {std::tuple{0, 48, 3, 4}, {2, 0, 3, 4}, {2, 48, 0, 4}, {2, 48, 3, 0}}) {
        MlaCacheOptions o;
        o.rotary.q_heads = q_heads;
        o.latent_dim = latent_dim;
        o.blocks = blocks;
        o.block_size = block_size;
        write_and_expect(o);
    }
}

// Slots on a GPU are not validated: out-of-range ones must be skipped.
TEST_F(MlaRotaryAndCacheCuda, SlotsOutOfRangeAreSkipped) {
    for (const bool paged : {false, true}) {
        for (const bool wide : {false, true}) {
            MlaCacheOptions o;
            o.rotary.batch = 2;
            o.rotary.tokens = 4;
            o.paged = paged;
            o.slots_are_int64 = wide;
            MlaRotaryAndCacheCase cache(o);
            cache.slots() = three_slots_among_five_out_of_range(o);
            MlaCacheDeviceCase device(cache);
            mla_rotary_and_cache_cuda(device.args(), nullptr);
            device.fetch();
            cache.expect_written();
        }
    }
}

// --- offsets

TEST_F(MlaRotaryAndCacheCuda, BlocksMoreThanTwoToThe31ElementsApart) {
    constexpr int64_t far_stride = (int64_t{1} << 31) + 64;
    for (const StoredAs cached_as : every_stored_as) {
        MlaCacheOptions o;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.tokens = 2;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        o.cached_as = cached_as;
        o.blocks = 2;
        o.block_size = 1;
        MlaRotaryAndCacheCase cache(o);
        cache.slots() = {1, 0};
        CacheBuffer& near = cache.cache();
        const int64_t row_bytes = cache.row_dim() * near.element_size;
        const size_t bytes = far_stride * near.element_size + row_bytes;
        size_t available = 0;
        size_t total = 0;
        check(cudaMemGetInfo(&available, &total));
        if (available < bytes + (size_t{1} << 28)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";
        MlaCacheDeviceCase device(cache);
        const DeviceMemory far(bytes);
        MlaRotaryAndCacheArgs args = device.args();
        args.latent.view.out = far.data();
        args.rotary.k.out = far.data() + o.latent_dim * near.element_size;
        args.latent.view.out_strides.batch = args.rotary.k.out_strides.batch = far_stride;
        mla_rotary_and_cache_cuda(args, nullptr);
        device.fetch();
        for (int64_t block = 0; block < 2; ++block) {
            check(cudaMemcpy(near.bytes.data() + near.byte_of(block, 0),
                             far.data() + block * far_stride * near.element_size, row_bytes, cudaMemcpyDeviceToHost));
        }
        cache.expect_written();
    }
}

}  // namespace
}  // namespace mrrope
