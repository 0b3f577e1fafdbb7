#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <string_view>
#include <vector>

#include "mrrope/frequency_table.h"

// The ops torch.ops.mrrope.*, callable from C++. Linking mrrope::torch registers them.

namespace mrrope {

// A table as the ops take it: an int64 tensor of rotary_dim / 2 turns and the attention factor's bits. Negated, it
// rotates backwards. Positions of [rows, batch, tokens] take a second row, which names the row of positions that turns
// each pair.
at::Tensor packed_tensor(const FrequencyTable& table, at::Device device);

// Rotates q, or q and k, given as `heads`; differentiable. layout: bhsd, bshd or thd; pairing: halves or interleaved;
// conjugate: by the negated angle, with the same attention factor.
std::vector<at::Tensor> rotary(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
                               std::string_view layout = "bhsd", std::string_view pairing = "halves",
                               bool conjugate = false);

// The same, in place.
void rotary_(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
             std::string_view layout = "bhsd", std::string_view pairing = "halves", bool conjugate = false);

}  // namespace mrrope
