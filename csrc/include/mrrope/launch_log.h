#pragma once

#include <string>
#include <vector>

namespace mrrope {

// Starts or stops collecting a line for every CUDA kernel that an op launches, on any thread: op, shape of the call,
// kernel with its template arguments, grid. Returns the lines since the last call. MRROPE_PRINT_PLANS=1 in the
// environment prints each line once. In the CMake target mrrope::cuda.
std::vector<std::string> collect_launches(bool on);

}  // namespace mrrope
