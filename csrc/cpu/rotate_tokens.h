#pragma once

#include "mrrope/rotary.h"

// rotate_tokens.cpp is compiled once for every instruction set; see instruction_sets.h.

namespace mrrope {

// Below this many components a second thread costs more than it saves.
inline constexpr int64_t components_per_thread = 32768;

// Rotates all heads of the tokens [begin, end), counted through the batch.
using RotateTokens = void (*)(const RotaryArgs& args, int64_t begin, int64_t end);

namespace baseline {
void rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end);
}
namespace x86_64_v3 {
void rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end);
}
namespace x86_64_v4 {
void rotate_tokens(const RotaryArgs& args, int64_t begin, int64_t end);
}

}  // namespace mrrope
