#include "mrrope/qk_norm_rotary_and_cache.h"

#include <vector>

#include "parallel_items.h"
#include "qk_norm_rotary_and_cache_tokens.h"
#include "rotate_tokens.h"

namespace mrrope {

void qk_norm_rotary_and_cache_cpu(const QkNormRotaryAndCacheArgs& args, const ParallelFor& parallel_for) {
    static const auto store_tokens = MRROPE_BEST(store_tokens);
    validate(args);
    const RotaryArgs& rotary = args.rotary;
    const int64_t heads =
        static_cast<int64_t>(rotary.q.heads) + args.k.view.heads + args.v.view.heads + args.gate.heads;
    parallel_for_items(parallel_for, rotary.batch * rotary.tokens, heads * rotary.head_dim, components_per_thread,
                       [&](int64_t begin, int64_t end) {
                           std::vector<double> scratch(store_scratch_size(args));
                           store_tokens(args, scratch.data(), begin, end);
                       });
}

}  // namespace mrrope
