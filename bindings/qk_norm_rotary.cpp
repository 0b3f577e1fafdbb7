#include <ATen/Functions.h>

#include <limits>
#include <vector>

#include "mrrope/torch_ops.h"
#include "norm_args.h"
#include "option_names.h"
#include "registration.h"
#include "rotary_args.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

struct QkNormRotaryCall {
    TensorList heads;
    TensorList weights;
    const Tensor& positions;
    const Tensor& table;
    double eps;
    double weight_offset;
    std::string_view over;
    std::string_view layout;
    std::string_view pairing;
    bool conjugate;
    const OptionalTensor& table_index;

    RotaryCall rotary() const { return {heads, positions, table, layout, pairing, conjugate, table_index}; }
    NamedTensor head(size_t index) const { return rotary().head(index); }
    NamedTensor weight(size_t index) const { return {index == 0 ? "q_weight" : "k_weight", weights[index]}; }

    void each_input(const auto& visit) const {
        rotary().each_head(visit);
        for (size_t i = 0; i < weights.size(); ++i) visit(weight(i));
    }
};

struct QkNormRotaryBackwardCall {
    TensorList gradients;
    QkNormRotaryCall forward;
    bool wants_weights;

    NamedTensor gradient(size_t index) const { return {{"gradients", static_cast<int64_t>(index)}, gradients[index]}; }
};

void check_kinds(const QkNormRotaryCall& call) {
    check_kinds(call.rotary());
    check_norm_kinds(call.eps, call.weight_offset, call.over);
    TORCH_CHECK_VALUE(call.weights.size() == call.heads.size(), "weights must be one tensor for each of the ",
                      call.heads.size(), " tensors of heads, got ", call.weights.size());
    for (size_t i = 0; i < call.weights.size(); ++i) check_weight_kind(call.weight(i), call.head(0));
}

void check_weight_sizes(const QkNormRotaryCall& call) {
    const Layout layout = layout_named(call.layout);
    const NormOver over = over_named(call.over);
    for (size_t i = 0; i < call.weights.size(); ++i) check_weight_size(call.weight(i), call.head(i), layout, over);
}

std::vector<Tensor> contiguous(TensorList tensors) {
    std::vector<Tensor> result;
    result.reserve(tensors.size());
    for (const Tensor& x : tensors) result.push_back(x.contiguous());
    return result;
}

// `weights` are the call's, contiguous, and must outlive the result.
QkNormRotaryArgs qk_norm_rotary_args(const QkNormRotaryCall& call, TensorList out, TensorList weights) {
    QkNormRotaryArgs args;
    args.rotary = rotary_args(call.rotary(), out);
    check_weight_sizes(call);
    args.q_weight = weights[0].const_data_ptr();
    if (weights.size() == 2) args.k_weight = weights[1].const_data_ptr();
    args.eps = call.eps;
    args.weight_offset = call.weight_offset;
    args.over = over_named(call.over);
    return args;
}

struct QkNormRotaryBackward {
    static constexpr const char* name = "qk_norm_rotary_backward";
    using Call = QkNormRotaryBackwardCall;
    using Signature = std::vector<Tensor>(TensorList, TensorList, TensorList, const Tensor&, const Tensor&, double,
                                          double, std::string_view, std::string_view, std::string_view, bool,
                                          const OptionalTensor&, bool);

    static void each_input(const Call& call, const auto& visit) {
        for (size_t i = 0; i < call.gradients.size(); ++i) visit(call.gradient(i));
        call.forward.each_input(visit);
    }

    static std::vector<Tensor> differentiate(const Call&, const auto&) {
        TORCH_CHECK_NOT_IMPLEMENTED(false,
                                    "qk_norm_rotary cannot be differentiated twice: its backward pass has no gradient");
    }

    static void check(const Call& call) {
        check_kinds(call.forward);
        const TensorList heads = call.forward.heads;
        TORCH_CHECK_VALUE(call.gradients.size() == heads.size(), "gradients must be one for each of the ", heads.size(),
                          " tensors of heads, got ", call.gradients.size());
        for (size_t i = 0; i < heads.size(); ++i) {
            const NamedTensor gradient = call.gradient(i);
            TORCH_CHECK_VALUE(gradient.tensor.dim() == heads[i].dim(), gradient.name, " must have the heads' ",
                              heads[i].dim(), " dimensions, got ", gradient.tensor.dim());
            check_like(gradient, {{"heads", static_cast<int64_t>(i)}, heads[i]});
        }
    }

    static void check_sizes(const Call& call) {
        for (size_t i = 0; i < call.gradients.size(); ++i) {
            const auto& [name, x] = call.gradient(i);
            const Tensor& heads = call.forward.heads[i];
            TORCH_CHECK_VALUE(x.sizes() == heads.sizes() && (x.numel() == 0 || x.stride(-1) == 1), name, " must be ",
                              heads.sizes(), " with a contiguous last dimension, got ", x.sizes(), " with strides ",
                              x.strides());
        }
    }

    template <class Backend>
    static std::vector<Tensor> run(const Call& call) {
        const auto& [gradients, forward, wants_weights] = call;
        check_sizes(call);
        const Layout layout = layout_named(forward.layout);
        std::vector<Tensor> result = empty_like_heads(forward.heads);
        const std::vector<Tensor> weights = contiguous(forward.weights);
        QkNormRotaryGradientArgs args;
        args.call = qk_norm_rotary_args(forward, result, weights);
        const RotaryArgs& rotary = args.call.rotary;
        const int64_t all_heads = rotary.batch * rotary.tokens * (rotary.q.heads + rotary.k.heads);
        TORCH_CHECK_VALUE(all_heads < std::numeric_limits<int>::max(),
                          "q and k must have fewer than 2^31 heads in all tokens for their gradients, got ", all_heads);
        for (size_t i = 0; i < gradients.size(); ++i) {
            OutputGradient& gradient = i == 0 ? args.q : args.k;
            gradient.data = gradients[i].const_data_ptr();
            gradient.strides = head_strides(gradients[i], layout);
        }
        const WeightSumRows rows = Backend::weight_sum_rows(args, forward.heads[0]);
        std::vector<Tensor> sums;
        for (size_t i = 0; wants_weights && i < weights.size(); ++i) {
            const auto precision = weights[i].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
            sums.push_back(
                at::empty({i == 0 ? rows.q : rows.k, weights[i].size(0)}, weights[i].options().dtype(precision)));
            result.push_back(at::empty_like(weights[i]));
            OutputGradient& gradient = i == 0 ? args.q : args.k;
            gradient.weight_sums = sums[i].data_ptr();
            gradient.weights = result.back().data_ptr();
        }
        Backend::run(args, forward.heads[0]);
        return result;
    }

    static std::vector<Tensor> meta(const Call& call) {
        std::vector<Tensor> result = empty_like_heads(call.forward.heads);
        if (!call.wants_weights) return result;
        for (const Tensor& weight : call.forward.weights) {
            result.push_back(at::empty_symint(weight.sym_sizes(), weight.options()));
        }
        return result;
    }
};

// Saves q and k, not their norms: the backward pass reads q and k in any case and recomputes the norms from them.
struct QkNormRotaryFunction : torch::autograd::Function<QkNormRotaryFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, TensorList heads, TensorList weights,
                                       const QkNormRotaryCall& call, const auto& below) {
        context->set_materialize_grads(false);
        std::vector<Tensor> saved{call.positions, call.table, call.table_index.value_or(Tensor())};
        saved.insert(saved.end(), heads.begin(), heads.end());
        saved.insert(saved.end(), weights.begin(), weights.end());
        context->save_for_backward(std::move(saved));
        context->saved_data["eps"] = call.eps;
        context->saved_data["weight_offset"] = call.weight_offset;
        context->saved_data["over"] = call.over;
        context->saved_data["layout"] = call.layout;
        context->saved_data["pairing"] = call.pairing;
        context->saved_data["conjugate"] = call.conjugate;
        return below();
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const size_t count = gradients.size();
        std::vector<Tensor> result(2 * count + 2);  // heads, weights, and none for call and below
        const auto saved = context->get_saved_variables();
        std::vector<size_t> wanted;
        std::vector<Tensor> given, heads, weights;
        bool wants_weights = false;
        for (size_t i = 0; i < count; ++i) {
            const bool wants_weight = context->needs_input_grad(count + i);
            if (!gradients[i].defined() || !(context->needs_input_grad(i) || wants_weight)) continue;
            wanted.push_back(i);
            given.push_back(with_contiguous_last_dimension(gradients[i]));
            heads.push_back(saved[3 + i]);
            weights.push_back(saved[3 + count + i]);
            wants_weights = wants_weights || wants_weight;
        }
        if (heads.empty()) return result;
        auto& data = context->saved_data;
        const bool are_of_k_alone = wanted.front() == 1;
        const Tensor table = are_of_k_alone ? without_query_factors(saved[1]) : saved[1];
        const std::vector<Tensor> found = dispatched<QkNormRotaryBackward>().call(
            given, heads, weights, saved[0], table, data["eps"].toDouble(), data["weight_offset"].toDouble(),
            data["over"].toStringRef(), data["layout"].toStringRef(), data["pairing"].toStringRef(),
            data["conjugate"].toBool(), saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt, wants_weights);
        for (size_t i = 0; i < wanted.size(); ++i) {
            result[wanted[i]] = found[i];
            if (wants_weights) result[count + wanted[i]] = found[heads.size() + i];
        }
        return result;
    }
};

template <class Result>
struct QkNormRotaryTraits {
    using Call = QkNormRotaryCall;
    using Signature = Result(TensorList, TensorList, const Tensor&, const Tensor&, double, double, std::string_view,
                             std::string_view, std::string_view, bool, const OptionalTensor&);

    static void check(const Call& call) { check_kinds(call); }
    static void each_input(const Call& call, const auto& visit) { call.each_input(visit); }
};

struct QkNormRotary : QkNormRotaryTraits<std::vector<Tensor>> {
    static constexpr const char* name = "qk_norm_rotary";

    template <class Backend>
    static std::vector<Tensor> run(const Call& call) {
        std::vector<Tensor> out = empty_like_heads(call.heads);
        const std::vector<Tensor> weights = contiguous(call.weights);
        Backend::run(qk_norm_rotary_args(call, out, weights), call.heads[0]);
        return out;
    }

    static std::vector<Tensor> meta(const Call& call) { return empty_like_heads(call.heads); }

    static std::vector<Tensor> differentiate(const Call& call, const auto& below) {
        return QkNormRotaryFunction::apply(call.heads, call.weights, call, below);
    }
};

struct QkNormRotaryInPlace : QkNormRotaryTraits<void> {
    static constexpr const char* name = "qk_norm_rotary_";
    static constexpr const char* written = "rotated in place";
    static constexpr const char* no_gradient =
        "its gradient needs what would be overwritten in place: use qk_norm_rotary, or torch.no_grad()";

    static void each_written(const Call& call, const auto& visit) { call.rotary().each_head(visit); }

    template <class Backend>
    static void run(const Call& call) {
        const std::vector<Tensor> weights = contiguous(call.weights);
        const QkNormRotaryArgs args = qk_norm_rotary_args(call, call.heads, weights);
        for (size_t i = 0; i < call.heads.size(); ++i) {
            for (size_t j = 0; j < weights.size(); ++j) {
                check_no_overlap(call.head(i), {call.weight(j).name, weights[j]});
            }
        }
        Backend::run(args, call.heads[0]);
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string options =
        "Tensor[] weights, Tensor positions, Tensor table, float eps, float weight_offset=0.0, str over='head', "
        "str layout='bhsd', str pairing='halves', bool conjugate=False, Tensor? table_index=None";
    register_op<QkNormRotary>(library, "(Tensor[] heads, " + options + ") -> Tensor[]");
    register_op<QkNormRotaryInPlace>(library, "(Tensor(a!)[] heads, " + options + ") -> ()");
    register_op<QkNormRotaryBackward>(
        library, "(Tensor[] gradients, Tensor[] heads, " + options + ", bool wants_weights=True) -> Tensor[]");
}

std::vector<Tensor> qk_norm_rotary(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table,
                                   double eps, const QkNormRotaryOptions& options) {
    return dispatched<QkNormRotary>().call(heads, weights, positions, table, eps, options.weight_offset,
                                           name_of(options.over), name_of(options.layout), name_of(options.pairing),
                                           /*conjugate=*/false, options.table_index);
}

void qk_norm_rotary_(TensorList heads, TensorList weights, const Tensor& positions, const Tensor& table, double eps,
                     const QkNormRotaryOptions& options) {
    dispatched<QkNormRotaryInPlace>().call(heads, weights, positions, table, eps, options.weight_offset,
                                           name_of(options.over), name_of(options.layout), name_of(options.pairing),
                                           /*conjugate=*/false, options.table_index);
}

}  // namespace mrrope
