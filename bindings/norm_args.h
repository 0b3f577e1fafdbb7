#pragma once

#include <string_view>

#include "mrrope/qk_norm_rotary.h"
#include "tensor_views.h"

// Checks of the arguments of an RMSNorm, shared by the ops that contain one.

namespace mrrope {

NormOver over_named(std::string_view name);

void check_norm_kinds(double eps, double weight_offset, std::string_view over);

// Rank, dtype and device.
void check_weight_kind(NamedTensor weight, NamedTensor reference);

// head_dim weights, or heads * head_dim over all heads.
void check_weight_size(NamedTensor weight, NamedTensor heads, const Layout& layout, NormOver over);

}  // namespace mrrope
