#pragma once

// Some files are compiled once for every instruction set listed in CMakeLists.txt, each time into a namespace of its
// own. MRROPE_BEST(f) is the f of the best one that the processor has.

#if defined(MRROPE_X86_64_LEVELS)

namespace mrrope {

template <class Function>
Function* best_for_this_processor(Function* x86_64_v4, Function* x86_64_v3, Function* baseline) {
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (v4) return x86_64_v4;
    return v3 ? x86_64_v3 : baseline;
}

}  // namespace mrrope

#define MRROPE_BEST(function) best_for_this_processor(x86_64_v4::function, x86_64_v3::function, baseline::function)

#else

#define MRROPE_BEST(function) baseline::function

#endif
