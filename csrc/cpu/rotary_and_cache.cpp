#include "mrrope/rotary_and_cache.h"

#include "mrrope/qk_norm_rotary_and_cache.h"

namespace mrrope {

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const ParallelFor& parallel_for) {
    QkNormRotaryAndCacheArgs without_norm;
    static_cast<RotaryAndCacheArgs&>(without_norm) = args;
    qk_norm_rotary_and_cache_cpu(without_norm, parallel_for);
}

}  // namespace mrrope
