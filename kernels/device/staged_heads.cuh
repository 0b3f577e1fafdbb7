#pragma once

#include <cutlass/arch/memory_sm80.h>
#include <cutlass/cutlass.h>

namespace mrrope {

// Heads that the threads of a persistent kernel copy to shared memory while they work on the previous ones: two vectors
// of `Heads` heads each. A thread reads only what it has copied itself, so that nothing need be synchronized.
template <class Fragment, int Heads, int Threads>
struct StagedHeads {
    using Stored = typename Fragment::Stored;

    Stored of[Heads][2][Threads];

    // To be called between reading heads and copying others in their place. The order of instructions is enough: a copy
    // writes after a round trip to L2, and the reads of its thread went to the same pipeline before it.
    __device__ static void begin() { keep_order(); }

    // Starts to copy a head's vectors.
    template <class Element, class Layout>
    __device__ void copy(int i, const Element* head, const Layout& layout) {
        copy_vector(of[i][0][threadIdx.x], head + layout.first());
        copy_vector(of[i][1][threadIdx.x], head + layout.second());
    }

    // Waits for all copies of this thread.
    __device__ static void wait() {
        cutlass::arch::cp_async_wait<0>();
        keep_order();
    }

    __device__ Fragment read(int i) const { return {of[i][0][threadIdx.x], of[i][1][threadIdx.x]}; }

private:
    // cp.async and its wait say nothing to the compiler about memory: elsewhere __syncthreads does.
    __device__ static void keep_order() { asm volatile("" ::: "memory"); }

    // cp.async takes 4, 8 or 16 bytes. Vectors of one component are the slow path anyway.
    template <class Element>
    __device__ static void copy_vector(Stored& to, const Element* from) {
        if constexpr (sizeof(Stored) == 16) {
            cutlass::arch::cp_async<16, cutlass::arch::CacheOperation::Global>(&to, from);
        } else {
            to = *reinterpret_cast<const Stored*>(from);
        }
    }
};

}  // namespace mrrope
