#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "mrrope/rotary.h"
#include "tensor_views.h"

namespace mrrope {

inline NamedTensor named_head(at::TensorList heads, size_t index, const char* q_name = "q") {
    return {index == 0 ? q_name : "k", heads[index]};
}

// The arguments of rotary and rotary_, in their schema's order. Ops that contain a rotation build one for its checks.
struct RotaryCall {
    at::TensorList heads;
    const at::Tensor& positions;
    const at::Tensor& table;
    std::string_view layout;
    std::string_view pairing;
    bool conjugate;
    const OptionalTensor& table_index;
    const char* q_name = "q";  // in messages

    NamedTensor head(size_t index) const { return named_head(heads, index, q_name); }

    void each_head(const auto& visit) const {
        for (size_t i = 0; i < heads.size(); ++i) visit(head(i));
    }
};

// Checks rank, dtype and device of q and k, and the names of layout and pairing.
void check_head_kinds(at::TensorList heads, std::string_view layout, std::string_view pairing,
                      const char* q_name = "q");

// The same, and positions, the table and its index.
void check_kinds(const RotaryCall& call);

// Checks that it is one table, or a stack of tables, without gaps.
void check_table_shape(const at::Tensor& table);

// The same table for k alone.
at::Tensor without_query_factors(const at::Tensor& table);

// Checks sizes, strides and values, then fills the backends' struct. In place, `out` is `call.heads`.
RotaryArgs rotary_args(const RotaryCall& call, at::TensorList out);

// Checks sizes and strides of q and k, then fills what the struct has of them.
RotaryArgs head_args(at::TensorList heads, at::TensorList out, const Layout& layout, const char* q_name = "q");

// Checks that q and k can be written in place.
void check_writable(const RotaryCall& call);

}  // namespace mrrope
