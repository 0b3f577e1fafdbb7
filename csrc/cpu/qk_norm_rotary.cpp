#include "mrrope/qk_norm_rotary.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "instruction_sets.h"
#include "norm_tokens.h"

namespace mrrope {
namespace {

// Below this many components a second thread costs more than it saves.
constexpr int64_t components_per_thread = 16384;
// Weights' gradients come out the same on any number of cores: tokens are shared out among this many sums.
constexpr int64_t most_sum_rows = 64;

int64_t tokens_of(const QkNormRotaryArgs& args) {
    return args.rotary.batch * args.rotary.tokens;
}

int64_t components_per_token(const QkNormRotaryArgs& args) {
    return static_cast<int64_t>(args.rotary.q.heads + args.rotary.k.heads) * args.rotary.head_dim;
}

void clear(void* sums, int64_t rows, const QkNormRotaryArgs& call, int heads) {
    if (sums == nullptr) return;
    const int64_t weights = static_cast<int64_t>(call.over == NormOver::head ? 1 : heads) * call.rotary.head_dim;
    std::memset(sums, 0, rows * weights * (call.rotary.dtype == DType::float64 ? 8 : 4));
}

}  // namespace

void qk_norm_rotary_cpu(const QkNormRotaryArgs& args, const ParallelFor& parallel_for) {
    static const NormTokens norm_tokens = MRROPE_BEST(norm_tokens);
    const int64_t per_token = components_per_token(args);
    if (per_token == 0 || tokens_of(args) == 0) return;
    const int64_t grain = std::max<int64_t>(1, components_per_thread / per_token);
    parallel_for(tokens_of(args), grain, [&](int64_t begin, int64_t end) {
        std::vector<double> scratch(norm_scratch_size(args));
        norm_tokens(args, scratch.data(), begin, end);
    });
}

WeightSumRows weight_sum_rows_cpu(const QkNormRotaryGradientArgs& args) {
    const int64_t rows = std::min(tokens_of(args.call), most_sum_rows);
    return {rows, rows};
}

void qk_norm_rotary_gradient_cpu(const QkNormRotaryGradientArgs& args, const ParallelFor& parallel_for) {
    static const NormGradientTokens norm_gradient_tokens = MRROPE_BEST(norm_gradient_tokens);
    const int64_t tokens = tokens_of(args.call);
    const int64_t rows = weight_sum_rows_cpu(args).q;
    clear(args.q.weight_sums, rows, args.call, args.call.rotary.q.heads);
    clear(args.k.weight_sums, rows, args.call, args.call.rotary.k.heads);
    const int64_t per_row = components_per_token(args.call) * (rows == 0 ? 0 : tokens / rows);
    if (per_row == 0) return;
    const int64_t grain = std::max<int64_t>(1, components_per_thread / per_row);
    parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
        std::vector<double> scratch(norm_scratch_size(args.call));
        for (int64_t row = begin; row < end; ++row) {
            norm_gradient_tokens(args, scratch.data(), row, tokens * row / rows, tokens * (row + 1) / rows);
        }
    });
}

}  // namespace mrrope
