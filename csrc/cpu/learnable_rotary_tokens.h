#pragma once

#include "instruction_sets.h"
#include "mrrope/learnable_rotary.h"

namespace mrrope {

// The table as the inner loops take it.
struct PhaseTable {
    const uint64_t* phase_steps;  // [tables, rotary_dim / 2]
    const double* gains;          // [tables]: the attention factors
};

// learnable_tokens rotates all heads of the tokens [begin, end), numbered across the batch. learnable_gradient_tokens
// is its backward pass and adds these tokens' gradients of the table to `sums`, [tables, rotary_dim / 2 + 1]. Those of
// the frequencies lack the factor `gain`.
MRROPE_FOR_EACH_INSTRUCTION_SET(void learnable_tokens(const LearnableRotaryArgs& args, const PhaseTable& table,
                                                      int64_t begin, int64_t end);
                                void learnable_gradient_tokens(const LearnableRotaryGradientArgs& args,
                                                               const PhaseTable& table, double* sums, int64_t begin,
                                                               int64_t end);)

}  // namespace mrrope
