#include <algorithm>

#include "device/dependent_launch.cuh"
#include "device/head_fragment.cuh"
#include "mrrope/rescale_cache.h"
#include "rescale_cache_map.h"
#include "rescale_cache_plan.h"

namespace mrrope {
namespace {

// Passed to the kernel by value.
struct RescaleCacheLaunch {
    void* keys[max_layers_per_launch];
    int32_t layer_of_keys[max_layers_per_launch];
    int layers;
    HeadStrides strides;
    PositionsView positions;
    const uint64_t* tables;
    uint32_t table_count;
    int table_layers;
    int table_rows;
    const int32_t* from;
    const int32_t* to;
    int64_t batch;
    int64_t tokens;
    int heads;
    int half;
    RescaleCachePlan plan;
};

// All blocks re-rotate one sequence of one layer, then the next. Sequences whose table does not change are skipped, so
// a call that changes nothing returns at once. The arithmetic is that of rotary_kernel, by the difference of two
// tables: loaded once per sequence, or per layer where layers have tables of their own. `several_positions`: every pair
// has the position of its own row.
template <class Element, int Vector, Pairing pairing, bool several_positions>
__global__ void __launch_bounds__(rescale_cache_block_threads, rescale_cache_min_blocks_per_sm)
    rescale_cache_kernel(const __grid_constant__ RescaleCacheLaunch launch) {
    using Real = RealOf<Element>;
    using Layout = LaneLayout<pairing, Vector>;
    const int thread = blockIdx.x * rescale_cache_block_threads + threadIdx.x;
    const RescaleCachePlace place(launch.plan, thread);
    const Layout layout{place.lane, launch.half};
    pdl_wait();
    pdl_trigger();
    if (place.first_token >= launch.plan.token_step) return;

    const StridedHeads of_thread = place.heads_of_group(launch.plan, launch.heads);
    const int heads = of_thread.count();
    const int64_t next_head = of_thread.step * launch.strides.head;
    for (int64_t sequence = 0; sequence < launch.batch; ++sequence) {
        // Clamped as unsigned, so that no index, negative ones included, leads out of the tables.
        const auto table_index = [&](const int32_t* index) {
            return min(static_cast<uint32_t>(index[sequence]), launch.table_count - 1);
        };
        if (table_index(launch.from) == table_index(launch.to)) continue;
        Real gain;
        uint64_t steps[Vector];
        const auto load_tables = [&](int table_layer) {
            const auto table = [&](const int32_t* index) {
                const int64_t layer = int64_t{table_index(index)} * launch.table_layers + table_layer;
                const int64_t first_head = layer * launch.table_rows * launch.plan.table_heads;
                return launch.tables + (first_head + of_thread.table) * (launch.half + 1);
            };
            const uint64_t* from = table(launch.from);
            const uint64_t* to = table(launch.to);
            gain = static_cast<Real>(factor_of(to[launch.half]) / factor_of(from[launch.half]));
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Vector; ++j) steps[j] = to[layout.pair(j)] - from[layout.pair(j)];
        };
        for (int layer = 0; layer < launch.layers; ++layer) {
            if (layer == 0 || launch.table_layers > 1) load_tables(launch.layer_of_keys[layer]);
            Element* head = static_cast<Element*>(launch.keys[layer]) + sequence * launch.strides.batch +
                            place.first_token * launch.strides.token + of_thread.first * launch.strides.head;
            for (int64_t token = place.first_token; token < launch.tokens; token += launch.plan.token_step) {
                HeadFragment<Element, Vector> fragments[rescale_cache_heads_per_thread];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < rescale_cache_heads_per_thread; ++j) {
                    if (j < heads) fragments[j].load(head + j * next_head, layout);
                }
                const uint64_t* row_of_pair = launch.positions.row_of_pair + of_thread.table * (launch.half + 1);
                int64_t position = 0;
                if constexpr (!several_positions) position = load_position(launch.positions, 0, sequence, token);
                CosSin<Real> by[Vector];
                CUTLASS_PRAGMA_UNROLL
                for (int j = 0; j < Vector; ++j) {
                    if constexpr (several_positions) {
                        // Loaded for every token: row numbers in registers would spill.
                        const uint64_t word = row_of_pair[layout.pair(j)];
                        const int64_t row = position_row_of(word, launch.positions.rows);
                        position = load_position(launch.positions, row, sequence, token);
                    }
                    by[j] = scaled_cos_sin(phase_of(position, steps[j]), gain, Real(1));
                }
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

template <class Element, int Vector, Pairing pairing>
void launch_rescale(const RescaleCacheArgs& args, const RescaleCachePlan& plan, cudaStream_t stream) {
    RescaleCacheLaunch launch{.layers = static_cast<int>(args.keys.size()),
                              .strides = args.strides,
                              .positions = args.positions,
                              .tables = args.tables,
                              .table_count = static_cast<uint32_t>(args.table_count),
                              .table_layers = args.table_layers,
                              .table_rows = args.table_rows,
                              .from = args.from,
                              .to = args.to,
                              .batch = args.batch,
                              .tokens = args.tokens,
                              .heads = args.heads,
                              .half = args.rotary_dim / 2,
                              .plan = plan};
    std::copy(args.keys.begin(), args.keys.end(), launch.keys);
    std::copy(args.layer_of_keys.begin(), args.layer_of_keys.end(), launch.layer_of_keys);
    const auto launch_with = [&](const auto& kernel) {
        launch_with_pdl(kernel, dim3(plan.blocks), rescale_cache_block_threads, stream, launch);
    };
    if (args.positions.row_of_pair != nullptr) {
        return launch_with(pdl_kernel<rescale_cache_kernel<Element, Vector, pairing, true>>);
    }
    return launch_with(pdl_kernel<rescale_cache_kernel<Element, Vector, pairing, false>>);
}

template <class Element, int Vector>
void launch_rescale(const RescaleCacheArgs& args, const RescaleCachePlan& plan, cudaStream_t stream) {
    switch (args.pairing) {
        case Pairing::halves: return launch_rescale<Element, Vector, Pairing::halves>(args, plan, stream);
        case Pairing::interleaved: return launch_rescale<Element, Vector, Pairing::interleaved>(args, plan, stream);
    }
}

}  // namespace

void rescale_cache_cuda(const RescaleCacheArgs& args, CUstream_st* stream) {
    const LoggedCall logged("rescale_cache", args);
    validate(args);
    if (args.keys.empty() || args.batch == 0 || args.tokens == 0 || args.heads == 0) return;
    for_each_rescale_launch(args, [&](const RescaleCacheArgs& part) {
        const RescaleCachePlan planned = plan(shape_of(part), current_device());
        with_element(args.dtype, [&](auto element) {
            using Element = decltype(element);
            constexpr int full = full_vector(sizeof(Element));
            if (planned.vector == full) return launch_rescale<Element, full>(part, planned, stream);
            return launch_rescale<Element, 1>(part, planned, stream);
        });
    });
}

}  // namespace mrrope
