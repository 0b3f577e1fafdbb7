#pragma once

// The files *_tokens.cpp are compiled once per instruction set in CMakeLists.txt, each time into the namespace
// MRROPE_INSTRUCTION_SET. Everything else that they include or define has internal linkage: otherwise the linker could
// keep the AVX-512 copy of a shared inline function for all of them.

// Declares functions in the namespace of every instruction set.
#define MRROPE_FOR_EACH_INSTRUCTION_SET(...) \
    namespace baseline {                     \
    __VA_ARGS__                              \
    }                                        \
    namespace x86_64_v3 {                    \
    __VA_ARGS__                              \
    }                                        \
    namespace x86_64_v4 {                    \
    __VA_ARGS__                              \
    }

// MRROPE_BEST(f) points to the f of the best instruction set that the processor supports.
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

#define MRROPE_BEST(function) (&baseline::function)

#endif
