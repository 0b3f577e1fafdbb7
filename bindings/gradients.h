#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

namespace mrrope {

// Forward-mode derivatives are not there yet: whoever is asked for them refuses, instead of dropping them.
inline bool needs_gradient(const at::Tensor& x) {
    return (at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
}

inline bool needs_gradient(at::TensorList tensors) {
    for (const at::Tensor& x : tensors) {
        if (needs_gradient(x)) return true;
    }
    return false;
}

}  // namespace mrrope
