#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

#include "mrrope/rotary.h"

namespace mrrope {

// What a call says beside its heads.
struct RotaryOptions {
    const at::Tensor& positions;
    const at::Tensor& table;
    std::string_view layout;
    std::string_view pairing;
    bool conjugate;
    const std::optional<at::Tensor>& table_index;
};

// Checks everything a call promises, naming the argument that breaks it, then fills the struct that the backends take.
// `out` is `in` for a rotation in place.
RotaryArgs rotary_args(at::TensorList in, at::TensorList out, const RotaryOptions& options);

// The part of those checks that needs no sizes, for tensors that have none yet.
void check_kinds(at::TensorList heads, const RotaryOptions& options);

// That q and k are laid out as they should be and have memory of their own, to be rotated in place.
void check_writable(at::TensorList heads, std::string_view layout);

const char* head_name(size_t index);

}  // namespace mrrope
