#pragma once

#include "mrrope/qk_norm_rotary.h"

// norm_tokens.cpp is compiled once for every instruction set; see instruction_sets.h.

namespace mrrope {

namespace {

// Room for one row, what one root mean square is taken of, and its turns: this many doubles.
inline int64_t norm_scratch_size(const QkNormRotaryArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const int most_heads = rotary.q.heads > rotary.k.heads ? rotary.q.heads : rotary.k.heads;
    const int64_t row = static_cast<int64_t>(args.over == NormOver::head ? 1 : most_heads) * rotary.head_dim;
    return 2 * row + 3 * (rotary.rotary_dim / 2);
}

}  // namespace

// Norms and rotates all heads of the tokens [begin, end), counted through the batch.
using NormTokens = void (*)(const QkNormRotaryArgs& args, double* scratch, int64_t begin, int64_t end);

// The backward pass of those tokens; what they add to the gradient of the weights goes into one row of the sums.
using NormGradientTokens = void (*)(const QkNormRotaryGradientArgs& args, double* scratch, int64_t sum_row,
                                    int64_t begin, int64_t end);

namespace baseline {
void norm_tokens(const QkNormRotaryArgs& args, double* scratch, int64_t begin, int64_t end);
void norm_gradient_tokens(const QkNormRotaryGradientArgs& args, double* scratch, int64_t sum_row, int64_t begin,
                          int64_t end);
}  // namespace baseline
namespace x86_64_v3 {
void norm_tokens(const QkNormRotaryArgs& args, double* scratch, int64_t begin, int64_t end);
void norm_gradient_tokens(const QkNormRotaryGradientArgs& args, double* scratch, int64_t sum_row, int64_t begin,
                          int64_t end);
}  // namespace x86_64_v3
namespace x86_64_v4 {
void norm_tokens(const QkNormRotaryArgs& args, double* scratch, int64_t begin, int64_t end);
void norm_gradient_tokens(const QkNormRotaryGradientArgs& args, double* scratch, int64_t sum_row, int64_t begin,
                          int64_t end);
}  // namespace x86_64_v4

}  // namespace mrrope
