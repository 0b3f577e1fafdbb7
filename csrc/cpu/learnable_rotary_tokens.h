#pragma once

#include "instruction_sets.h"
#include "mrrope/learnable_rotary.h"

namespace mrrope {

// The backward pass of all heads of the tokens [begin, end), numbered across the batch, by the packed tables. Adds
// these tokens' gradients of the table to `sums`, [tables, rotary_dim / 2 + 1]. Those of the frequencies lack the
// attention factor.
MRROPE_FOR_EACH_INSTRUCTION_SET(void learnable_gradient_tokens(const LearnableRotaryGradientArgs& args, double* sums,
                                                               int64_t begin, int64_t end);)

}  // namespace mrrope
