#pragma once

#include <ATen/core/Tensor.h>

#include "mrrope/mla_rotary.h"
#include "tensor_views.h"

// Tensors with one row per token instead of heads, for MLA: [tokens, dim], or [batch, tokens, dim] beside q of four
// dimensions.

namespace mrrope {

// The dimensions of such a tensor; of one with heads' rank, those of q's layout.
Layout row_layout(const at::Tensor& rows, const Layout& layout);

// Checks rank, dtype and device. May a single head be a dimension of its own?
enum class HeadDimension { forbidden, allowed };
void check_row_kind(NamedTensor rows, HeadDimension head, NamedTensor q, const Layout& layout);

// Checks q's sequences and tokens, and that there is a single head and a contiguous last dimension.
void check_row_sizes(NamedTensor rows, NamedTensor q, const Layout& layout);

// The key's rope part is one head, so head tables have no meaning for it.
void check_one_table_for_all_heads(const at::Tensor& table);

// `heads` without their first `components`.
HeadsView behind(const HeadsView& heads, int64_t components, DType dtype);

}  // namespace mrrope
