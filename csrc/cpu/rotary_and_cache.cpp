#include "mrrope/rotary_and_cache.h"

#include <stdexcept>

#include "mrrope/qk_norm_rotary_and_cache.h"

namespace mrrope {

void check_not_conjugate(const RotaryAndCacheArgs& args) {
    if (!args.rotary.conjugate) return;
    throw std::invalid_argument("rotary.conjugate must be false where a cache is written, got true");
}

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const ParallelFor& parallel_for) {
    qk_norm_rotary_and_cache_cpu(QkNormRotaryAndCacheArgs{args}, parallel_for);
}

}  // namespace mrrope
