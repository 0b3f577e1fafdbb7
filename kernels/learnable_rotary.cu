#include "learnable_rotary_kernel.cuh"
#include "mrrope/learnable_rotary_phase.h"

namespace mrrope {
namespace {

bool is_empty(const LearnableRotaryShape& shape) {
    return shape.batch == 0 || shape.tokens == 0 || shape.q_heads + shape.k_heads == 0;
}

__device__ double load_real(const void* values, DType dtype, int64_t i) {
    return dtype == DType::float64 ? static_cast<const double*>(values)[i]
                                   : static_cast<double>(static_cast<const float*>(values)[i]);
}

__device__ void store_real(void* values, DType dtype, int64_t i, double value) {
    if (dtype == DType::float64) {
        static_cast<double*>(values)[i] = value;
    } else {
        static_cast<float*>(values)[i] = static_cast<float>(value);
    }
}

constexpr int pack_block_threads = 128;

// Packs one table per block.
__global__ void __launch_bounds__(pack_block_threads)
    pack_tables_kernel(const __grid_constant__ LearnableRotaryArgs args) {
    const int half = args.rotary.rotary_dim / 2;
    const int64_t table = blockIdx.x;
    uint64_t* words = args.packed_tables + table * (half + 1);
    pdl_wait();
    pdl_trigger();
    double factor = 0;
    if (threadIdx.x == 0) factor = load_real(args.attention_factors, args.table_dtype, table);
    bool has_frequencies = true;
    for (int i = threadIdx.x; i < half; i += pack_block_threads) {
        const double frequency = load_real(args.frequencies, args.table_dtype, table * half + i);
        const bool valid = is_frequency(frequency);
        words[i] = valid ? phase_step_of(frequency) : 0;
        has_frequencies = has_frequencies && valid;
    }
    has_frequencies = __syncthreads_and(has_frequencies);
    if (threadIdx.x == 0) words[half] = attention_factor_word(factor, has_frequencies);
}

void pack_tables(const LearnableRotaryArgs& args, cudaStream_t stream) {
    launch_with_pdl(pdl_kernel<pack_tables_kernel>, dim3(args.tables), pack_block_threads, stream, args);
}

// Passed to the kernel by value.
struct TableSumLaunch {
    LearnableRotaryGradientArgs args;
    int rows;
};

constexpr int words_per_block = columns_per_block<double>;

// Adds the rows of partial sums.
__global__ void __launch_bounds__(column_sum_block_threads)
    table_sum_kernel(const __grid_constant__ TableSumLaunch launch) {
    const LearnableRotaryGradientArgs& args = launch.args;
    const int half = args.call.rotary.rotary_dim / 2;
    const int words = half + 1;
    const int blocks_per_table = (words + words_per_block - 1) / words_per_block;
    const auto block = static_cast<int>(blockIdx.x);
    const int table = block / blocks_per_table;
    const int first_word = block % blocks_per_table * words_per_block;
    pdl_wait();
    pdl_trigger();
    const double sum =
        sum_of_column<column_sum_block_threads>(args.table_sums + int64_t{table} * words + first_word,
                                                words - first_word, launch.rows, int64_t{args.call.tables} * words);
    const int word = first_word + threadIdx.x;
    if (threadIdx.x >= words_per_block || word >= words) return;
    const DType dtype = args.call.table_dtype;
    if (word < half) {
        store_real(args.frequencies, dtype, int64_t{table} * half + word, sum);
    } else {
        store_real(args.attention_factors, dtype, table, sum);
    }
}

}  // namespace

void learnable_rotary_cuda(const LearnableRotaryArgs& args, CUstream_st* stream) {
    const LoggedCall logged("learnable_rotary", args.rotary);
    validate(args);
    pack_tables(args, stream);
    rotary_cuda(by_packed_tables(args), stream);
}

int64_t table_sum_rows_cuda(const LearnableRotaryGradientArgs& args) {
    const LearnableRotaryShape shape = shape_of(args);
    return is_empty(shape) ? 0 : plan(shape, current_device()).blocks_per_table;
}

void learnable_rotary_gradient_cuda(const LearnableRotaryGradientArgs& args, CUstream_st* stream) {
    validate(args);
    learnable_rotary_gradient_cuda(args, plan(shape_of(args), current_device()), stream);
}

void learnable_rotary_gradient_cuda(const LearnableRotaryGradientArgs& args, const LearnableRotaryPlan& plan,
                                    CUstream_st* stream) {
    const LoggedCall logged("learnable_rotary_gradient", args.call.rotary);
    const LearnableRotaryShape shape = shape_of(args);
    int rows = 0;
    if (!is_empty(shape)) {
        rows = plan.blocks_per_table;
        const LearnableRotaryLaunch launch{args, LearnableRotaryMap<cutlass::FastDivmod>::of(plan, shape)};
        with_element(args.call.rotary.dtype,
                     [&](auto element) { launch_learnable_gradient<decltype(element)>(launch, stream); });
    }
    // One dimension: grid.y ends at 65535, which a rotary_dim of 2^19 would exceed.
    const dim3 grid(args.call.tables * ceil_div(shape.rotary_dim / 2 + 1, words_per_block));
    launch_with_pdl(pdl_kernel<table_sum_kernel>, grid, column_sum_block_threads, stream, TableSumLaunch{args, rows});
}

}  // namespace mrrope
