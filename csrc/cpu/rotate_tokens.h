#pragma once

#include "instruction_sets.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_cos_sin.h"

namespace mrrope {

// The break-even point of a second thread.
inline constexpr int64_t components_per_thread = 32768;

// Rotates all heads of the tokens [begin, end), numbered across the batch.
MRROPE_FOR_EACH_INSTRUCTION_SET(void rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end);
                                void rotate_tokens_by_columns(const RotaryCosSinArgs& args, int64_t begin,
                                                              int64_t end);)

}  // namespace mrrope
