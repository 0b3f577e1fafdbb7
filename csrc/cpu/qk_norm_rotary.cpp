#include "mrrope/qk_norm_rotary.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "norm_tokens.h"
#include "parallel_items.h"
#include "storage.h"

namespace mrrope {
namespace {

// The break-even point of a second thread.
constexpr int64_t components_per_thread = 16384;
// Tokens are distributed over at most this many partial sums, so weight gradients do not depend on the number of cores.
constexpr int64_t max_sum_rows = 64;

int64_t tokens_of(const QkNormRotaryArgs& args) {
    return args.rotary.batch * args.rotary.tokens;
}

int64_t components_per_token(const QkNormRotaryArgs& args) {
    return static_cast<int64_t>(args.rotary.q.heads + args.rotary.k.heads) * args.rotary.head_dim;
}

void clear_sums(const OutputGradient& gradient, int64_t rows, int64_t weights, DType dtype) {
    if (gradient.weights == nullptr || rows == 0) return;
    std::memset(gradient.weight_sums, 0, rows * weights * (dtype == DType::float64 ? 8 : 4));
}

void add_sums(const OutputGradient& gradient, int64_t rows, int64_t weights, DType dtype) {
    if (gradient.weights == nullptr) return;
    with_storage(dtype, [&](auto element) {
        using Real = decltype(load(element));
        const Real* sums = static_cast<const Real*>(gradient.weight_sums);
        for (int64_t i = 0; i < weights; ++i) {
            double sum = 0;
            for (int64_t row = 0; row < rows; ++row) sum += static_cast<double>(sums[row * weights + i]);
            store(static_cast<decltype(element)*>(gradient.weights)[i], static_cast<Real>(sum));
        }
    });
}

}  // namespace

void qk_norm_rotary_cpu(const QkNormRotaryArgs& args, const ParallelFor& parallel_for) {
    static const auto norm_tokens = MRROPE_BEST(norm_tokens);
    validate(args);
    parallel_for_items(parallel_for, tokens_of(args), components_per_token(args), components_per_thread,
                       [&](int64_t begin, int64_t end) {
                           std::vector<double> scratch(norm_scratch_size(args));
                           norm_tokens(args, scratch.data(), begin, end);
                       });
}

WeightSumRows weight_sum_rows_cpu(const QkNormRotaryGradientArgs& args) {
    const RotaryArgs& rotary = args.call.rotary;
    const int64_t rows = std::min(tokens_of(args.call), max_sum_rows);
    return {rotary.q.heads > 0 ? rows : 0, rotary.k.heads > 0 ? rows : 0};
}

void qk_norm_rotary_gradient_cpu(const QkNormRotaryGradientArgs& args, const ParallelFor& parallel_for) {
    static const auto norm_gradient_tokens = MRROPE_BEST(norm_gradient_tokens);
    validate(args);
    const int64_t tokens = tokens_of(args.call);
    const WeightSumRows sum_rows = weight_sum_rows_cpu(args);
    const int64_t rows = std::max(sum_rows.q, sum_rows.k);
    const int64_t q_weights = args.call.weight_count(/*is_q=*/true);
    const int64_t k_weights = args.call.weight_count(/*is_q=*/false);
    const DType dtype = args.call.rotary.dtype;
    clear_sums(args.q, sum_rows.q, q_weights, dtype);
    clear_sums(args.k, sum_rows.k, k_weights, dtype);
    const int64_t per_row = components_per_token(args.call) * (rows == 0 ? 0 : tokens / rows);
    parallel_for_items(parallel_for, rows, per_row, components_per_thread, [&](int64_t begin, int64_t end) {
        std::vector<double> scratch(norm_scratch_size(args.call));
        for (int64_t row = begin; row < end; ++row) {
            norm_gradient_tokens(args, scratch.data(), row, tokens * row / rows, tokens * (row + 1) / rows);
        }
    });
    add_sums(args.q, sum_rows.q, q_weights, dtype);
    add_sums(args.k, sum_rows.k, k_weights, dtype);
}

}  // namespace mrrope
