#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cache_device_case.h"
#include "device_memory.h"
#include "device_properties.h"
#include "every_norm_plan.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "on_gpu.h"
#include "qk_norm_rotary_and_cache_case.h"
#include "qk_norm_rotary_and_cache_plan.h"
#include "token_slots.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

// A case on the device: its buffers, with the noise around them, copied there and back.
class NormCacheOnDevice {
public:
    explicit NormCacheOnDevice(NormCacheCase& norm)
        : norm_(norm),
          cache_(norm.cache()),
          q_weights_(norm.weights(true).bytes),
          k_weights_(norm.weights(false).bytes),
          gate_(norm.gate().bytes),
          float8_q_(norm.float8_q().bytes),
          q_scales_(norm.q_scales()),
          computed_scales_(norm.computed_scales()) {}

    QkNormRotaryAndCacheArgs args() {
        QkNormRotaryAndCacheArgs args = norm_.args();
        const RotaryArgs on_host = args.rotary;
        static_cast<RotaryAndCacheArgs&>(args) = cache_.args();
        if (is_float8(args.q_stored_as)) {
            args.rotary.q.out = float8_q_.data() + norm_.float8_q().first_byte;
            args.rotary.q.out_strides = on_host.q.out_strides;
        }
        if (args.q_weight != nullptr) args.q_weight = q_weights_.data() + norm_.weights(true).first_byte;
        if (args.k_weight != nullptr) args.k_weight = k_weights_.data() + norm_.weights(false).first_byte;
        if (args.gate.heads > 0) args.gate.in = args.gate.out = gate_.data() + norm_.gate().first_byte;
        if (args.q_scale != nullptr) args.q_scale = q_scales_.as<float>();
        if (args.q_scale_out != nullptr) args.q_scale_out = reinterpret_cast<float*>(computed_scales_.data());
        return args;
    }

    void upload_slots() { cache_.upload_slots(); }

    void fetch() {
        cache_.fetch();
        gate_.download(norm_.gate().bytes);
        float8_q_.download(norm_.float8_q().bytes);
        computed_scales_.download(norm_.computed_scales());
    }

private:
    NormCacheCase& norm_;
    CacheDeviceCase cache_;
    DeviceMemory q_weights_, k_weights_, gate_, float8_q_, q_scales_, computed_scales_;
};

class QkNormRotaryAndCacheCuda : public OnGpu {
protected:
    static void store_and_expect(const NormCacheOptions& options) {
        NormCacheCase norm(options);
        NormCacheOnDevice device(norm);
        qk_norm_rotary_and_cache_cuda(device.args(), nullptr);
        device.fetch();
        norm.expect_stored();
    }

    // By every kernel that there is for the case.
    static void store_by_every_plan_and_expect(const NormCacheOptions& options) {
        for (const auto& plan : every_norm_plan(shape_of(NormCacheCase(options).args()), current_device())) {
            SCOPED_TRACE(plan.in_registers ? plan.heads_per_thread : 0);
            NormCacheCase norm(options);
            NormCacheOnDevice device(norm);
            qk_norm_rotary_and_cache_cuda(device.args(), plan, nullptr);
            device.fetch();
            norm.expect_stored();
        }
    }
};

// --- against the reference that qk_norm_rotary_and_cache_cpu is tested against

TEST_F(QkNormRotaryAndCacheCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) store_and_expect(random_norm_cache_options(seed));
}

TEST_F(QkNormRotaryAndCacheCuda, EveryKindOfHeads) {
    for_each_kind_of_norm_and_cache(store_and_expect);
}

// Every number of heads per thread, with a remainder, and component by component, for one table, several and several
// positions per token.
TEST_F(QkNormRotaryAndCacheCuda, EveryPlan) {
    for_each_kind_of_norm_and_cache([&](NormCacheOptions o) {
        if (o.cache.rotary.head_dim > 256) return;
        o.cache.rotary.q_heads = o.over == NormOver::head ? 11 : 7;
        o.cache.rotary.k_heads = 9;
        o.cache.rotary.in_place = true;
        for (const bool has_lookup : {false, true}) {
            if (has_lookup) {
                o.cache.rotary.position_rows = 3;
                o.cache.rotary.tables = {.table_for = TableFor::each_index, .count = 3};
            }
            store_by_every_plan_and_expect(o);
            if (HasFailure()) return;
        }
    });
}

// Several tiles, four sharers of a token, and slices of the tokens.
TEST_F(QkNormRotaryAndCacheCuda, ManyTokensWithEightHeadsPerThread) {
    for (const int q_heads : {32, 30}) {
        for (const StoredAs stored_as : every_stored_as) {
            for (const int64_t tokens_per_launch : {86, 21}) {
                NormCacheOptions o;
                o.cache.rotary.dtype = DType::bfloat16;
                o.cache.rotary.batch = 2;
                o.cache.rotary.tokens = 43;
                o.cache.rotary.q_heads = q_heads;
                o.cache.rotary.k_heads = 12;
                o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = 128;
                o.cache.rotary.in_place = true;
                o.cache.cached_as = o.q_stored_as = stored_as;
                if (is_float8(stored_as)) o.q_scale = QScale::computed;
                o.has_gate = true;
                NormCacheCase norm(o);
                NormCacheOnDevice device(norm);
                const QkNormRotaryAndCacheArgs args = device.args();
                auto plan = plan_with(shape_of(args), current_device(), 8);
                plan.tokens_per_launch = tokens_per_launch;
                qk_norm_rotary_and_cache_cuda(args, plan, nullptr);
                device.fetch();
                SCOPED_TRACE(describe(o));
                norm.expect_stored();
                if (HasFailure()) return;
            }
        }
    }
}

// 120 and 88 are no multiples of two full vectors: threads take half vectors, whatever the number of tokens.
TEST_F(QkNormRotaryAndCacheCuda, HeadsOfHalfVectors) {
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        for (const StoredAs stored_as : every_stored_as) {
            for (const auto& [head_dim, rotary_dim] : {std::pair{120, 120}, {88, 32}}) {
                for (const int64_t rows : {0, 3}) {
                    NormCacheOptions o;
                    o.cache.rotary.dtype = DType::bfloat16;
                    o.cache.rotary.tokens = 70;
                    o.cache.rotary.q_heads = 5;
                    o.cache.rotary.k_heads = 3;
                    o.cache.rotary.head_dim = head_dim;
                    o.cache.rotary.rotary_dim = rotary_dim;
                    o.cache.rotary.position_rows = rows;
                    o.cache.blocks = 40;
                    o.cache.cached_as = o.q_stored_as = stored_as;
                    if (is_float8(stored_as)) o.q_scale = QScale::computed;
                    o.over = over;
                    store_and_expect(o);
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// One warp per row, where there are many.
TEST_F(QkNormRotaryAndCacheCuda, ManyRowsComponentByComponent) {
    for (const StoredAs stored_as : every_stored_as) {
        NormCacheOptions o;
        o.cache.rotary.dtype = DType::bfloat16;
        o.cache.rotary.tokens = 700;
        o.cache.rotary.q_heads = 4;
        o.cache.rotary.k_heads = 1;
        o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = 100;
        o.cache.blocks = 400;
        o.cache.cached_as = o.q_stored_as = stored_as;
        if (is_float8(stored_as)) o.q_scale = QScale::computed;
        NormCacheCase norm(o);
        ASSERT_EQ(plan(shape_of(norm.args()), current_device()).block_threads, 32);
        store_and_expect(o);
    }
}

TEST_F(QkNormRotaryAndCacheCuda, HeadTablesAndRowsByEveryKernel) {
    for (const DType dtype : {DType::bfloat16, DType::float32}) {
        for (const Pairing pairing : both_pairings) {
            for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
                for (const int64_t rows : {0, 3}) {
                    for (const StoredAs stored_as : every_stored_as) {
                        NormCacheOptions o;
                        o.cache.rotary.dtype = dtype;
                        o.cache.rotary.pairing = pairing;
                        o.cache.rotary.batch = 2;
                        o.cache.rotary.q_heads = 9;
                        o.cache.rotary.k_heads = 3;
                        o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = 64;
                        o.cache.rotary.position_rows = rows;
                        o.cache.cached_as = o.q_stored_as = stored_as;
                        if (is_float8(stored_as)) o.q_scale = QScale::computed;
                        o.over = over;
                        for (const auto& [tables, has_query_factors] : {std::pair{3, false}, {3, true}, {1, true}}) {
                            o.cache.rotary.tables = {.table_for = TableFor::each_index,
                                                     .count = 2,
                                                     .padding = 1,
                                                     .heads = tables,
                                                     .has_query_factors = has_query_factors};
                            store_by_every_plan_and_expect(o);
                            if (HasFailure()) return;
                        }
                    }
                }
            }
        }
    }
}

TEST_F(QkNormRotaryAndCacheCuda, HeadsOfZerosHaveAFiniteScale) {
    for (const StoredAs stored_as : both_float8) {
        for (const int head_dim : {64, 18}) {
            NormCacheOptions o;
            o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = head_dim;
            o.q_stored_as = stored_as;
            o.q_scale = QScale::computed;
            NormCacheCase norm(o);
            HeadBuffer& q = norm.cache().rotary().q().in;
            std::fill(q.bytes.begin(), q.bytes.end(), std::byte{0});
            q.before = q.bytes;
            NormCacheOnDevice device(norm);
            qk_norm_rotary_and_cache_cuda(device.args(), nullptr);
            device.fetch();
            norm.expect_stored();
            for (const float scale : norm.computed_scales()) EXPECT_EQ(scale, 0x1p-126f);
        }
    }
}

// --- streams and launches

TEST_F(QkNormRotaryAndCacheCuda, OneLaunchThatAGraphCanReplayWithOtherSlots) {
    const Stream stream;
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        NormCacheOptions o;
        o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = 64;
        o.over = over;
        o.has_gate = true;
        NormCacheCase norm(o);
        NormCacheOnDevice device(norm);
        const Recording recording(stream, [&](cudaStream_t on) { qk_norm_rotary_and_cache_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 1u);
        norm.cache().slots() = {2, -1, 0};
        device.upload_slots();
        check(cudaDeviceSynchronize());
        recording.play(stream);
        device.fetch();
        norm.expect_stored();
    }
}

// By programmatic dependent launch a kernel may start while the preceding one still runs; every call norms and rotates
// q, and takes the gate's sigmoid, from where the last one left them.
TEST_F(QkNormRotaryAndCacheCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const int64_t tokens : {1, 300}) {
        NormCacheOptions o;
        o.cache.rotary.dtype = DType::bfloat16;
        o.cache.rotary.tokens = tokens;
        o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = 128;
        o.cache.rotary.in_place = true;
        o.cache.blocks = 100;
        o.weight_offset = 1.0;
        o.has_gate = true;
        NormCacheCase separate(o);
        NormCacheCase overlapping(o);
        NormCacheOnDevice separate_on_device(separate);
        NormCacheOnDevice overlapping_on_device(overlapping);
        for (int i = 0; i < 50; ++i) {
            qk_norm_rotary_and_cache_cuda(separate_on_device.args(), nullptr);
            check(cudaDeviceSynchronize());
        }
        for (int i = 0; i < 50; ++i) qk_norm_rotary_and_cache_cuda(overlapping_on_device.args(), nullptr);
        separate_on_device.fetch();
        overlapping_on_device.fetch();
        EXPECT_TRUE(overlapping.cache().rotary().q().in.bytes == separate.cache().rotary().q().in.bytes) << tokens;
        EXPECT_TRUE(overlapping.cache().key_cache().bytes == separate.cache().key_cache().bytes) << tokens;
        EXPECT_TRUE(overlapping.cache().value_cache().bytes == separate.cache().value_cache().bytes) << tokens;
        EXPECT_TRUE(overlapping.gate().bytes == separate.gate().bytes) << tokens;
    }
}

TEST_F(QkNormRotaryAndCacheCuda, NothingToDoLaunchesNothing) {
    const Stream stream;
    for (const auto& [batch, tokens, q_heads, k_heads] : {std::tuple{0, 3, 2, 1}, {2, 0, 2, 1}, {2, 3, 0, 0}}) {
        NormCacheOptions o;
        o.cache.rotary.batch = batch;
        o.cache.rotary.tokens = tokens;
        o.cache.rotary.q_heads = q_heads;
        o.cache.rotary.k_heads = k_heads;
        NormCacheCase norm(o);
        NormCacheOnDevice device(norm);
        const Recording recording(stream, [&](cudaStream_t on) { qk_norm_rotary_and_cache_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 0u) << describe(o);
    }
}

TEST_F(QkNormRotaryAndCacheCuda, QueriesAloneKeysAloneAndACacheWithoutSlots) {
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        for (const auto& [q_heads, k_heads, blocks, block_size] :
             {std::tuple{2, 0, 3, 4}, {0, 2, 3, 4}, {2, 1, 0, 4}, {2, 1, 3, 0}}) {
            NormCacheOptions o;
            o.cache.rotary.q_heads = q_heads;
            o.cache.rotary.k_heads = k_heads;
            o.cache.blocks = blocks;
            o.cache.block_size = block_size;
            o.over = over;
            store_and_expect(o);
        }
    }
}

// Slots on a GPU are not validated: out-of-range ones must be skipped.
TEST_F(QkNormRotaryAndCacheCuda, SlotsOutOfRangeAreSkipped) {
    for (const bool paged : {false, true}) {
        for (const int head_dim : {64, 18}) {
            NormCacheOptions o;
            o.cache.rotary.batch = 2;
            o.cache.rotary.tokens = 4;
            o.cache.rotary.head_dim = o.cache.rotary.rotary_dim = head_dim;
            o.cache.paged = paged;
            NormCacheCase norm(o);
            norm.cache().slots() = three_slots_among_five_out_of_range(o.cache);
            NormCacheOnDevice device(norm);
            qk_norm_rotary_and_cache_cuda(device.args(), nullptr);
            device.fetch();
            norm.expect_stored();
        }
    }
}

}  // namespace
}  // namespace mrrope
