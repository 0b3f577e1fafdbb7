#pragma once

#include <cuda_runtime.h>

// Kernels of someone else's, before and after ours in a stream.

namespace mrrope::testing {

inline constexpr int foreign_values = 256;

// Lets the next kernel start at once, and writes `value` everywhere some 30 us later.
void launch_slow_writer(int* values, int value, cudaStream_t stream);

enum class Reads { after_wait, before_wait };

// Copies `values`, launched with the PDL attribute where the device has it.
void launch_reader(const int* values, int* seen, Reads reads, cudaStream_t stream);

// Copies `values` by a kernel that waits where it can, launched as ours are; of its code there is PTX for sm_80 alone.
void launch_old_copy(const int* values, int* seen, cudaStream_t stream);
bool old_copy_waits();

// The same, compiled like our kernels.
void launch_copy(const int* values, int* seen, cudaStream_t stream);
bool copy_waits();

// Whether the device has programmatic dependent launch, and code of these tests that uses it.
bool has_dependent_launch();

}  // namespace mrrope::testing
