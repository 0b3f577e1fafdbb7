#pragma once

#include "mrrope/rotary.h"

// Rotation for multi-head latent attention (MLA): a head is [nope | rope], of which the rope part is rotated, and all
// heads of the key share one rope part.

namespace mrrope {

// The leading part of every head, which keeps its bits. Its heads are those of the rotated part behind it.
struct CopiedPart {
    HeadsView view;
    int dim = 0;  // 0: there is none
};

// Rotates and copies q, and assembles the key from k_nope and the shared rope part.
struct MlaRotaryArgs {
    // The rope parts only: head_dim equals rotary_dim, positions have one row, and there are no head tables. k is the
    // rope part of the key: its in_strides.head is 0 where all heads read the shared one.
    RotaryArgs rotary;
    CopiedPart q_nope;
    CopiedPart k_nope;
};

// The gradient of MlaRotaryArgs. `rotary` has the direction of the backward pass; its k.in is the gradient of the key's
// rope parts, and k.out that of the shared one, the rotated sum over k.heads, rounded once. The order of summation is
// fixed. Nothing is computed for k_nope: its gradient is the leading part of the key's.
struct MlaRotaryGradientArgs {
    RotaryArgs rotary;
    CopiedPart q_nope;
};

void validate(const MlaRotaryArgs& args);
void validate(const MlaRotaryGradientArgs& args);

// `args` restricted to these sequences and tokens.
MlaRotaryArgs slice(const MlaRotaryArgs& args, int64_t first_batch, int64_t batch, int64_t first_token, int64_t tokens);
MlaRotaryGradientArgs slice(const MlaRotaryGradientArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                            int64_t tokens);

void mla_rotary_cpu(const MlaRotaryArgs& args, const ParallelFor& parallel_for = on_all_cores);
void mla_rotary_gradient_cpu(const MlaRotaryGradientArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void mla_rotary_cuda(const MlaRotaryArgs& args, CUstream_st* stream);
void mla_rotary_gradient_cuda(const MlaRotaryGradientArgs& args, CUstream_st* stream);

}  // namespace mrrope
