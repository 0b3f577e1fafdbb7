#include "learnable_rotary_kernel.cuh"

namespace mrrope {
namespace {

bool is_empty(const LearnableRotaryShape& shape) {
    return shape.batch == 0 || shape.tokens == 0 || shape.q_heads + shape.k_heads == 0;
}

void launch(const LearnableRotaryGradientArgs& args, const LearnableRotaryShape& shape, const LearnableRotaryPlan& plan,
            bool gradient, cudaStream_t stream) {
    const LearnableRotaryLaunch launch{args, LearnableRotaryMap<cutlass::FastDivmod>::of(plan, shape)};
    with_element(args.call.rotary.dtype,
                 [&](auto element) { launch_learnable_rotary<decltype(element)>(launch, gradient, stream); });
}

// Passed to the kernel by value.
struct TableSumLaunch {
    LearnableRotaryGradientArgs args;
    int rows;
};

constexpr int sum_words_per_block = 32;
constexpr int sum_row_groups = 16;

// Adds the rows of partial sums, always in the same order. A block takes 32 words of one table; thread (i, j) adds the
// rows j, j + 16, ... of word i.
__global__ void __launch_bounds__(sum_words_per_block* sum_row_groups)
    table_sum_kernel(const __grid_constant__ TableSumLaunch launch) {
    const LearnableRotaryGradientArgs& args = launch.args;
    const int half = args.call.rotary.rotary_dim / 2;
    const int words = half + 1;
    const int table = blockIdx.x;
    const int column = threadIdx.x % sum_words_per_block;
    const int group = threadIdx.x / sum_words_per_block;
    const int word = blockIdx.y * sum_words_per_block + column;
    pdl_wait();
    pdl_trigger();
    double sum = 0;
    if (word < words) {
        for (int row = group; row < launch.rows; row += sum_row_groups) {
            sum += args.table_sums[(int64_t{row} * args.call.tables + table) * words + word];
        }
    }
    __shared__ double of_groups[sum_row_groups][sum_words_per_block];
    of_groups[group][column] = sum;
    __syncthreads();
    if (group > 0 || word >= words) return;
    for (int other = 1; other < sum_row_groups; ++other) sum += of_groups[other][column];
    const DType dtype = args.call.table_dtype;
    if (word < half) {
        store_real(args.frequencies, dtype, int64_t{table} * half + word, sum);
    } else {
        store_real(args.attention_factors, dtype, table, sum);
    }
}

}  // namespace

void learnable_rotary_cuda(const LearnableRotaryArgs& args, CUstream_st* stream) {
    const LearnableRotaryShape shape = shape_of(args);
    if (is_empty(shape)) return;
    LearnableRotaryGradientArgs forward;
    forward.call = args;
    launch(forward, shape, plan(shape, current_device(), false), false, stream);
}

int64_t table_sum_rows_cuda(const LearnableRotaryGradientArgs& args) {
    const LearnableRotaryShape shape = shape_of(args);
    return is_empty(shape) ? 0 : plan(shape, current_device(), true).blocks_per_table;
}

void learnable_rotary_gradient_cuda(const LearnableRotaryGradientArgs& args, CUstream_st* stream) {
    const LearnableRotaryShape shape = shape_of(args);
    int rows = 0;
    if (!is_empty(shape)) {
        const LearnableRotaryPlan planned = plan(shape, current_device(), true);
        rows = planned.blocks_per_table;
        launch(args, shape, planned, true, stream);
    }
    const int words = shape.rotary_dim / 2 + 1;
    const dim3 grid(args.call.tables, ceil_div(words, sum_words_per_block));
    launch_with_pdl(pdl_kernel<table_sum_kernel>, grid, sum_words_per_block * sum_row_groups, stream,
                    TableSumLaunch{args, rows});
}

}  // namespace mrrope
