#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "device_memory.h"
#include "foreign_kernels.h"
#include "mrrope/frequency_table.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"
#include "on_gpu.h"

// Our kernels between foreign kernels that use programmatic dependent launch, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int rounds = 500;

// Small calls, which start and trigger earliest.
class OurKernels {
public:
    OurKernels() : tables_(two_tables()), heads_(std::vector<float>(tokens * head_dim)), keys_{heads_.data()} {
        args_.q.in = args_.q.out = heads_.data();
        args_.q.heads = 1;
        args_.q.in_strides = args_.q.out_strides = {.token = head_dim};
        args_.positions.data = positions_.data();
        args_.table = tables_.as<uint64_t>();
        args_.batch = 1;
        args_.tokens = tokens;
        args_.head_dim = args_.rotary_dim = head_dim;
    }

    void rotary(cudaStream_t stream) const { rotary_cuda(args_, stream); }

    void rotary_by_index(cudaStream_t stream) const {
        RotaryArgs args = args_;
        args.choice = {.count = 2, .stride = head_dim / 2 + 1, .index = one_.as<int32_t>()};
        rotary_cuda(args, stream);
    }

    void rotary_of_many_heads(cudaStream_t stream) const {
        RotaryArgs args = args_;
        args.q.heads = 64;  // all at the same address: the result is not checked
        args.q.in_strides.token = args.q.out_strides.token = 0;
        args.tokens = 1;
        rotary_cuda(args, stream);
    }

    void rescale(cudaStream_t stream) const {
        rescale_cache_cuda({.keys = keys_,
                            .strides = {.token = head_dim},
                            .positions = args_.positions,
                            .tables = args_.table,
                            .table_count = 2,
                            .from = zero_.as<int32_t>(),
                            .to = one_.as<int32_t>(),
                            .batch = 1,
                            .tokens = tokens,
                            .heads = 1,
                            .rotary_dim = head_dim},
                           stream);
    }

private:
    static constexpr int tokens = 4;
    static constexpr int head_dim = 128;

    static std::vector<uint64_t> two_tables() {
        std::vector<uint64_t> words;
        for (const double scale : {1.0, 4.0}) {
            const auto one = packed(build_table(
                {.method = Method::pi, .rotary_dim = head_dim, .original_max_position = 4096, .scale = scale}));
            words.insert(words.end(), one.begin(), one.end());
        }
        return words;
    }

    DeviceMemory tables_;
    DeviceMemory heads_;
    DeviceMemory positions_{std::vector<int64_t>{0, 1, 2, 3}};
    DeviceMemory zero_{std::vector<int32_t>{0}};
    DeviceMemory one_{std::vector<int32_t>{1}};
    std::array<void*, 1> keys_;
    RotaryArgs args_;
};

class DependentLaunch : public OnGpu {
protected:
    // Expects a reader to see the values of a writer two launches before it, with `between` between them.
    static void expect_fresh_values(const std::function<void(cudaStream_t)>& between, Reads reads) {
        const Stream stream;
        const DeviceMemory values{std::vector<int>(foreign_values)};
        const DeviceMemory seen{std::vector<int>(rounds * foreign_values)};
        auto* written = reinterpret_cast<int*>(values.data());
        auto* read = reinterpret_cast<int*>(seen.data());
        for (int round = 0; round < rounds; ++round) {
            launch_slow_writer(written, round + 1, stream);
            between(stream);
            launch_reader(written, read + round * foreign_values, reads, stream);
        }
        check(cudaStreamSynchronize(stream));
        expect_rounds(seen);
    }

    static void expect_rounds(const DeviceMemory& seen) {
        std::vector<int> found(rounds * foreign_values);
        seen.download(found);
        int stale = 0;
        for (int i = 0; i < rounds * foreign_values; ++i) stale += found[i] != i / foreign_values + 1;
        EXPECT_EQ(stale, 0) << "of " << found.size() << " values";
    }

    // For each of our kernels that triggers early.
    static void expect_fresh_values_behind_ours(Reads reads) {
        const OurKernels ours;
        const std::pair<const char*, std::function<void(cudaStream_t)>> kernels[] = {
            {"rotary", [&](cudaStream_t stream) { ours.rotary(stream); }},
            {"rotary_by_index", [&](cudaStream_t stream) { ours.rotary_by_index(stream); }},
            {"rotary_of_many_heads", [&](cudaStream_t stream) { ours.rotary_of_many_heads(stream); }},
            {"rescale", [&](cudaStream_t stream) { ours.rescale(stream); }},
        };
        for (const auto& [name, kernel] : kernels) {
            SCOPED_TRACE(name);
            expect_fresh_values(kernel, reads);
        }
    }
};

// Must run first, before the PDL support of our kernels is cached.
TEST_F(DependentLaunch, TheFirstLaunchOfAKernelMayBeCaptured) {
    const OurKernels ours;
    const Stream stream;
    const Recording recording(stream, [&](cudaStream_t to) { ours.rotary(to); });
    EXPECT_EQ(recording.launches(), 1u);
    recording.play(stream);
}

// griddepcontrol.wait waits for the preceding kernel only, so every thread of ours must wait before it exits.
TEST_F(DependentLaunch, AReaderThatWaitsSeesTheWriterBeforeOurs) {
    expect_fresh_values_behind_ours(Reads::after_wait);
}

// A reader that has started may assume that the writer has completed: ours must not trigger before its own wait.
TEST_F(DependentLaunch, AReaderThatDoesNotWaitSeesTheWriterBeforeOurs) {
    expect_fresh_values_behind_ours(Reads::before_wait);
}

// Code compiled for sm_80 has no griddepcontrol.wait, on whatever device it runs.
TEST_F(DependentLaunch, IsForKernelsThatWait) {
    EXPECT_EQ(copy_waits(), has_dependent_launch());
    EXPECT_FALSE(old_copy_waits());
    using Copy = void (*)(const int*, int*, cudaStream_t);
    for (const Copy copy : {launch_copy, launch_old_copy}) {
        const Stream stream;
        const DeviceMemory values{std::vector<int>(foreign_values)};
        const DeviceMemory seen{std::vector<int>(rounds * foreign_values)};
        auto* written = reinterpret_cast<int*>(values.data());
        for (int round = 0; round < rounds; ++round) {
            launch_slow_writer(written, round + 1, stream);
            copy(written, reinterpret_cast<int*>(seen.data()) + round * foreign_values, stream);
        }
        check(cudaStreamSynchronize(stream));
        expect_rounds(seen);
    }
}

}  // namespace
}  // namespace mrrope
