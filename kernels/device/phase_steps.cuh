#pragma once

#include <cutlass/cutlass.h>

#include <cstdint>

namespace mrrope {

// The phase steps of a block's threads, for persistent kernels, whose threads keep their lanes. Declared in shared
// memory, where every thread reads its own only. Volatile, so that the compiler does not keep them in registers, which
// are scarce.
template <int Vector, int Threads>
struct PhaseStepsOfThreads {
    volatile uint64_t of[Vector][Threads];

    template <class Layout>
    __device__ void load(const uint64_t* table, const Layout& layout) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Vector; ++j) of[j][threadIdx.x] = table[layout.pair(j)];
    }

    __device__ uint64_t operator[](int j) const { return of[j][threadIdx.x]; }
};

}  // namespace mrrope
