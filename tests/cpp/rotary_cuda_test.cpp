#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "mrrope/rotary.h"
#include "rotary_case.h"
#include "rotary_plan.h"

// Small on purpose: compute-sanitizer runs these too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class DeviceMemory {
public:
    explicit DeviceMemory(size_t bytes) {
        if (bytes > 0) check(cudaMalloc(&memory_, bytes));
    }
    template <class T>
    explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
        upload(values);
    }
    DeviceMemory(DeviceMemory&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
    DeviceMemory& operator=(DeviceMemory&&) = delete;
    ~DeviceMemory() { cudaFree(memory_); }

    std::byte* data() const { return static_cast<std::byte*>(memory_); }

    template <class T>
    void upload(const std::vector<T>& values) {
        if (!values.empty())
            check(cudaMemcpy(memory_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    template <class T>
    void download(std::vector<T>& values) const {
        if (!values.empty())
            check(cudaMemcpy(values.data(), memory_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    }

private:
    void* memory_ = nullptr;
};

// A case with its buffers, noise around the heads and all, copied to the device and back.
class DeviceCase {
public:
    explicit DeviceCase(RotaryCase& rotary)
        : rotary_(rotary),
          q_in_(rotary.q().in.bytes),
          q_out_(rotary.q().out.bytes),
          k_in_(rotary.k().in.bytes),
          k_out_(rotary.k().out.bytes),
          positions_(rotary.position_words()),
          table_(rotary.table()) {}

    RotaryArgs args() {
        RotaryArgs args = rotary_.args();
        move_to_device(args.q, rotary_.q(), q_in_, q_out_);
        move_to_device(args.k, rotary_.k(), k_in_, k_out_);
        args.positions.data = positions_.data();
        args.table = reinterpret_cast<const uint64_t*>(table_.data());
        return args;
    }

    void fetch() {
        check(cudaDeviceSynchronize());
        q_in_.download(rotary_.q().in.bytes);
        q_out_.download(rotary_.q().out.bytes);
        k_in_.download(rotary_.k().in.bytes);
        k_out_.download(rotary_.k().out.bytes);
    }

private:
    void move_to_device(HeadsView& view, const Heads& heads, const DeviceMemory& in, const DeviceMemory& out) {
        if (view.heads == 0) return;
        const bool in_place = rotary_.options().in_place;
        view.in = in.data() + heads.in.first_byte;
        view.out = in_place ? in.data() + heads.in.first_byte : out.data() + heads.out.first_byte;
    }

    RotaryCase& rotary_;
    DeviceMemory q_in_, q_out_, k_in_, k_out_, positions_, table_;
};

class RotaryCuda : public ::testing::Test {
protected:
    void SetUp() override {
        int devices = 0;
        const cudaError_t status = cudaGetDeviceCount(&devices);
        if (status != cudaSuccess || devices == 0) {
            GTEST_SKIP() << "no CUDA device: " << (status == cudaSuccess ? "none found" : cudaGetErrorString(status));
        }
    }

    void TearDown() override {
        if (IsSkipped()) return;
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }

    // Both stay within one rounding of the same reference, so they differ by one unit in the last place at most.
    static void expect_as_on_cpu(RotaryCase& on_gpu) {
        const CaseOptions& options = on_gpu.options();
        SCOPED_TRACE(describe(options));
        RotaryCase on_cpu(options);
        rotary_cpu(on_cpu.args());
        const Format format = format_of(options.dtype);
        for (const bool is_q : {true, false}) {
            const Heads& gpu = is_q ? on_gpu.q() : on_gpu.k();
            const Heads& cpu = is_q ? on_cpu.q() : on_cpu.k();
            on_gpu.for_each_component(gpu, [&](int64_t batch, int64_t token, int64_t head, int at) {
                const auto value = [&](RotaryCase& rotary, const Heads& heads) {
                    const Buffer& out = rotary.output(heads);
                    return element_at(options.dtype, rotary.component(out, out.bytes, batch, token, head, at));
                };
                const double expected = value(on_cpu, cpu);
                const double slack = std::ldexp(std::abs(expected), 1 - format.significant_bits) +
                                     2 * 6.0 * options.attention_factor * format.arithmetic_error;
                ASSERT_NEAR(value(on_gpu, gpu), expected, slack) << batch << " " << token << " " << head << " " << at;
            });
            on_gpu.expect_untouched_outside_heads(gpu, on_gpu.output(gpu).bytes);
        }
    }

    static void rotate_and_expect(const CaseOptions& options) {
        RotaryCase rotary(options);
        DeviceCase device(rotary);
        rotary_cuda(device.args(), nullptr);
        device.fetch();
        rotary.expect_rotated();
    }
};

// --- against the reference, which rotary_cpu is tested against too
// ------------------------------------------------------

TEST_F(RotaryCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 250 && !HasFailure(); ++seed) rotate_and_expect(random_options(seed));
}

TEST_F(RotaryCuda, FastHeadDims) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const int head_dim : {64, 80, 96, 128, 192, 256, 512}) {
                CaseOptions o;
                o.dtype = dtype;
                o.pairing = pairing;
                o.q_heads = 4;
                o.k_heads = 2;
                o.head_dim = o.rotary_dim = head_dim;
                o.in_place = head_dim % 64 == 0;
                ASSERT_GT(plan_rotary(shape_of(RotaryCase(o).args())).vector, 1);
                rotate_and_expect(o);
            }
        }
    }
}

// Every kernel that can be chosen: with and without vectors, 1, 2 and 4 heads a thread, heads left over or not.
TEST_F(RotaryCuda, ManyTokensOfFewAndOfManyHeads) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const auto& [tokens, heads, head_dim] :
                 {std::tuple{4100, 5, 128}, {1030, 3, 512}, {260, 9, 64}, {5, 40, 64}, {270, 1, 256}}) {
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
                rotate_and_expect(o);
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

// --- streams and launches
// ----------------------------------------------------------------------------------------------

class Stream {
public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    operator cudaStream_t() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

// What a call puts on its stream.
class Recording {
public:
    Recording(const RotaryArgs& args, cudaStream_t stream) {
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        rotary_cuda(args, stream);
        check(cudaStreamEndCapture(stream, &graph_));
    }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
    ~Recording() { cudaGraphDestroy(graph_); }

    size_t launches() const {
        size_t count = 0;
        check(cudaGraphGetNodes(graph_, nullptr, &count));
        return count;
    }

    void play(cudaStream_t stream) const {
        cudaGraphExec_t executable = nullptr;
        check(cudaGraphInstantiate(&executable, graph_, 0));
        check(cudaGraphLaunch(executable, stream));
        check(cudaStreamSynchronize(stream));
        check(cudaGraphExecDestroy(executable));
    }

private:
    cudaGraph_t graph_ = nullptr;
};

TEST_F(RotaryCuda, RunsOnTheStreamItIsGiven) {
    const Stream stream;
    CaseOptions o;
    o.head_dim = o.rotary_dim = 64;
    RotaryCase rotary(o);
    DeviceCase device(rotary);
    rotary_cuda(device.args(), stream);
    check(cudaStreamSynchronize(stream));
    device.fetch();
    rotary.expect_rotated();
}

TEST_F(RotaryCuda, RotatesQueriesAndKeysInOneLaunchThatAGraphCanReplay) {
    const Stream stream;
    CaseOptions o;
    o.head_dim = 96;
    o.rotary_dim = 64;
    RotaryCase rotary(o);
    DeviceCase device(rotary);
    const Recording recording(device.args(), stream);
    EXPECT_EQ(recording.launches(), 1u);
    recording.play(stream);
    device.fetch();
    rotary.expect_rotated();
}

TEST_F(RotaryCuda, EmptyTensorsLaunchNothing) {
    const Stream stream;
    for (const auto& [batch, tokens, heads] : {std::tuple{0, 5, 2}, {2, 0, 2}, {2, 5, 0}, {0, 0, 0}}) {
        RotaryArgs args;
        args.batch = batch;
        args.tokens = tokens;
        args.q.heads = heads;
        args.head_dim = args.rotary_dim = 64;
        const Recording recording(args, stream);
        EXPECT_EQ(recording.launches(), 0u) << batch << " " << tokens << " " << heads;
    }
}

// --- offsets
// -----------------------------------------------------------------------------------------------------------

TEST_F(RotaryCuda, SlicesGiveWhatOneLaunchGives) {
    for (uint64_t seed = 500; seed < 530; ++seed) {
        const CaseOptions options = random_options(seed);
        RotaryCase whole(options);
        DeviceCase whole_on_device(whole);
        rotary_cuda(whole_on_device.args(), nullptr);
        whole_on_device.fetch();

        RotaryCase sliced(options);
        DeviceCase sliced_on_device(sliced);
        RotaryPlan plan;
        plan.tokens_per_launch = std::min<int64_t>(2, options.tokens);
        for_each_launch(sliced_on_device.args(), plan, [](const RotaryArgs& part) { rotary_cuda(part, nullptr); });
        sliced_on_device.fetch();
        EXPECT_TRUE(sliced.output(sliced.q()).bytes == whole.output(whole.q()).bytes) << describe(options);
        EXPECT_TRUE(sliced.output(sliced.k()).bytes == whole.output(whole.k()).bytes) << describe(options);
    }
}

TEST_F(RotaryCuda, TokensMoreThanTwoToThe31ElementsApart) {
    constexpr int dim = 64;
    constexpr int64_t apart = (int64_t{1} << 31) + 8;
    constexpr size_t bytes = 2 * (apart + dim);
    size_t available = 0;
    size_t total = 0;
    check(cudaMemGetInfo(&available, &total));
    if (available < bytes + (size_t{1} << 28)) GTEST_SKIP() << "needs " << bytes << " bytes of GPU memory";

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
    const Buffer& buffer = rotary.q().in;
    const auto token_in_buffer = [&](int64_t t) { return buffer.first_byte + t * dim * 2; };
    for (const int64_t tokens_per_launch : {2, 1}) {
        for (int64_t t = 0; t < 2; ++t) {
            check(cudaMemcpy(far.data() + t * apart * 2, rotary.q().in_before.data() + token_in_buffer(t), dim * 2,
                             cudaMemcpyHostToDevice));
        }
        RotaryArgs args = near.args();
        args.q.in = args.q.out = far.data();
        args.q.in_strides.token = args.q.out_strides.token = apart;
        RotaryPlan plan;
        plan.tokens_per_launch = tokens_per_launch;
        for_each_launch(args, plan, [](const RotaryArgs& part) { rotary_cuda(part, nullptr); });
        rotary.q().in.bytes = rotary.q().in_before;
        for (int64_t t = 0; t < 2; ++t) {
            check(cudaMemcpy(rotary.q().in.bytes.data() + token_in_buffer(t), far.data() + t * apart * 2, dim * 2,
                             cudaMemcpyDeviceToHost));
        }
        rotary.expect_rotated();
    }
}

}  // namespace
}  // namespace mrrope
