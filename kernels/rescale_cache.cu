#include <algorithm>

#include "device/dependent_launch.cuh"
#include "device/head_fragment.cuh"
#include "mrrope/rescale_cache.h"
#include "rescale_cache_plan.h"

namespace mrrope {
namespace {

// Passed to the kernel by value.
struct RescaleCacheLaunch {
    void* keys[most_layers_per_launch];
    int layers;
    HeadStrides strides;
    PositionsView positions;
    const uint64_t* tables;
    uint32_t table_count;
    const int32_t* from;
    const int32_t* to;
    int64_t batch;
    int64_t tokens;
    int heads;
    int half;
    RescaleCachePlan plan;
};

// All blocks turn one sequence of one layer together, then the next, and leave out sequences that stay with their
// table: asked of a cache that has nothing to turn, they return at once. What a thread does to its heads is what
// rotary_kernel does, by the difference of two tables.
template <class Element, int Vector, Pairing pairing>
__global__ void __launch_bounds__(rescale_cache_block_threads, rescale_cache_resident_blocks)
    rescale_cache_kernel(const __grid_constant__ RescaleCacheLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    const int thread = blockIdx.x * rescale_cache_block_threads + threadIdx.x;
    const int lane = thread % launch.plan.lanes;
    const int group = thread / launch.plan.lanes % launch.plan.head_groups;
    const int first_token = thread / launch.plan.lanes / launch.plan.head_groups;
    const Layout layout{lane, launch.half};
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (first_token >= launch.plan.token_step) return;

    for (int64_t sequence = 0; sequence < launch.batch; ++sequence) {
        // Unsigned, so that no index, however wrong, leads out of the tables.
        const auto at = [&](const int32_t* index) {
            return min(static_cast<uint32_t>(index[sequence]), launch.table_count - 1);
        };
        if (at(launch.from) == at(launch.to)) continue;
        const uint64_t* from = launch.tables + at(launch.from) * static_cast<int64_t>(launch.half + 1);
        const uint64_t* to = launch.tables + at(launch.to) * static_cast<int64_t>(launch.half + 1);
        const auto gain =
            static_cast<Real>(attention_factor_of(to[launch.half]) / attention_factor_of(from[launch.half]));
        uint64_t turns[Vector];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) turns[j] = to[layout.pair(j)] - from[layout.pair(j)];
        const int heads = (launch.heads - group + launch.plan.head_groups - 1) / launch.plan.head_groups;
        const int64_t next_head = launch.plan.head_groups * launch.strides.head;
        for (int layer = 0; layer < launch.layers; ++layer) {
            Element* head = static_cast<Element*>(launch.keys[layer]) + sequence * launch.strides.batch +
                            first_token * launch.strides.token + group * launch.strides.head;
            for (int64_t token = first_token; token < launch.tokens; token += launch.plan.token_step) {
                HeadFragment<Element, Vector> fragments[rescale_cache_heads_per_thread];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < rescale_cache_heads_per_thread; ++j) {
                    if (j < heads) fragments[j].load(head + j * next_head, layout);
                }
                const int64_t position = position_at(launch.positions, 0, sequence, token);
                CosSin<Real> by[Vector];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < Vector; ++j) by[j] = scaled_cos_sin(phase_of(position, turns[j]), gain, Real(1));
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < rescale_cache_heads_per_thread; ++j) {
                    if (j >= heads) break;
                    fragments[j].template rotate<Layout::crosses_vectors>(by);
                    fragments[j].store(head + j * next_head, layout);
                }
                head += launch.plan.token_step * launch.strides.token;
            }
        }
    }
}

template <class Element, int Vector>
void launch_rescale(const RescaleCacheArgs& args, const RescaleCachePlan& plan, cudaStream_t stream) {
    RescaleCacheLaunch launch{.layers = static_cast<int>(args.keys.size()),
                              .strides = args.strides,
                              .positions = args.positions,
                              .tables = args.tables,
                              .table_count = static_cast<uint32_t>(args.table_count),
                              .from = args.from,
                              .to = args.to,
                              .batch = args.batch,
                              .tokens = args.tokens,
                              .heads = args.heads,
                              .half = args.rotary_dim / 2,
                              .plan = plan};
    std::copy(args.keys.begin(), args.keys.end(), launch.keys);
    const auto launch_with = [&](const auto& kernel) {
        launch_overlapping(kernel, dim3(plan.blocks), rescale_cache_block_threads, stream, launch);
    };
    switch (args.pairing) {
        case Pairing::halves:
            return launch_with(dependent_kernel<rescale_cache_kernel<Element, Vector, Pairing::halves>>);
        case Pairing::interleaved:
            return launch_with(dependent_kernel<rescale_cache_kernel<Element, Vector, Pairing::interleaved>>);
    }
}

}  // namespace

void rescale_cache_cuda(const RescaleCacheArgs& args, CUstream_st* stream) {
    if (args.keys.empty() || args.batch == 0 || args.tokens == 0 || args.heads == 0) return;
    for_each_rescale_launch(args, [&](const RescaleCacheArgs& part) {
        const RescaleCachePlan plan = plan_rescale(part);
        with_element(args.dtype, [&](auto element) {
            using Element = decltype(element);
            constexpr int full_vector = 16 / sizeof(Element);
            if (plan.vector == full_vector) return launch_rescale<Element, full_vector>(part, plan, stream);
            return launch_rescale<Element, 1>(part, plan, stream);
        });
    });
}

}  // namespace mrrope
