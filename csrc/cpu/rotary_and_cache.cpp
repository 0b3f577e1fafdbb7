#include "mrrope/rotary_and_cache.h"

#include "mrrope/qk_norm_rotary_and_cache.h"

namespace mrrope {

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const ParallelFor& parallel_for) {
    qk_norm_rotary_and_cache_cpu(QkNormRotaryAndCacheArgs{args}, parallel_for);
}

}  // namespace mrrope
