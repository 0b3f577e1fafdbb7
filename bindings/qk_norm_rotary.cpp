#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/autograd.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "backends.h"
#include "gradients.h"
#include "mrrope/torch_ops.h"
#include "rotary_args.h"
#include "tensor_views.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

using Index = std::optional<Tensor>;

using NormSignature = std::vector<Tensor>(TensorList, TensorList, const Tensor&, const Tensor&, double, double,
                                          c10::string_view, c10::string_view, c10::string_view, bool, const Index&);
using NormInPlaceSignature = void(TensorList, TensorList, const Tensor&, const Tensor&, double, double,
                                  c10::string_view, c10::string_view, c10::string_view, bool, const Index&);
using NormBackwardSignature = std::vector<Tensor>(TensorList, TensorList, TensorList, const Tensor&, const Tensor&,
                                                  double, double, c10::string_view, c10::string_view, c10::string_view,
                                                  bool, const Index&, bool);

template <class Signature>
auto op_named(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

const auto& norm_op() {
    static const auto op = op_named<NormSignature>("mrrope::qk_norm_rotary");
    return op;
}

const auto& norm_in_place_op() {
    static const auto op = op_named<NormInPlaceSignature>("mrrope::qk_norm_rotary_");
    return op;
}

const auto& norm_backward_op() {
    static const auto op = op_named<NormBackwardSignature>("mrrope::qk_norm_rotary_backward");
    return op;
}

// What a call says of the norm, beside its weights.
struct NormOptions {
    double eps;
    double weight_offset;
    c10::string_view over;
};

const char* weight_name(size_t index) {
    return index == 0 ? "q_weight" : "k_weight";
}

NormOver over_named(c10::string_view name) {
    if (name == "head") return NormOver::head;
    if (name == "all_heads") return NormOver::all_heads;
    TORCH_CHECK_VALUE(false, "over must be one of head, all_heads, got '", name, "'");
}

// The checks that need no sizes, for tensors that have none yet.
void check_norm_kinds(TensorList heads, TensorList weights, const RotaryOptions& rotary, const NormOptions& norm) {
    check_kinds(heads, rotary);
    over_named(norm.over);
    TORCH_CHECK_VALUE(std::isfinite(norm.eps) && norm.eps >= 0.0, "eps must be finite and not negative, got ",
                      norm.eps);
    TORCH_CHECK_VALUE(std::isfinite(norm.weight_offset), "weight_offset must be finite, got ", norm.weight_offset);
    TORCH_CHECK_VALUE(weights.size() == heads.size(), "weights must be one tensor for each of the ", heads.size(),
                      " tensors of heads, got ", weights.size());
    for (size_t i = 0; i < weights.size(); ++i) {
        const Tensor& weight = weights[i];
        TORCH_CHECK_VALUE(weight.dim() == 1, weight_name(i), " must have one dimension, got ", weight.dim());
        TORCH_CHECK_TYPE(weight.scalar_type() == heads[0].scalar_type(), weight_name(i), " must have q's dtype ",
                         heads[0].scalar_type(), ", got ", weight.scalar_type());
        TORCH_CHECK(weight.device() == heads[0].device(), weight_name(i), " must be on q's device ", heads[0].device(),
                    ", got ", weight.device());
    }
}

void check_weight_sizes(TensorList heads, TensorList weights, const NormOptions& norm, const Layout& layout) {
    for (size_t i = 0; i < weights.size(); ++i) {
        const int64_t head_dim = heads[i].size(-1);
        const bool per_head = over_named(norm.over) == NormOver::head;
        const int64_t expected = per_head ? head_dim : heads[i].size(layout.head) * head_dim;
        TORCH_CHECK_VALUE(weights[i].size(0) == expected, weight_name(i), " must be [", expected, "], ",
                          per_head ? "head_dim" : "heads * head_dim", " for ", head_name(i), " of ", heads[i].sizes(),
                          ", got ", weights[i].sizes());
    }
}

// `weights` must be contiguous, and outlive the result.
QkNormRotaryArgs norm_args(TensorList heads, TensorList out, TensorList weights, const RotaryOptions& rotary,
                           const NormOptions& norm) {
    check_norm_kinds(heads, weights, rotary, norm);
    QkNormRotaryArgs args;
    args.rotary = rotary_args(heads, out, rotary);
    check_weight_sizes(heads, weights, norm, layout_named(rotary.layout));
    args.q_weight = weights[0].const_data_ptr();
    if (weights.size() == 2) args.k_weight = weights[1].const_data_ptr();
    args.eps = norm.eps;
    args.weight_offset = norm.weight_offset;
    args.over = over_named(norm.over);
    return args;
}

std::vector<Tensor> contiguous(TensorList tensors) {
    std::vector<Tensor> result;
    for (const Tensor& x : tensors) result.push_back(x.contiguous());
    return result;
}

// --- backends
// ----------------------------------------------------------------------------------------------------------

template <class Backend>
std::vector<Tensor> norm_on(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                            double eps, double weight_offset, c10::string_view over, c10::string_view layout,
                            c10::string_view pairing, bool conjugate, const Index& table_index) {
    const RotaryOptions rotary{positions, table, layout, pairing, conjugate, table_index};
    check_norm_kinds(heads, weights, rotary, {eps, weight_offset, over});
    std::vector<Tensor> out = like(heads);
    const std::vector<Tensor> dense = contiguous(weights);
    Backend::run(norm_args(heads, out, dense, rotary, {eps, weight_offset, over}), heads[0]);
    return out;
}

template <class Backend>
void norm_in_place_on(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table, double eps,
                      double weight_offset, c10::string_view over, c10::string_view layout, c10::string_view pairing,
                      bool conjugate, const Index& table_index) {
    const std::vector<Tensor> dense = contiguous(weights);
    const QkNormRotaryArgs args = norm_args(
        heads, heads, dense, {positions, table, layout, pairing, conjugate, table_index}, {eps, weight_offset, over});
    for (size_t i = 0; i < heads.size(); ++i) {
        for (size_t j = 0; j < dense.size(); ++j) check_apart({head_name(i), heads[i]}, {weight_name(j), dense[j]});
    }
    Backend::run(args, heads[0]);
}

void check_gradient_kinds(TensorList gradients, TensorList heads) {
    TORCH_CHECK_VALUE(gradients.size() == heads.size(), "gradients must be one for each of the ", heads.size(),
                      " tensors of heads, got ", gradients.size());
    for (size_t i = 0; i < heads.size(); ++i) {
        TORCH_CHECK_VALUE(gradients[i].dim() == heads[i].dim(), "gradients[", i, "] must have the heads' ",
                          heads[i].dim(), " dimensions, got ", gradients[i].dim());
        TORCH_CHECK_TYPE(gradients[i].scalar_type() == heads[i].scalar_type(), "gradients[", i,
                         "] must have the dtype of the heads, ", heads[i].scalar_type(), ", got ",
                         gradients[i].scalar_type());
        TORCH_CHECK(gradients[i].device() == heads[i].device(), "gradients[", i, "] must be on the heads' device ",
                    heads[i].device(), ", got ", gradients[i].device());
    }
}

void check_gradient_sizes(TensorList gradients, TensorList heads) {
    for (size_t i = 0; i < heads.size(); ++i) {
        TORCH_CHECK_VALUE(
            gradients[i].sizes() == heads[i].sizes() && (gradients[i].numel() == 0 || gradients[i].stride(-1) == 1),
            "gradients[", i, "] must be ", heads[i].sizes(), " with a contiguous last dimension, got ",
            gradients[i].sizes(), " with strides ", gradients[i].strides());
    }
}

template <class Backend>
std::vector<Tensor> norm_backward_on(TensorList gradients, TensorList heads, TensorList weights,
                                     const Tensor& positions, const Tensor& table, double eps, double weight_offset,
                                     c10::string_view over, c10::string_view layout_name, c10::string_view pairing,
                                     bool conjugate, const Index& table_index, bool wants_weights) {
    const RotaryOptions rotary{positions, table, layout_name, pairing, conjugate, table_index};
    check_norm_kinds(heads, weights, rotary, {eps, weight_offset, over});
    check_gradient_kinds(gradients, heads);
    check_gradient_sizes(gradients, heads);
    const Layout layout = layout_named(layout_name);
    std::vector<Tensor> result = like(heads);
    const std::vector<Tensor> dense = contiguous(weights);
    QkNormRotaryGradientArgs args;
    args.call = norm_args(heads, result, dense, rotary, {eps, weight_offset, over});
    const int64_t all_heads =
        args.call.rotary.batch * args.call.rotary.tokens * (args.call.rotary.q.heads + args.call.rotary.k.heads);
    TORCH_CHECK_VALUE(all_heads < std::numeric_limits<int>::max(),
                      "q and k must have fewer than 2^31 heads in all tokens for their gradients, got ", all_heads);
    for (size_t i = 0; i < heads.size(); ++i) {
        OutputGradient& gradient = i == 0 ? args.q : args.k;
        gradient.data = gradients[i].const_data_ptr();
        gradient.strides = strides_of(gradients[i], layout);
    }
    const WeightSumRows rows = Backend::weight_sum_rows(args);
    std::vector<Tensor> sums;
    for (size_t i = 0; wants_weights && i < heads.size(); ++i) {
        const auto precision = heads[i].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
        const int64_t size = weights[i].size(0);
        sums.push_back(at::empty({i == 0 ? rows.q : rows.k, size}, heads[i].options().dtype(precision)));
        (i == 0 ? args.q : args.k).weight_sums = sums[i].data_ptr();
    }
    Backend::run(args, heads[0]);
    for (size_t i = 0; i < sums.size(); ++i) result.push_back(sums[i].sum(0).to(weights[i].scalar_type()));
    return result;
}

std::vector<Tensor> norm_meta(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                              double eps, double weight_offset, c10::string_view over, c10::string_view layout,
                              c10::string_view pairing, bool conjugate, const Index& table_index) {
    check_norm_kinds(heads, weights, {positions, table, layout, pairing, conjugate, table_index},
                     {eps, weight_offset, over});
    return like(heads);
}

void norm_in_place_meta(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table, double eps,
                        double weight_offset, c10::string_view over, c10::string_view layout, c10::string_view pairing,
                        bool conjugate, const Index& table_index) {
    check_norm_kinds(heads, weights, {positions, table, layout, pairing, conjugate, table_index},
                     {eps, weight_offset, over});
}

std::vector<Tensor> norm_backward_meta(TensorList gradients, TensorList heads, TensorList weights,
                                       const Tensor& positions, const Tensor& table, double eps, double weight_offset,
                                       c10::string_view over, c10::string_view layout, c10::string_view pairing,
                                       bool conjugate, const Index& table_index, bool wants_weights) {
    check_norm_kinds(heads, weights, {positions, table, layout, pairing, conjugate, table_index},
                     {eps, weight_offset, over});
    check_gradient_kinds(gradients, heads);
    std::vector<Tensor> result = like(heads);
    for (const Tensor& weight : weights) {
        if (wants_weights) result.push_back(at::empty_symint(weight.sym_sizes(), weight.options()));
    }
    return result;
}

// --- autograd
// ----------------------------------------------------------------------------------------------------------

// Keeps q and k, not what came out of their norm: the backward pass reads them anyway, and gets the norm from them.
struct NormFunction : torch::autograd::Function<NormFunction> {
    static constexpr bool is_traceable = true;

    // q, its weight, k, its weight: in this order, so that those that are there are numbered alike without k.
    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, const Tensor& q,
                                       const Tensor& q_weight, const std::optional<Tensor>& k,
                                       const std::optional<Tensor>& k_weight, const Tensor& positions,
                                       const Tensor& table, double eps, double weight_offset, const std::string& over,
                                       const std::string& layout, const std::string& pairing, bool conjugate,
                                       const Index& table_index) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        context->set_materialize_grads(false);
        context->save_for_backward({q, q_weight, k.value_or(Tensor()), k_weight.value_or(Tensor()), positions, table,
                                    table_index.value_or(Tensor())});
        context->saved_data["eps"] = eps;
        context->saved_data["weight_offset"] = weight_offset;
        context->saved_data["over"] = over;
        context->saved_data["layout"] = layout;
        context->saved_data["pairing"] = pairing;
        context->saved_data["conjugate"] = conjugate;
        std::vector<Tensor> heads{q};
        std::vector<Tensor> weights{q_weight};
        if (k) {
            heads.push_back(*k);
            weights.push_back(*k_weight);
        }
        return norm_op().call(heads, weights, positions, table, eps, weight_offset, over, layout, pairing, conjugate,
                              table_index);
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        constexpr size_t inputs = 13;
        std::vector<Tensor> result(inputs);
        const auto saved = context->get_saved_variables();
        std::vector<size_t> wanted;
        std::vector<Tensor> given, heads, weights;
        bool wants_weights = false;
        for (size_t i = 0; i < gradients.size(); ++i) {
            const bool wants_weight = context->needs_input_grad(2 * i + 1);
            if (!gradients[i].defined() || !(context->needs_input_grad(2 * i) || wants_weight)) continue;
            wanted.push_back(i);
            given.push_back(with_contiguous_last_dimension(gradients[i]));
            heads.push_back(saved[2 * i]);
            weights.push_back(saved[2 * i + 1]);
            wants_weights = wants_weights || wants_weight;
        }
        if (heads.empty()) return result;
        auto& data = context->saved_data;
        const std::vector<Tensor> found = norm_backward_op().call(
            given, heads, weights, saved[4], saved[5], data["eps"].toDouble(), data["weight_offset"].toDouble(),
            data["over"].toStringRef(), data["layout"].toStringRef(), data["pairing"].toStringRef(),
            data["conjugate"].toBool(), saved[6].defined() ? Index(saved[6]) : std::nullopt, wants_weights);
        for (size_t i = 0; i < wanted.size(); ++i) {
            result[2 * wanted[i]] = found[i];
            if (wants_weights) result[2 * wanted[i] + 1] = found[heads.size() + i];
        }
        return result;
    }
};

std::vector<Tensor> norm_autograd(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                                  double eps, double weight_offset, c10::string_view over, c10::string_view layout,
                                  c10::string_view pairing, bool conjugate, const Index& table_index) {
    if (!needs_gradient(heads) && !needs_gradient(weights)) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return norm_op().call(heads, weights, positions, table, eps, weight_offset, over, layout, pairing, conjugate,
                              table_index);
    }
    check_norm_kinds(heads, weights, {positions, table, layout, pairing, conjugate, table_index},
                     {eps, weight_offset, over});
    const bool has_k = heads.size() == 2;
    const std::optional<Tensor> k = has_k ? std::optional<Tensor>(heads[1]) : std::nullopt;
    const std::optional<Tensor> k_weight = has_k ? std::optional<Tensor>(weights[1]) : std::nullopt;
    return NormFunction::apply(heads[0], weights[0], k, k_weight, positions, table, eps, weight_offset,
                               std::string(over), std::string(layout), std::string(pairing), conjugate, table_index);
}

void norm_in_place_autograd(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                            double eps, double weight_offset, c10::string_view over, c10::string_view layout,
                            c10::string_view pairing, bool conjugate, const Index& table_index) {
    for (const auto& [tensors, name_of] : {std::pair(heads, &head_name), std::pair(weights, &weight_name)}) {
        for (size_t i = 0; i < tensors.size(); ++i) {
            TORCH_CHECK(!needs_gradient(tensors[i]), name_of(i),
                        " requires grad, and its gradient needs what would be overwritten in place: use qk_norm_rotary,"
                        " or torch.no_grad()");
        }
    }
    const at::AutoDispatchBelowAutograd below_autograd;
    norm_in_place_op().call(heads, weights, positions, table, eps, weight_offset, over, layout, pairing, conjugate,
                            table_index);
}

void norm_in_place_versioned(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                             double eps, double weight_offset, c10::string_view over, c10::string_view layout,
                             c10::string_view pairing, bool conjugate, const Index& table_index) {
    for (size_t i = 0; i < heads.size(); ++i) {
        TORCH_CHECK(!heads[i].is_inference() || c10::InferenceMode::is_enabled(), head_name(i),
                    " was made in inference mode and cannot be rotated in place outside it: clone it first");
    }
    {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        norm_in_place_op().call(heads, weights, positions, table, eps, weight_offset, over, layout, pairing, conjugate,
                                table_index);
    }
    for (const Tensor& x : heads) torch::autograd::impl::bump_version(x);
}

std::vector<Tensor> norm_backward_autograd(TensorList gradients, TensorList heads, TensorList weights,
                                           const Tensor& positions, const Tensor& table, double eps,
                                           double weight_offset, c10::string_view over, c10::string_view layout,
                                           c10::string_view pairing, bool conjugate, const Index& table_index,
                                           bool wants_weights) {
    TORCH_CHECK_NOT_IMPLEMENTED(!needs_gradient(gradients) && !needs_gradient(heads) && !needs_gradient(weights),
                                "qk_norm_rotary cannot be differentiated twice: its backward pass has no gradient");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return norm_backward_op().call(gradients, heads, weights, positions, table, eps, weight_offset, over, layout,
                                   pairing, conjugate, table_index, wants_weights);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    m.def(
        "qk_norm_rotary(Tensor[] heads, Tensor[] weights, Tensor positions, Tensor table, float eps, "
        "float weight_offset=0.0, str over='head', str layout='bhsd', str pairing='halves', bool conjugate=False, "
        "Tensor? table_index=None) -> Tensor[]",
        tags);
    m.def(
        "qk_norm_rotary_(Tensor(a!)[] heads, Tensor[] weights, Tensor positions, Tensor table, float eps, "
        "float weight_offset=0.0, str over='head', str layout='bhsd', str pairing='halves', bool conjugate=False, "
        "Tensor? table_index=None) -> ()",
        tags);
    m.def(
        "qk_norm_rotary_backward(Tensor[] gradients, Tensor[] heads, Tensor[] weights, Tensor positions, Tensor table, "
        "float eps, float weight_offset=0.0, str over='head', str layout='bhsd', str pairing='halves', "
        "bool conjugate=False, Tensor? table_index=None, bool wants_weights=True) -> Tensor[]",
        tags);
}

TORCH_LIBRARY_IMPL(mrrope, CPU, m) {
    m.impl("qk_norm_rotary", norm_on<Cpu>);
    m.impl("qk_norm_rotary_", norm_in_place_on<Cpu>);
    m.impl("qk_norm_rotary_backward", norm_backward_on<Cpu>);
}

TORCH_LIBRARY_IMPL(mrrope, CUDA, m) {
    m.impl("qk_norm_rotary", norm_on<Cuda>);
    m.impl("qk_norm_rotary_", norm_in_place_on<Cuda>);
    m.impl("qk_norm_rotary_backward", norm_backward_on<Cuda>);
}

TORCH_LIBRARY_IMPL(mrrope, Meta, m) {
    m.impl("qk_norm_rotary", norm_meta);
    m.impl("qk_norm_rotary_", norm_in_place_meta);
    m.impl("qk_norm_rotary_backward", norm_backward_meta);
}

TORCH_LIBRARY_IMPL(mrrope, Autograd, m) {
    m.impl("qk_norm_rotary", norm_autograd);
    m.impl("qk_norm_rotary_", norm_in_place_autograd);
    m.impl("qk_norm_rotary_backward", norm_backward_autograd);
}

TORCH_LIBRARY_IMPL(mrrope, ADInplaceOrView, m) {
    m.impl("qk_norm_rotary_", norm_in_place_versioned);
}

// --- for C++
// -----------------------------------------------------------------------------------------------------------

std::vector<Tensor> qk_norm_rotary(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                                   double eps, double weight_offset, std::string_view over, std::string_view layout,
                                   std::string_view pairing, const Index& table_index) {
    return norm_op().call(heads, weights, positions, table, eps, weight_offset, over, layout, pairing, false,
                          table_index);
}

void qk_norm_rotary_(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table, double eps,
                     double weight_offset, std::string_view over, std::string_view layout, std::string_view pairing,
                     const Index& table_index) {
    norm_in_place_op().call(heads, weights, positions, table, eps, weight_offset, over, layout, pairing, false,
                            table_index);
}

}  // namespace mrrope
