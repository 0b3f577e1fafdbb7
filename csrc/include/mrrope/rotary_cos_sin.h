#pragma once

#include "mrrope/rotary.h"

// Rotation by cosines and sines in memory, as models compute them, instead of positions and a table.

namespace mrrope {

// Cosines or sines, [batch, tokens, columns], with contiguous columns. A stride of 0 broadcasts.
struct ColumnsView {
    const void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t token_stride = 0;
};

struct RotaryCosSinArgs {
    RotaryArgs rotary;  // without positions and table
    ColumnsView cos;
    ColumnsView sin;
    DType columns_dtype = DType::float32;  // float32, or that of the heads
    int columns_per_pair = 1;              // pair i uses column i * columns_per_pair: 1, or 2 in interleaved pairing
};

void validate(const RotaryCosSinArgs& args);

// `args` restricted to these sequences and tokens.
RotaryCosSinArgs slice(const RotaryCosSinArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                       int64_t tokens);

void rotary_cos_sin_cpu(const RotaryCosSinArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void rotary_cos_sin_cuda(const RotaryCosSinArgs& args, CUstream_st* stream);

}  // namespace mrrope
