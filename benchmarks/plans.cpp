#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device_memory.h"
#include "device_properties.h"
#include "every_plan.h"
#include "mrrope/frequency_table.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rotary.h"
#include "qk_norm_rotary_and_cache_plan.h"
#include "qk_norm_rotary_plan.h"
#include "rotary_plan.h"

// Times every launch plan of a kernel, and a copy of as many bytes: the measurements behind the heuristics in
// kernels/*_plan.cpp. bfloat16, heads of 128, in place; needs a GPU.
//     plans_benchmark [rotary | rotary_by_head | norm | norm_and_cache]

namespace mrrope {
namespace {

constexpr int head_dim = 128;
constexpr int element_size = 2;
constexpr int tables = 5;
constexpr int head_tables = 8;
constexpr int64_t max_tokens = 131072;
constexpr int64_t max_decoded = 256;
constexpr int64_t cache_bytes = int64_t{60} << 20;  // the L2 of an H200

using testing::check;
using testing::DeviceMemory;
using testing::Stream;

DeviceMemory small_numbers(int64_t bytes) {
    DeviceMemory memory(bytes);
    check(cudaMemset(memory.data(), 0x3d, bytes));  // a small number in every format
    return memory;
}

// CUDA graphs that are timed round-robin, so that all see the same clocks.
class RoundRobin {
public:
    RoundRobin() {
        check(cudaEventCreate(&start_));
        check(cudaEventCreate(&end_));
    }
    RoundRobin(const RoundRobin&) = delete;
    RoundRobin& operator=(const RoundRobin&) = delete;
    ~RoundRobin() {
        for (const Graph& graph : graphs_) cudaGraphExecDestroy(graph.executable);
        cudaEventDestroy(start_);
        cudaEventDestroy(end_);
    }

    // Captures step(i, stream) for each of `steps` sets of buffers in one graph. Returns the graph's index.
    size_t add(int steps, const std::function<void(int, cudaStream_t)>& step) {
        step(0, stream_);  // loads the kernel
        cudaGraph_t recorded;
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < steps; ++i) step(i, stream_);
        check(cudaStreamEndCapture(stream_, &recorded));
        Graph& graph = graphs_.emplace_back(Graph{.steps = steps});
        check(cudaGraphInstantiate(&graph.executable, recorded, 0));
        check(cudaGraphDestroy(recorded));
        return graphs_.size() - 1;
    }

    void run() {
        constexpr int warm_ups = 3;
        constexpr int replays = 21;
        for (int replay = 0; replay < warm_ups + replays; ++replay) {
            for (Graph& graph : graphs_) {
                check(cudaEventRecord(start_, stream_));
                check(cudaGraphLaunch(graph.executable, stream_));
                check(cudaEventRecord(end_, stream_));
                check(cudaEventSynchronize(end_));
                float milliseconds = 0;
                check(cudaEventElapsedTime(&milliseconds, start_, end_));
                if (replay >= warm_ups) graph.times.push_back(milliseconds * 1e3f / static_cast<float>(graph.steps));
            }
        }
    }

    // The median time of a step.
    double microseconds(size_t graph) const {
        std::vector<float> times = graphs_[graph].times;
        std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
        return times[times.size() / 2];
    }

private:
    struct Graph {
        int steps;
        cudaGraphExec_t executable = nullptr;
        std::vector<float> times = {};
    };

    Stream stream_;
    cudaEvent_t start_ = nullptr, end_ = nullptr;
    std::vector<Graph> graphs_;
};

struct Geometry {
    int64_t tokens;
    int q_heads;
    int k_heads;

    constexpr int64_t bytes() const { return tokens * (q_heads + k_heads) * head_dim * element_size; }
    // Enough that each set is evicted from L2 before it is used again. Below 16 tokens of 40 heads, the cap of 400
    // leaves all sets in L2.
    int sets() const { return static_cast<int>(std::clamp<int64_t>(4 * cache_bytes / bytes() + 1, 3, 400)); }
};

constexpr int64_t max_bytes = 3 * Geometry{max_tokens, 32, 8}.bytes();

class Benchmark {
public:
    Benchmark()
        : heads_(small_numbers(max_bytes)), copies_(max_bytes), weights_(small_numbers(64 * head_dim * element_size)) {
        std::vector<int64_t> positions(max_tokens);
        for (int64_t i = 0; i < max_tokens; ++i) positions[i] = i;
        std::vector<uint64_t> stack;
        for (int i = 0; i < head_tables; ++i) {
            const auto words = packed(build_table({.method = Method::mrrope_pro,
                                                   .rotary_dim = head_dim,
                                                   .base = 5e5,
                                                   .original_max_position = 8192,
                                                   .scale = static_cast<double>(1 << i)}));
            stack.insert(stack.end(), words.begin(), words.end());
        }
        words_ = static_cast<int32_t>(stack.size()) / head_tables;
        positions_ = std::make_unique<DeviceMemory>(positions);
        tables_ = std::make_unique<DeviceMemory>(stack);
        index_ = std::make_unique<DeviceMemory>(std::vector<int32_t>(max_decoded, tables - 1));
        RoundRobin discarded;  // the first graph of a process replays faster than all others
        add_copy(discarded, {64, 32, 8});
        discarded.run();
    }

    void rotary() const {
        std::printf("\nrotary by one table, and by a table index; * is the plan\n");
        for (const int64_t tokens : {1, 4, 16, 64, 128, 256, 512, 1024, 4096, 8192, 131072}) rotary({tokens, 32, 8});
        for (const int64_t tokens : {64, 8192, 131072}) rotary({tokens, 4, 1});
        rotary({65536, 8, 1});
        rotary({8192, 64, 8});
    }

    void rotary_by_head() const {
        std::printf("\nrotary with a table per key head: one table by its plan; by every kernel\n");
        for (const int64_t tokens : {1, 16, 64, 256, 384, 512, 768, 1024, 1280, 2048, 8192, 131072}) {
            rotary_by_head({tokens, 32, 8});
            rotary_by_head({tokens, 9, 3});
        }
        for (const int64_t tokens : {1024, 2048, 8192}) {
            rotary_by_head({tokens, 16, 8});
            rotary_by_head({tokens, 64, 8});
        }
    }

    void norm_and_cache() const {
        std::printf("\nnorm, rotation and cache write, 32/8 heads: heads per thread\n");
        for (const int64_t tokens : {1, 16, 64, 256, 1024, 2048, 8192, 32768}) norm_and_cache({tokens, 32, 16});
    }

    void norm(NormOver over) const {
        std::printf("\nnorm over %s: heads per thread\n", over == NormOver::head ? "a head" : "all heads");
        for (const int k_heads : {8, 32}) {
            for (const int64_t tokens : {1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 32768}) {
                norm({tokens, 32, k_heads}, over);
            }
        }
    }

private:
    size_t add_copy(RoundRobin& timing, const Geometry& geometry) const {
        return timing.add(geometry.sets(), [&](int i, cudaStream_t stream) {
            const int64_t at = i * geometry.bytes();
            check(cudaMemcpyAsync(copies_.data() + at, heads_.data() + at, geometry.bytes(), cudaMemcpyDeviceToDevice,
                                  stream));
        });
    }

    static void begin(const Geometry& geometry, double copy) {
        std::printf("%7lld x %2d/%-2d copy %8.3f", static_cast<long long>(geometry.tokens), geometry.q_heads,
                    geometry.k_heads, copy);
    }

    HeadsView view(int64_t byte, int heads) const {
        const HeadStrides strides{.batch = 0, .token = int64_t{heads} * head_dim, .head = head_dim};
        return {.in = heads_.data() + byte,
                .out = heads_.data() + byte,
                .heads = heads,
                .in_strides = strides,
                .out_strides = strides};
    }

    // In decoding every token belongs to a sequence of its own, with its own index.
    TableChoice by_index(const Geometry& geometry) const {
        return {.count = tables,
                .stride = words_,
                .index = index_->as<int32_t>(),
                .token_stride = geometry.tokens <= max_decoded ? 1 : 0};
    }

    TableChoice by_head(const Geometry& geometry) const { return {.heads = geometry.k_heads, .head_stride = words_}; }

    RotaryArgs args(const Geometry& geometry, int set, const TableChoice& choice) const {
        const int64_t start = set * geometry.bytes();
        RotaryArgs args;
        args.q = view(start, geometry.q_heads);
        args.k = view(start + geometry.tokens * geometry.q_heads * head_dim * element_size, geometry.k_heads);
        args.positions.data = positions_->data();
        args.table = tables_->as<uint64_t>();
        args.choice = choice;
        args.batch = 1;
        args.tokens = geometry.tokens;
        args.head_dim = args.rotary_dim = head_dim;
        args.dtype = DType::bfloat16;
        return args;
    }

    size_t add_rotary(RoundRobin& timing, const Geometry& geometry, const TableChoice& choice,
                      const RotaryPlan& plan) const {
        return timing.add(geometry.sets(),
                          [&](int i, cudaStream_t stream) { rotary_cuda(args(geometry, i, choice), plan, stream); });
    }

    void rotary_by_head(const Geometry& geometry) const {
        RoundRobin timing;
        const size_t copy = add_copy(timing, geometry);
        const size_t one_table = add_rotary(timing, geometry, {}, plan(shape_of(args(geometry, 0, {})), device_));
        const RotaryShape shape = shape_of(args(geometry, 0, by_head(geometry)));
        const RotaryPlan chosen = plan(shape, device_);
        std::vector<std::pair<RotaryPlan, size_t>> timed;
        for (const RotaryPlan& plan : testing::every_plan(shape)) {
            timed.emplace_back(plan, add_rotary(timing, geometry, by_head(geometry), plan));
        }
        timing.run();
        begin(geometry, timing.microseconds(copy));
        std::printf(" | one table %8.3f", timing.microseconds(one_table));
        for (const auto& [plan, graph] : timed) {
            const RotaryKernel& kernel = plan;
            std::printf(" | %s: %s%.3f", testing::describe(plan).c_str(), kernel == chosen ? "*" : "",
                        timing.microseconds(graph));
        }
        std::printf("\n");
        std::fflush(stdout);
    }

    void rotary(const Geometry& geometry) const {
        RoundRobin timing;
        const size_t copy = add_copy(timing, geometry);
        const auto time_every_plan = [&](const TableChoice& choice) {
            std::vector<std::pair<RotaryPlan, size_t>> timed;
            for (const RotaryPlan& plan : testing::every_plan(args(geometry, 0, choice))) {
                if (plan.tokens_inside) continue;  // for another layout
                timed.emplace_back(plan, add_rotary(timing, geometry, choice, plan));
            }
            return timed;
        };
        const auto by_one_table = time_every_plan({});
        const auto by_several = time_every_plan(by_index(geometry));
        timing.run();
        begin(geometry, timing.microseconds(copy));
        for (const auto& [timed, choice] : {std::pair{by_one_table, TableChoice{}}, {by_several, by_index(geometry)}}) {
            const RotaryKernel chosen = plan(shape_of(args(geometry, 0, choice)), device_);
            std::printf(" | %s", choice.count > 1 ? "by index" : "one table");
            for (const auto& [plan, graph] : timed) {
                const RotaryKernel& kernel = plan;
                std::printf(" | %s: %s%.3f", testing::describe(plan).c_str(), kernel == chosen ? "*" : "",
                            timing.microseconds(graph));
            }
        }
        std::printf("\n");
        std::fflush(stdout);
    }

    // k and v are the two halves of the geometry's k heads; slot i of the cache is token i's.
    QkNormRotaryAndCacheArgs cache_args(const Geometry& geometry, int set) const {
        constexpr int64_t block_size = 16;
        const int kv_heads = geometry.k_heads / 2;
        const int64_t token_stride = int64_t{kv_heads} * head_dim;
        const int64_t heads_bytes = geometry.tokens * token_stride * element_size;  // of k, and of v
        const int64_t blocks = (geometry.tokens + block_size - 1) / block_size;
        const int64_t bytes = blocks * block_size * token_stride * element_size;  // of a cache
        QkNormRotaryAndCacheArgs found;
        found.rotary = args(geometry, set, {});
        found.rotary.k = {};
        CachedHeads* both[] = {&found.k, &found.v};
        for (int i = 0; i < 2; ++i) {
            HeadsView& heads = both[i]->view;
            heads = view((set + 1) * geometry.bytes() - (2 - i) * heads_bytes, kv_heads);
            heads.out = copies_.data() + (2 * set + i) * bytes;
            heads.out_strides = {.batch = block_size * token_stride, .token = token_stride, .head = head_dim};
        }
        found.slots.of_tokens = found.rotary.positions;
        found.slots.blocks = blocks;
        found.slots.block_size = block_size;
        found.q_weight = found.k_weight = weights_.data();
        found.eps = 1e-6;
        return found;
    }

    void norm_and_cache(const Geometry& geometry) const {
        RoundRobin timing;
        const size_t copy = add_copy(timing, geometry);
        const QkNormRotaryAndCacheShape shape = shape_of(cache_args(geometry, 0));
        std::vector<std::pair<int, size_t>> timed;
        for (const int heads : {1, 2, 8}) {
            const QkNormRotaryAndCachePlan forced = plan_with(shape, device_, heads);
            timed.emplace_back(heads, timing.add(geometry.sets(), [&](int i, cudaStream_t stream) {
                qk_norm_rotary_and_cache_cuda(cache_args(geometry, i), forced, stream);
            }));
        }
        timing.run();
        begin(geometry, timing.microseconds(copy));
        print_heads_per_thread(timed, plan(shape, device_).heads_per_thread, timing);
    }

    // Ends the line.
    static void print_heads_per_thread(const std::vector<std::pair<int, size_t>>& timed, int chosen,
                                       const RoundRobin& timing) {
        for (const auto& [heads, graph] : timed) {
            std::printf(" | %s%d: %8.3f", chosen == heads ? "*" : "", heads, timing.microseconds(graph));
        }
        std::printf("\n");
        std::fflush(stdout);
    }

    void norm(const Geometry& geometry, NormOver over) const {
        const auto norm_args = [&](int set) {
            QkNormRotaryArgs found;
            found.rotary = args(geometry, set, {});
            found.q_weight = found.k_weight = weights_.data();
            found.eps = 1e-6;
            found.over = over;
            return found;
        };
        RoundRobin timing;
        const size_t copy = add_copy(timing, geometry);
        const QkNormRotaryShape shape = shape_of(norm_args(0));
        std::vector<std::pair<int, size_t>> timed;
        for (const int heads : over == NormOver::head ? std::vector{1, 2, 8} : std::vector{2, 4}) {
            const QkNormRotaryPlan forced = plan_with(shape, device_, heads);
            timed.emplace_back(heads, timing.add(geometry.sets(), [&](int i, cudaStream_t stream) {
                qk_norm_rotary_cuda(norm_args(i), forced, stream);
            }));
        }
        timing.run();
        begin(geometry, timing.microseconds(copy));
        print_heads_per_thread(timed, plan(shape, device_).heads_per_thread, timing);
    }

    DeviceMemory heads_, copies_, weights_;
    std::unique_ptr<DeviceMemory> positions_, tables_, index_;
    int32_t words_ = 0;
    Device device_ = current_device();
};

}  // namespace
}  // namespace mrrope

int main(int count, char** arguments) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::fprintf(stderr, "plans_benchmark needs a GPU\n");
        return 1;
    }
    const std::string only = count > 1 ? arguments[1] : "";
    const auto wanted = [&](const char* kernel) { return only.empty() || only == kernel; };
    const mrrope::Benchmark benchmark;
    std::printf("microseconds; * marks the chosen plan\n");
    if (wanted("rotary")) benchmark.rotary();
    if (wanted("rotary_by_head")) benchmark.rotary_by_head();
    if (wanted("norm_and_cache")) benchmark.norm_and_cache();
    if (wanted("norm")) {
        benchmark.norm(mrrope::NormOver::head);
        benchmark.norm(mrrope::NormOver::all_heads);
    }
}
