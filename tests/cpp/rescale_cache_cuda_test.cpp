#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <tuple>
#include <vector>

#include "device_memory.h"
#include "device_properties.h"
#include "mrrope/rescale_cache.h"
#include "on_gpu.h"
#include "rescale_cache_case.h"
#include "rescale_cache_plan.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

// A case on the device: its layers, with the noise around the heads, copied there and back.
class DeviceCase {
public:
    explicit DeviceCase(RescaleCacheCase& rescale)
        : rescale_(rescale),
          positions_(rescale.positions().words()),
          tables_(rescale.tables().words()),
          from_(rescale.from()),
          to_(rescale.to()) {
        for (const HeadBuffer& layer : rescale.layers()) {
            layers_.emplace_back(layer.bytes);
            keys_.push_back(layers_.back().data() + layer.first_byte);
        }
    }

    RescaleCacheArgs args() {
        RescaleCacheArgs args = rescale_.args();
        args.keys = keys_;
        args.positions.data = positions_.data();
        args.tables = tables_.as<uint64_t>();
        if (args.positions.row_of_pair != nullptr) {
            args.positions.row_of_pair = args.tables + rescale_.tables().first_row_word();
        }
        args.from = from_.as<int32_t>();
        args.to = to_.as<int32_t>();
        return args;
    }

    void upload_indices() {
        from_.upload(rescale_.from());
        to_.upload(rescale_.to());
    }

    void fetch() {
        check(cudaDeviceSynchronize());
        for (size_t i = 0; i < layers_.size(); ++i) layers_[i].download(rescale_.layers()[i].bytes);
    }

private:
    RescaleCacheCase& rescale_;
    DeviceMemory positions_, tables_, from_, to_;
    std::vector<DeviceMemory> layers_;
    std::vector<void*> keys_;
};

class RescaleCacheCuda : public OnGpu {
protected:
    static void rescale_and_expect(const RescaleCacheOptions& options) {
        RescaleCacheCase rescale(options);
        rescale.poison_sequences_that_stay();
        DeviceCase device(rescale);
        rescale_cache_cuda(device.args(), nullptr);
        device.fetch();
        rescale.expect_rescaled();
    }
};

// --- against the reference that rescale_cache_cpu is tested against

TEST_F(RescaleCacheCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 200 && !HasFailure(); ++seed) rescale_and_expect(random_rescale_options(seed));
}

TEST_F(RescaleCacheCuda, EveryKernel) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const bool aligned : {false, true}) {
                for (const auto& [heads, rows] : {std::tuple{1, 0}, {2, 0}, {5, 0}, {1, 3}, {5, 3}}) {
                    RescaleCacheOptions o;
                    o.dtype = dtype;
                    o.pairing = pairing;
                    o.heads = heads;
                    o.head_dim = 96;
                    o.rotary_dim = 64;
                    o.position_rows = rows;
                    o.placement = {.order = "bhs", .misalignment = aligned ? 0 : 1};
                    const bool is_fast = aligned && dtype != DType::float64;
                    ASSERT_EQ(plan(shape_of(RescaleCacheCase(o).args()), current_device()).vector > 1, is_fast);
                    rescale_and_expect(o);
                }
            }
        }
    }
}

TEST_F(RescaleCacheCuda, ATableForEveryLayerAndGroupOfHeads) {
    for (const DType dtype : all_dtypes) {
        for (const bool aligned : {false, true}) {
            for (const auto& [table_layers, rows] : {std::tuple{1, 0}, {4, 0}, {1, 3}, {4, 3}}) {
                for (const auto& [table_heads, heads] : {std::tuple{1, 3}, {3, 3}, {2, 10}, {8, 8}}) {
                    RescaleCacheOptions o;
                    o.dtype = dtype;
                    o.layers = 5;
                    o.tokens = 40;
                    o.heads = heads;
                    o.head_dim = o.rotary_dim = 64;
                    o.table_layers = table_layers;
                    o.table_heads = table_heads;
                    o.position_rows = rows;
                    o.placement.misalignment = aligned ? 0 : 1;
                    rescale_and_expect(o);
                    if (HasFailure()) return;
                }
            }
        }
    }
}

// The tables of layers past the first launch.
TEST_F(RescaleCacheCuda, ATableForEachOfManyLayers) {
    RescaleCacheOptions o;
    o.layers = max_layers_per_launch + 2;
    o.table_layers = 5;
    rescale_and_expect(o);
}

TEST_F(RescaleCacheCuda, OneMisalignedLayerOfSeveral) {
    for (const DType dtype : all_dtypes) {
        RescaleCacheOptions o;
        o.dtype = dtype;
        o.layers = 3;
        o.head_dim = o.rotary_dim = 64;
        o.placement.misalignment = 1;
        o.only_last_layer_misaligned = true;
        rescale_and_expect(o);
    }
}

TEST_F(RescaleCacheCuda, TokensThatNeedMoreThreadsThanABlock) {
    RescaleCacheOptions o;
    o.dtype = DType::float64;
    o.heads = 9;
    o.head_dim = o.rotary_dim = 258;
    const RescaleCachePlan planned = plan(shape_of(RescaleCacheCase(o).args()), current_device());
    ASSERT_GT(planned.lanes * planned.head_groups, rescale_cache_block_threads);
    rescale_and_expect(o);
}

TEST_F(RescaleCacheCuda, MoreTokensThanThereAreThreadsFor) {
    for (const Pairing pairing : both_pairings) {
        RescaleCacheOptions o;
        o.dtype = DType::bfloat16;
        o.pairing = pairing;
        o.layers = 2;
        o.batch = 2;
        o.tokens = 5000;
        o.heads = 3;
        o.head_dim = o.rotary_dim = 32;
        o.placement.misalignment = 1;
        ASSERT_LT(plan(shape_of(RescaleCacheCase(o).args()), current_device()).token_step, o.tokens);
        rescale_and_expect(o);
    }
}

TEST_F(RescaleCacheCuda, PositionsOfEitherKindBroadcastOrNot) {
    for (const bool wide : {false, true}) {
        for (const bool shared : {false, true}) {
            for (const bool same : {false, true}) {
                RescaleCacheOptions o;
                o.positions = {.is_int64 = wide, .same_for_all_sequences = shared, .same_for_all_tokens = same};
                rescale_and_expect(o);
            }
        }
    }
}

// Indices on a GPU are not validated: out-of-range ones must be clamped to the tables.
TEST_F(RescaleCacheCuda, IndicesOutOfRangeMeanTheLastTable) {
    const int32_t wrong[] = {3,   -1, 1 << 20, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(),
                             1000};
    RescaleCacheOptions o;
    o.batch = static_cast<int64_t>(std::size(wrong));
    o.tables = 3;
    for (std::vector<int32_t>& (RescaleCacheCase::* const index)() : {&RescaleCacheCase::from, &RescaleCacheCase::to}) {
        RescaleCacheCase rescale(o);
        rescale.from().assign(o.batch, 0);
        rescale.to().assign(o.batch, 1);
        (rescale.*index)().assign(std::begin(wrong), std::end(wrong));
        DeviceCase device(rescale);
        (rescale.*index)().assign(o.batch, 2);
        rescale_cache_cuda(device.args(), nullptr);
        device.fetch();
        rescale.expect_rescaled();
    }
    // `from` is out of range and clamped to the last table, which `to` names: nothing to re-rotate.
    RescaleCacheCase rescale(o);
    rescale.from().assign(o.batch, 2);
    rescale.to().assign(o.batch, 2);
    rescale.poison_sequences_that_stay();
    rescale.from().assign(std::begin(wrong), std::end(wrong));
    DeviceCase device(rescale);
    rescale_cache_cuda(device.args(), nullptr);
    device.fetch();
    for (const HeadBuffer& layer : rescale.layers()) layer.expect_untouched();
}

// --- streams and launches

// The device decides what is re-rotated, so one graph serves every decoding step.
TEST_F(RescaleCacheCuda, AGraphReadsTheTableIndicesWhenItIsReplayed) {
    const Stream stream;
    RescaleCacheOptions o;
    o.batch = 4;
    RescaleCacheCase rescale(o);
    rescale.from() = {0, 1, 2, 0};
    rescale.to() = {0, 1, 2, 0};
    DeviceCase device(rescale);
    const Recording recording(stream, [&](cudaStream_t on) { rescale_cache_cuda(device.args(), on); });
    EXPECT_EQ(recording.launches(), 1u);
    recording.play(stream);
    device.fetch();
    for (const HeadBuffer& layer : rescale.layers()) layer.expect_untouched();

    rescale.to() = {1, 1, 0, 2};
    device.upload_indices();
    check(cudaDeviceSynchronize());
    recording.play(stream);
    device.fetch();
    rescale.expect_rescaled();
}

TEST_F(RescaleCacheCuda, MoreLayersThanALaunchTakes) {
    const Stream stream;
    RescaleCacheOptions o;
    o.layers = 2 * max_layers_per_launch + 3;
    o.batch = 2;
    o.tokens = 2;
    RescaleCacheCase rescale(o);
    rescale.from() = {0, 2};
    rescale.to() = {1, 0};
    DeviceCase device(rescale);
    const Recording recording(stream, [&](cudaStream_t on) { rescale_cache_cuda(device.args(), on); });
    EXPECT_EQ(recording.launches(), 3u);
    recording.play(stream);
    device.fetch();
    rescale.expect_rescaled();
}

// By programmatic dependent launch a kernel may start while the preceding one still runs.
TEST_F(RescaleCacheCuda, OverlappingCallsGiveWhatSeparateCallsGive) {
    for (const int64_t tokens : {1, 300}) {
        RescaleCacheOptions o;
        o.tokens = tokens;
        o.head_dim = o.rotary_dim = 128;
        RescaleCacheCase separate(o);
        RescaleCacheCase overlapping(o);
        for (RescaleCacheCase* rescale : {&separate, &overlapping}) {
            rescale->from() = {1, 2, 0};
            rescale->to() = {0, 1, 0};
        }
        DeviceCase separate_on_device(separate);
        DeviceCase overlapping_on_device(overlapping);
        for (int i = 0; i < 50; ++i) {
            rescale_cache_cuda(separate_on_device.args(), nullptr);
            check(cudaDeviceSynchronize());
        }
        for (int i = 0; i < 50; ++i) rescale_cache_cuda(overlapping_on_device.args(), nullptr);
        separate_on_device.fetch();
        overlapping_on_device.fetch();
        for (int layer = 0; layer < o.layers; ++layer) {
            EXPECT_TRUE(overlapping.layers()[layer].bytes == separate.layers()[layer].bytes) << tokens << " " << layer;
        }
    }
}

TEST_F(RescaleCacheCuda, EmptyTensorsLaunchNothing) {
    const Stream stream;
    for (const auto& [layers, batch, tokens, heads] :
         {std::tuple{0, 2, 5, 1}, {2, 0, 5, 1}, {2, 2, 0, 1}, {2, 2, 5, 0}}) {
        RescaleCacheOptions o;
        o.layers = layers;
        o.batch = batch;
        o.tokens = tokens;
        o.heads = heads;
        RescaleCacheCase rescale(o);
        DeviceCase device(rescale);
        const Recording recording(stream, [&](cudaStream_t on) { rescale_cache_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 0u) << describe(o);
    }
}

// --- offsets

TEST_F(RescaleCacheCuda, TokensMoreThanTwoToThe31ElementsApart) {
    constexpr int dim = 64;
    constexpr int64_t far_stride = (int64_t{1} << 31) + 8;
    constexpr size_t bytes = 2 * (far_stride + dim);
    size_t available = 0;
    size_t total = 0;
    check(cudaMemGetInfo(&available, &total));
    if (available < bytes + (size_t{1} << 28)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";

    RescaleCacheOptions o;
    o.dtype = DType::bfloat16;
    o.layers = 1;
    o.batch = 1;
    o.tokens = 2;
    o.heads = 1;
    o.head_dim = o.rotary_dim = dim;
    RescaleCacheCase rescale(o);
    rescale.from() = {0};
    rescale.to() = {2};
    DeviceCase near(rescale);
    const DeviceMemory far(bytes);
    HeadBuffer& buffer = rescale.layers()[0];
    for (int64_t t = 0; t < 2; ++t) {
        check(cudaMemcpy(far.data() + t * far_stride * 2, buffer.head(0, t, 0), dim * 2, cudaMemcpyHostToDevice));
    }
    RescaleCacheArgs args = near.args();
    void* const keys = far.data();
    args.keys = std::span(&keys, 1);
    args.strides.token = far_stride;
    rescale_cache_cuda(args, nullptr);
    for (int64_t t = 0; t < 2; ++t) {
        check(cudaMemcpy(buffer.bytes.data() + buffer.byte_of(0, t, 0), far.data() + t * far_stride * 2, dim * 2,
                         cudaMemcpyDeviceToHost));
    }
    rescale.expect_rescaled();
}

}  // namespace
}  // namespace mrrope
