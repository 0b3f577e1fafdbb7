#include "mrrope/learnable_rotary.h"

#include <algorithm>

#include "learnable_rotary_tokens.h"
#include "mrrope/learnable_rotary_phase.h"
#include "parallel_items.h"

namespace mrrope {
namespace {

// The break-even point of a second thread.
constexpr int64_t components_per_thread = 16384;
// Tokens are distributed over at most this many partial sums, so gradients do not depend on the number of cores.
constexpr int64_t max_sum_rows = 64;

double real_at(const void* values, DType dtype, int64_t i) {
    return dtype == DType::float64 ? static_cast<const double*>(values)[i]
                                   : static_cast<double>(static_cast<const float*>(values)[i]);
}

void set_real(void* values, DType dtype, int64_t i, double value) {
    if (dtype == DType::float64) {
        static_cast<double*>(values)[i] = value;
    } else {
        static_cast<float*>(values)[i] = static_cast<float>(value);
    }
}

void pack_tables(const LearnableRotaryArgs& args) {
    const int half = args.rotary.rotary_dim / 2;
    uint64_t* word = args.packed_tables;
    for (int table = 0; table < args.tables; ++table) {
        bool has_frequencies = true;
        for (int i = 0; i < half; ++i) {
            const double frequency = real_at(args.frequencies, args.table_dtype, int64_t{table} * half + i);
            const bool valid = is_frequency(frequency);
            *word++ = valid ? phase_step_of(frequency) : 0;
            has_frequencies = has_frequencies && valid;
        }
        *word++ = attention_factor_word(real_at(args.attention_factors, args.table_dtype, table), has_frequencies);
    }
}

int64_t components_per_token(const RotaryArgs& args) {
    return static_cast<int64_t>(args.q.heads + args.k.heads) * args.head_dim;
}

}  // namespace

RotaryArgs by_packed_tables(const LearnableRotaryArgs& args) {
    RotaryArgs rotary = args.rotary;
    rotary.table = args.packed_tables;
    rotary.choice = {.heads = args.tables, .head_stride = rotary.rotary_dim / 2 + 1};
    return rotary;
}

void learnable_rotary_cpu(const LearnableRotaryArgs& args, const ParallelFor& parallel_for) {
    validate(args);
    pack_tables(args);
    rotary_cpu(by_packed_tables(args), parallel_for);
}

int64_t table_sum_rows_cpu(const LearnableRotaryGradientArgs& args) {
    const RotaryArgs& rotary = args.call.rotary;
    return rotary.q.heads + rotary.k.heads == 0 ? 0 : std::min(rotary.batch * rotary.tokens, max_sum_rows);
}

void learnable_rotary_gradient_cpu(const LearnableRotaryGradientArgs& args, const ParallelFor& parallel_for) {
    static const auto gradient_tokens = MRROPE_BEST(learnable_gradient_tokens);
    validate(args);
    const LearnableRotaryArgs& call = args.call;
    const RotaryArgs& rotary = call.rotary;
    const int half = rotary.rotary_dim / 2;
    const int64_t row_words = static_cast<int64_t>(call.tables) * (half + 1);
    const int64_t tokens = rotary.batch * rotary.tokens;
    const int64_t rows = table_sum_rows_cpu(args);
    std::fill_n(args.table_sums, rows * row_words, 0.0);
    const int64_t per_row = components_per_token(rotary) * (rows == 0 ? 0 : tokens / rows);
    parallel_for_items(parallel_for, rows, per_row, components_per_thread, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            gradient_tokens(args, args.table_sums + row * row_words, tokens * row / rows, tokens * (row + 1) / rows);
        }
    });
    const auto sum_of = [&](int64_t word) {
        double sum = 0.0;
        for (int64_t row = 0; row < rows; ++row) sum += args.table_sums[row * row_words + word];
        return sum;
    };
    for (int table = 0; table < call.tables; ++table) {
        const int64_t first = static_cast<int64_t>(table) * (half + 1);
        const double factor = factor_of(call.packed_tables[first + half]);
        for (int i = 0; i < half; ++i) {
            const double gradient = factor * sum_of(first + i);
            set_real(args.frequencies, call.table_dtype, int64_t{table} * half + i, gradient);
        }
        set_real(args.attention_factors, call.table_dtype, table, sum_of(first + half));
    }
}

}  // namespace mrrope
