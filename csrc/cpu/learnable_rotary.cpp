#include "mrrope/learnable_rotary.h"

#include <algorithm>
#include <limits>
#include <vector>

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

// The table's phase steps, and gains that are NaN where a frequency is none.
class PhaseTableMemory {
public:
    explicit PhaseTableMemory(const LearnableRotaryArgs& args) : gains_(args.tables) {
        const int half = args.rotary.rotary_dim / 2;
        phase_steps_.reserve(static_cast<size_t>(args.tables) * half);
        for (int table = 0; table < args.tables; ++table) {
            gains_[table] = real_at(args.attention_factors, args.table_dtype, table);
            for (int i = 0; i < half; ++i) {
                const double frequency = real_at(args.frequencies, args.table_dtype, int64_t{table} * half + i);
                const bool valid = is_frequency(frequency);
                phase_steps_.push_back(valid ? phase_step_of(frequency) : 0);
                if (!valid) gains_[table] = std::numeric_limits<double>::quiet_NaN();
            }
        }
    }

    PhaseTable view() const { return {phase_steps_.data(), gains_.data()}; }
    double gain(int table) const { return gains_[table]; }

private:
    std::vector<uint64_t> phase_steps_;
    std::vector<double> gains_;
};

int64_t components_per_token(const RotaryArgs& args) {
    return static_cast<int64_t>(args.q.heads + args.k.heads) * args.head_dim;
}

}  // namespace

void learnable_rotary_cpu(const LearnableRotaryArgs& args, const ParallelFor& parallel_for) {
    static const auto rotate_tokens = MRROPE_BEST(learnable_tokens);
    const PhaseTableMemory table(args);
    parallel_for_items(parallel_for, args.rotary.batch * args.rotary.tokens, components_per_token(args.rotary),
                       components_per_thread,
                       [&](int64_t begin, int64_t end) { rotate_tokens(args, table.view(), begin, end); });
}

int64_t table_sum_rows_cpu(const LearnableRotaryGradientArgs& args) {
    return std::min(args.call.rotary.batch * args.call.rotary.tokens, max_sum_rows);
}

void learnable_rotary_gradient_cpu(const LearnableRotaryGradientArgs& args, const ParallelFor& parallel_for) {
    static const auto gradient_tokens = MRROPE_BEST(learnable_gradient_tokens);
    const LearnableRotaryArgs& call = args.call;
    const RotaryArgs& rotary = call.rotary;
    const PhaseTableMemory table(call);
    const int half = rotary.rotary_dim / 2;
    const int64_t row_words = static_cast<int64_t>(call.tables) * (half + 1);
    const int64_t tokens = rotary.batch * rotary.tokens;
    const int64_t rows = table_sum_rows_cpu(args);
    std::fill_n(args.table_sums, rows * row_words, 0.0);
    const int64_t per_row = components_per_token(rotary) * (rows == 0 ? 0 : tokens / rows);
    parallel_for_items(parallel_for, rows, per_row, components_per_thread, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            gradient_tokens(args, table.view(), args.table_sums + row * row_words, tokens * row / rows,
                            tokens * (row + 1) / rows);
        }
    });
    const auto sum_of = [&](int64_t word) {
        double sum = 0.0;
        for (int64_t row = 0; row < rows; ++row) sum += args.table_sums[row * row_words + word];
        return sum;
    };
    for (int of = 0; of < call.tables; ++of) {
        const int64_t first = static_cast<int64_t>(of) * (half + 1);
        for (int i = 0; i < half; ++i) {
            const double gradient = table.gain(of) * sum_of(first + i);
            set_real(args.frequencies, call.table_dtype, int64_t{of} * half + i, gradient);
        }
        set_real(args.attention_factors, call.table_dtype, of, sum_of(first + half));
    }
}

}  // namespace mrrope
