#pragma once

#include "instruction_sets.h"
#include "mrrope/qk_norm_rotary.h"

namespace mrrope {

namespace {

// Doubles of scratch memory for one row (the elements that share a root mean square), its gradient, the phases of its
// token, and its cosines and sines by every head's table.
inline int64_t norm_scratch_size(const QkNormRotaryArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const int max_heads = rotary.q.heads > rotary.k.heads ? rotary.q.heads : rotary.k.heads;
    const int64_t row = static_cast<int64_t>(args.over == NormOver::head ? 1 : max_heads) * rotary.head_dim;
    return 2 * row + (1 + 2 * rotary.choice.heads) * (rotary.rotary_dim / 2);
}

}  // namespace

// norm_tokens normalizes and rotates all heads of the tokens [begin, end), numbered across the batch.
// norm_gradient_tokens is its backward pass and adds these tokens' weight gradients to row `sum_row` of the sums.
MRROPE_FOR_EACH_INSTRUCTION_SET(void norm_tokens(const QkNormRotaryArgs& args, double* scratch, int64_t begin,
                                                 int64_t end);
                                void norm_gradient_tokens(const QkNormRotaryGradientArgs& args, double* scratch,
                                                          int64_t sum_row, int64_t begin, int64_t end);)

}  // namespace mrrope
