#pragma once

#include <cstdint>

#include "contract_memory.h"
#include "mrrope/learnable_rotary.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"

// Every op on the CPU, by the type of its arguments.

namespace mrrope::testing {

inline void on_one_thread(int64_t count, int64_t, const RangeBody& body) {
    body(0, count);
}

inline void call_on_cpu(const RotaryArgs& args) {
    rotary_cpu(args, on_one_thread);
}
inline void call_on_cpu(const RotaryCosSinArgs& args) {
    rotary_cos_sin_cpu(args, on_one_thread);
}
inline void call_on_cpu(const LearnableRotaryArgs& args) {
    learnable_rotary_cpu(args, on_one_thread);
}
inline void call_on_cpu(const LearnableRotaryGradientArgs& args) {
    learnable_rotary_gradient_cpu(args, on_one_thread);
}
inline void call_on_cpu(const QkNormRotaryArgs& args) {
    qk_norm_rotary_cpu(args, on_one_thread);
}
inline void call_on_cpu(const QkNormRotaryGradientArgs& args) {
    qk_norm_rotary_gradient_cpu(args, on_one_thread);
}
inline void call_on_cpu(const RotaryAndCacheArgs& args) {
    rotary_and_cache_cpu(args, on_one_thread);
}
inline void call_on_cpu(const QkNormRotaryAndCacheArgs& args) {
    qk_norm_rotary_and_cache_cpu(args, on_one_thread);
}
inline void call_on_cpu(const MlaRotaryArgs& args) {
    mla_rotary_cpu(args, on_one_thread);
}
inline void call_on_cpu(const MlaRotaryGradientArgs& args) {
    mla_rotary_gradient_cpu(args, on_one_thread);
}
inline void call_on_cpu(const MlaRotaryAndCacheArgs& args) {
    mla_rotary_and_cache_cpu(args, on_one_thread);
}
inline void call_on_cpu(const RescaleCacheArgs& args) {
    rescale_cache_cpu(args, on_one_thread);
}

inline constexpr auto run_on_cpu = [](const auto& args, ContractMemory&) { call_on_cpu(args); };

}  // namespace mrrope::testing
