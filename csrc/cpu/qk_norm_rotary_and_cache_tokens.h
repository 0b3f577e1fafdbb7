#pragma once

#include "instruction_sets.h"
#include "mrrope/qk_norm_rotary_and_cache.h"

namespace mrrope {

namespace {

// Doubles of scratch memory for one row (the elements that share a root mean square), the phases of its token, and its
// cosines and sines by every head's table.
inline int64_t store_scratch_size(const QkNormRotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const int max_heads = rotary.q.heads > args.k.view.heads ? rotary.q.heads : args.k.view.heads;
    const int64_t row = static_cast<int64_t>(args.over == NormOver::head ? 1 : max_heads) * rotary.head_dim;
    return row + (1 + 2 * rotary.choice.heads) * (rotary.rotary_dim / 2);
}

}  // namespace

// Stores q, k, v and the gate of the tokens [begin, end), numbered across the batch.
MRROPE_FOR_EACH_INSTRUCTION_SET(void store_tokens(const QkNormRotaryAndCacheArgs& args, double* scratch, int64_t begin,
                                                  int64_t end);)

}  // namespace mrrope
