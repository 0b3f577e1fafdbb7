#include <ATen/Functions.h>

#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"
#include "rotary_args.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

struct RotaryCosSinCall {
    TensorList heads;
    const Tensor& cos;
    const Tensor& sin;
    std::string_view layout;
    std::string_view pairing;
    std::optional<int64_t> rotary_dim;
    bool conjugate;

    NamedTensor head(size_t index) const { return named_head(heads, index); }

    void each_columns(const auto& visit) const {
        visit(NamedTensor{"cos", cos});
        visit(NamedTensor{"sin", sin});
    }
};

void check_kinds(const RotaryCosSinCall& call) {
    check_head_kinds(call.heads, call.layout, call.pairing);
    const NamedTensor q = call.head(0);
    call.each_columns([&](NamedTensor x) {
        const at::ScalarType dtype = x.tensor.scalar_type();
        TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == q.tensor.scalar_type(), x.name, " must be float32 or have ",
                         "q's dtype ", q.tensor.scalar_type(), ", got ", dtype);
        check_device(x, q);
    });
    TORCH_CHECK_TYPE(call.sin.scalar_type() == call.cos.scalar_type(), "sin must have cos's dtype ",
                     call.cos.scalar_type(), ", got ", call.sin.scalar_type());
}

ColumnsView columns_view(NamedTensor columns, NamedTensor heads, const Layout& layout) {
    const Tensor& x = columns.tensor;
    const int64_t tokens = heads.tensor.size(layout.token);
    const int64_t batch = layout.batch_of(heads.tensor);
    const bool has_batch = layout.batch >= 0 && x.dim() == 3;
    const bool fits = (x.dim() == 2 || (has_batch && (x.size(0) == batch || x.size(0) == 1))) && x.size(-2) == tokens &&
                      (x.numel() == 0 || x.size(-1) <= 1 || x.stride(-1) == 1);
    if (layout.batch >= 0) {
        TORCH_CHECK_VALUE(fits, columns.name, " must be [", tokens, ", columns], [1, ", tokens, ", columns] or [",
                          batch, ", ", tokens, ", columns] with a contiguous last dimension for ", heads.name, " of ",
                          heads.tensor.sizes(), " in layout ", layout.name, ", got ", x.sizes(), " with strides ",
                          x.strides());
    } else {
        TORCH_CHECK_VALUE(fits, columns.name, " must be [", tokens, ", columns] with a contiguous last dimension for ",
                          heads.name, " of ", heads.tensor.sizes(), " in layout ", layout.name, ", got ", x.sizes(),
                          " with strides ", x.strides());
    }
    return {.data = x.const_data_ptr(),
            .batch_stride = has_batch ? stride_or_zero(x, 0) : 0,
            .token_stride = stride_or_zero(x, static_cast<int>(x.dim()) - 2)};
}

// Checks sizes and strides, then fills the backends' struct.
RotaryCosSinArgs rotary_cos_sin_args(const RotaryCosSinCall& call, TensorList out) {
    const Layout layout = layout_named(call.layout);
    const NamedTensor q = call.head(0);
    RotaryCosSinArgs args;
    args.rotary = head_args(call.heads, out, layout);
    args.cos = columns_view({"cos", call.cos}, q, layout);
    args.sin = columns_view({"sin", call.sin}, q, layout);
    args.columns_dtype = dtype_of({"cos", call.cos});
    const int64_t columns = call.cos.size(-1);
    TORCH_CHECK_VALUE(call.sin.size(-1) == columns, "sin must have cos's ", columns, " columns, got ",
                      call.sin.size(-1));
    const int64_t rotary_dim = call.rotary_dim.value_or(columns);
    const int64_t head_dim = args.rotary.head_dim;
    if (call.rotary_dim) {
        TORCH_CHECK_VALUE(0 < rotary_dim && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                          "rotary_dim must be even, positive and at most head_dim, the last dimension of q (", head_dim,
                          "), got ", rotary_dim);
        TORCH_CHECK_VALUE(columns == rotary_dim || columns == rotary_dim / 2, "cos must have rotary_dim (", rotary_dim,
                          ") or rotary_dim / 2 columns, got ", columns);
    } else {
        TORCH_CHECK_VALUE(0 < columns && columns % 2 == 0 && columns <= head_dim,
                          "cos must have rotary_dim columns, even, positive and at most head_dim, the last dimension ",
                          "of q (", head_dim, "), got ", columns);
    }
    args.rotary.rotary_dim = static_cast<int>(rotary_dim);
    args.rotary.pairing = pairing_named(call.pairing);
    args.rotary.conjugate = call.conjugate;
    args.columns_per_pair = args.rotary.pairing == Pairing::interleaved && columns == rotary_dim ? 2 : 1;
    return args;
}

// The gradient is the rotation with the sines negated: the same op, so it is differentiable again and saves neither q
// nor k.
struct RotaryCosSinFunction : torch::autograd::Function<RotaryCosSinFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, TensorList,
                                       const RotaryCosSinCall& call, const auto& below) {
        context->set_materialize_grads(false);
        context->save_for_backward({call.cos, call.sin});
        context->saved_data["layout"] = call.layout;
        context->saved_data["pairing"] = call.pairing;
        context->saved_data["rotary_dim"] = call.rotary_dim;
        context->saved_data["conjugate"] = call.conjugate;
        return below();
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const auto saved = context->get_saved_variables();
        auto& data = context->saved_data;
        return backward_by_rotation(context, gradients, [&](TensorList heads, bool) {
            return rotary_cos_sin(heads, saved[0], saved[1],
                                  {.layout = heads_layout_named(data["layout"].toStringRef()),
                                   .pairing = pairing_named(data["pairing"].toStringRef()),
                                   .rotary_dim = data["rotary_dim"].toOptional<int64_t>(),
                                   .conjugate = !data["conjugate"].toBool()});
        });
    }
};

struct RotaryCosSin {
    static constexpr const char* name = "rotary_cos_sin";
    using Call = RotaryCosSinCall;
    using Signature = std::vector<Tensor>(TensorList, const Tensor&, const Tensor&, std::string_view, std::string_view,
                                          std::optional<int64_t>, bool);

    static void check(const Call& call) { check_kinds(call); }

    static void each_input(const Call& call, const auto& visit) {
        for (size_t i = 0; i < call.heads.size(); ++i) visit(call.head(i));
        call.each_columns(visit);
    }

    template <class Backend>
    static std::vector<Tensor> run(const Call& call) {
        std::vector<Tensor> out = empty_like_heads(call.heads);
        Backend::run(rotary_cos_sin_args(call, out), call.heads[0]);
        return out;
    }

    static std::vector<Tensor> meta(const Call& call) { return empty_like_heads(call.heads); }

    static std::vector<Tensor> differentiate(const Call& call, const auto& below) {
        call.each_columns([](NamedTensor x) {
            TORCH_CHECK(!needs_gradient(x.tensor), x.name, " requires grad, and rotary_cos_sin has gradients for q ",
                        "and k only: detach it, or use learnable_rotary");
        });
        return RotaryCosSinFunction::apply(call.heads, call, below);
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(MRROPE_NAMESPACE, library) {
    register_op<RotaryCosSin>(library,
                              "(Tensor[] heads, Tensor cos, Tensor sin, str layout='bhsd', str pairing='halves', "
                              "int? rotary_dim=None, bool conjugate=False) -> Tensor[]");
}

std::vector<Tensor> rotary_cos_sin(TensorList heads, const Tensor& cos, const Tensor& sin,
                                   const RotaryCosSinOptions& options) {
    return dispatched<RotaryCosSin>().call(heads, cos, sin, name_of(options.layout), name_of(options.pairing),
                                           options.rotary_dim, options.conjugate);
}

}  // namespace mrrope
