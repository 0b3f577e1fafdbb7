#include "waiting_copy.cuh"

namespace mrrope::testing {

void launch_old_copy(const int* values, int* seen, cudaStream_t stream) {
    launch_with_pdl(waiting_copy_kernel, dim3(1), foreign_values, stream, {values, seen});
}

bool old_copy_waits() {
    return waiting_copy_kernel.waits_on_current_device();
}

}  // namespace mrrope::testing
