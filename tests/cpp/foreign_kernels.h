#pragma once

#include <cuda_runtime.h>

// Foreign kernels, before and after ours in a stream.

namespace mrrope::testing {

inline constexpr int foreign_values = 256;

// Triggers at once, and writes `value` everywhere some 30 us later.
void launch_slow_writer(int* values, int value, cudaStream_t stream);

enum class Reads { after_wait, before_wait };

// Copies `values`. Launched with PDL where the device has it.
void launch_reader(const int* values, int* seen, Reads reads, cudaStream_t stream);

// Copies `values` by a kernel that is launched as ours are, compiled to PTX for sm_80 only: it cannot wait.
void launch_old_copy(const int* values, int* seen, cudaStream_t stream);
bool old_copy_waits();

// The same kernel, compiled as ours are.
void launch_copy(const int* values, int* seen, cudaStream_t stream);
bool copy_waits();

// Whether the device has PDL, and these tests are compiled for it.
bool has_dependent_launch();

}  // namespace mrrope::testing
