#include "mrrope/rotary_cos_sin.h"

#include "parallel_items.h"
#include "rotate_tokens.h"

namespace mrrope {

void rotary_cos_sin_cpu(const RotaryCosSinArgs& args, const ParallelFor& parallel_for) {
    static const auto rotate_tokens = MRROPE_BEST(rotate_tokens_by_columns);
    validate(args);
    const RotaryArgs& rotary = args.rotary;
    const int64_t per_token = static_cast<int64_t>(rotary.q.heads + rotary.k.heads) * rotary.head_dim;
    parallel_for_items(parallel_for, rotary.batch * rotary.tokens, per_token, components_per_thread,
                       [&](int64_t begin, int64_t end) { rotate_tokens(args, begin, end); });
}

}  // namespace mrrope
