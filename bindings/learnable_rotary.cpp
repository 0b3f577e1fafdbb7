#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "mrrope/torch_ops.h"
#include "registration.h"
#include "rotary_args.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

struct LearnableRotaryCall {
    TensorList heads;
    const Tensor& positions;
    const Tensor& frequencies;
    const Tensor& attention_factor;
    std::string_view layout;
    std::string_view pairing;
    bool conjugate;

    NamedTensor head(size_t index) const { return {index == 0 ? "q" : "k", heads[index]}; }

    void each_input(const auto& visit) const {
        for (size_t i = 0; i < heads.size(); ++i) visit(head(i));
        visit(NamedTensor{"frequencies", frequencies});
        visit(NamedTensor{"attention_factor", attention_factor});
    }
};

struct LearnableRotaryBackwardCall {
    TensorList gradients;
    LearnableRotaryCall forward;
    bool wants_heads;

    NamedTensor gradient(size_t index) const { return {{"gradients", static_cast<int64_t>(index)}, gradients[index]}; }
};

void check_kinds(const LearnableRotaryCall& call) {
    check_head_kinds(call.heads, call.layout, call.pairing);
    const NamedTensor q = call.head(0);
    check_positions_kind({"positions", call.positions}, q);
    const NamedTensor frequencies{"frequencies", call.frequencies};
    const NamedTensor factor{"attention_factor", call.attention_factor};
    const at::ScalarType dtype = frequencies.tensor.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, "frequencies must be float32 or float64, got ",
                     dtype);
    check_device(frequencies, q);
    check_device(factor, q);
    TORCH_CHECK_TYPE(factor.tensor.scalar_type() == dtype, "attention_factor must have the dtype of frequencies, ",
                     dtype, ", got ", factor.tensor.scalar_type());
    TORCH_CHECK_VALUE(frequencies.tensor.dim() == 2, "frequencies must be [key heads or 1, rotary_dim / 2], got a ",
                      "tensor of ", frequencies.tensor.dim(), " dimensions");
    TORCH_CHECK_VALUE(factor.tensor.dim() == 1, "attention_factor must be [key heads or 1], got a tensor of ",
                      factor.tensor.dim(), " dimensions");
}

// The number of tables, both parts of them with a row for each, contiguous, and memory for the packed tables.
struct LearnableTable {
    int64_t tables;
    Tensor frequencies;
    Tensor attention_factors;
    Tensor packed;

    explicit LearnableTable(const LearnableRotaryCall& call) {
        const int64_t rows = call.frequencies.size(0);
        const int64_t factors = call.attention_factor.size(0);
        const int64_t pairs = call.frequencies.size(1);
        tables = std::max(rows, factors);
        TORCH_CHECK_VALUE(rows >= 1 && pairs >= 1,
                          "frequencies must be [key heads or 1, rotary_dim / 2], and not empty, got ",
                          call.frequencies.sizes());
        TORCH_CHECK_VALUE(factors == rows || factors == 1 || (rows == 1 && factors > 0), "attention_factor must be [1]",
                          " or [", rows, "] for frequencies of ", call.frequencies.sizes(), ", got ",
                          call.attention_factor.sizes());
        frequencies = call.frequencies.expand({tables, pairs}).contiguous();
        attention_factors = call.attention_factor.expand({tables}).contiguous();
        packed = at::empty({tables, pairs + 1}, call.frequencies.options().dtype(at::kLong));
    }
};

// Checks sizes and strides, then fills the backends' struct. `table` must outlive the result. Without `out`, heads have
// no output.
LearnableRotaryArgs learnable_rotary_args(const LearnableRotaryCall& call, const LearnableTable& table,
                                          TensorList out) {
    const Layout layout = layout_named(call.layout);
    const NamedTensor q = call.head(0);
    LearnableRotaryArgs args;
    args.frequencies = table.frequencies.const_data_ptr();
    args.attention_factors = table.attention_factors.const_data_ptr();
    args.table_dtype = dtype_of({"frequencies", table.frequencies});
    args.packed_tables = static_cast<uint64_t*>(table.packed.data_ptr());
    RotaryArgs& rotary = args.rotary;
    if (call.heads.size() == 2) check_k_matches_q(call.heads[0], call.heads[1], layout);
    for (size_t i = 0; i < call.heads.size(); ++i) {
        const NamedTensor x = call.head(i);
        check_last_dimension(x, layout);
        HeadsView& view = i == 0 ? rotary.q : rotary.k;
        view.in = x.tensor.const_data_ptr();
        view.in_strides = head_strides(x.tensor, layout);
        view.heads = head_count(x, layout);
        TORCH_CHECK_VALUE(view.heads % table.tables == 0, x.name, " must have a multiple of ", table.tables,
                          " heads, the tables of frequencies and attention_factor, got ", view.heads);
        if (out.empty()) continue;
        view.out = out[i].data_ptr();
        view.out_strides = head_strides(out[i], layout);
    }
    const int64_t head_dim = q.tensor.size(-1);
    const int64_t rotary_dim = 2 * table.frequencies.size(1);
    TORCH_CHECK_VALUE(rotary_dim <= head_dim, "frequencies must have at most head_dim / 2 columns (", head_dim / 2,
                      "), half the last dimension of ", q.name, ", got ", rotary_dim / 2);
    rotary.positions = positions_view({"positions", call.positions}, q, layout);
    rotary.batch = layout.batch_of(q.tensor);
    rotary.tokens = q.tensor.size(layout.token);
    rotary.head_dim = static_cast<int>(head_dim);
    rotary.rotary_dim = static_cast<int>(rotary_dim);
    rotary.dtype = dtype_of(q);
    rotary.pairing = pairing_named(call.pairing);
    rotary.conjugate = call.conjugate;
    constexpr int64_t most = std::numeric_limits<int>::max();
    const int64_t heads = static_cast<int64_t>(rotary.q.heads) + rotary.k.heads;
    TORCH_CHECK_VALUE(heads * head_dim <= most, "q and k must have fewer than 2^31 components a token, got ",
                      heads * head_dim);
    TORCH_CHECK_VALUE(rotary.batch * rotary.tokens * heads < most,
                      "q and k must have fewer than 2^31 heads in all tokens, got ",
                      rotary.batch * rotary.tokens * heads);
    args.tables = static_cast<int>(std::min(table.tables, most));  // more than the heads only if there are none
    return args;
}

// The gradients of heads, if wanted, then those of frequencies and attention_factor.
struct LearnableRotaryBackward {
    static constexpr const char* name = "learnable_rotary_backward";
    using Call = LearnableRotaryBackwardCall;
    using Signature = std::vector<Tensor>(TensorList, TensorList, const Tensor&, const Tensor&, const Tensor&,
                                          std::string_view, std::string_view, bool, bool);

    static void each_input(const Call& call, const auto& visit) {
        for (size_t i = 0; i < call.gradients.size(); ++i) visit(call.gradient(i));
        call.forward.each_input(visit);
    }

    static std::vector<Tensor> differentiate(const Call&, const auto&) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            false, "learnable_rotary cannot be differentiated twice: the gradient of its frequencies has no gradient");
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

    template <class Backend>
    static std::vector<Tensor> run(const Call& call) {
        const LearnableRotaryCall& forward = call.forward;
        const Layout layout = layout_named(forward.layout);
        const LearnableTable table(forward);
        std::vector<Tensor> result;
        if (call.wants_heads) result = empty_like_heads(forward.heads);
        LearnableRotaryGradientArgs args;
        args.call = learnable_rotary_args(forward, table, result);
        for (size_t i = 0; i < call.gradients.size(); ++i) {
            const auto& [name, x] = call.gradient(i);
            const Tensor& heads = forward.heads[i];
            TORCH_CHECK_VALUE(x.sizes() == heads.sizes() && (x.numel() == 0 || x.stride(-1) == 1), name, " must be ",
                              heads.sizes(), " with a contiguous last dimension, got ", x.sizes(), " with strides ",
                              x.strides());
            (i == 0 ? args.q : args.k) = RotatedGradient{x.const_data_ptr(), head_strides(x, layout)};
        }
        const Tensor frequencies = at::empty_like(table.frequencies);
        const Tensor attention_factors = at::empty_like(table.attention_factors);
        const Tensor sums =
            at::empty({Backend::table_sum_rows(args, forward.heads[0]), table.tables, table.frequencies.size(1) + 1},
                      table.frequencies.options().dtype(at::kDouble));
        args.frequencies = frequencies.data_ptr();
        args.attention_factors = attention_factors.data_ptr();
        args.table_sums = static_cast<double*>(sums.data_ptr());
        Backend::run(args, forward.heads[0]);
        // A part with one row for all tables gets the sum of their gradients.
        const auto of_rows = [&](const Tensor& gradient, int64_t rows) {
            return rows == table.tables ? gradient : gradient.sum(0, /*keepdim=*/true);
        };
        result.push_back(of_rows(frequencies, forward.frequencies.size(0)));
        result.push_back(of_rows(attention_factors, forward.attention_factor.size(0)));
        return result;
    }

    static std::vector<Tensor> meta(const Call& call) {
        std::vector<Tensor> result;
        if (call.wants_heads) result = empty_like_heads(call.forward.heads);
        for (const Tensor* part : {&call.forward.frequencies, &call.forward.attention_factor}) {
            result.push_back(at::empty_symint(part->sym_sizes(), part->options()));
        }
        return result;
    }
};

// Saves q and k only where the table's gradient is wanted. Without it, the backward pass is the op itself, by the
// negated angle, and is differentiable again.
struct LearnableRotaryFunction : torch::autograd::Function<LearnableRotaryFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, TensorList heads,
                                       const Tensor& frequencies, const Tensor& attention_factor,
                                       const LearnableRotaryCall& call, const auto& below) {
        context->set_materialize_grads(false);
        std::vector<Tensor> saved{call.positions, frequencies, attention_factor};
        if (frequencies.requires_grad() || attention_factor.requires_grad()) {
            saved.insert(saved.end(), heads.begin(), heads.end());
        }
        context->save_for_backward(std::move(saved));
        context->saved_data["layout"] = call.layout;
        context->saved_data["pairing"] = call.pairing;
        context->saved_data["conjugate"] = call.conjugate;
        return below();
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const size_t count = gradients.size();
        std::vector<Tensor> result(count + 4);  // heads, frequencies, attention_factor, and none for call and below
        const auto saved = context->get_saved_variables();
        const bool wants_table = context->needs_input_grad(count) || context->needs_input_grad(count + 1);
        std::vector<size_t> wanted;
        std::vector<Tensor> given, heads;
        bool wants_heads = false;
        for (size_t i = 0; i < count; ++i) {
            if (!gradients[i].defined() || !(context->needs_input_grad(i) || wants_table)) continue;
            wanted.push_back(i);
            given.push_back(with_contiguous_last_dimension(gradients[i]));
            if (wants_table) heads.push_back(saved[3 + i]);
            wants_heads = wants_heads || context->needs_input_grad(i);
        }
        if (given.empty()) return result;
        auto& data = context->saved_data;
        const std::string_view layout = data["layout"].toStringRef();
        const std::string_view pairing = data["pairing"].toStringRef();
        const bool conjugate = data["conjugate"].toBool();
        std::vector<Tensor> found;
        if (wants_table) {
            found = dispatched<LearnableRotaryBackward>().call(given, heads, saved[0], saved[1], saved[2], layout,
                                                               pairing, conjugate, wants_heads);
            result[count + 1] = found.back();
            found.pop_back();
            result[count] = found.back();
            found.pop_back();
        } else {
            found = learnable_rotary(given, saved[0], saved[1], saved[2], layout, pairing, !conjugate);
        }
        for (size_t i = 0; i < found.size(); ++i) result[wanted[i]] = found[i];
        return result;
    }
};

struct LearnableRotary {
    static constexpr const char* name = "learnable_rotary";
    using Call = LearnableRotaryCall;
    using Signature = std::vector<Tensor>(TensorList, const Tensor&, const Tensor&, const Tensor&, std::string_view,
                                          std::string_view, bool);

    static void check(const Call& call) { check_kinds(call); }
    static void each_input(const Call& call, const auto& visit) { call.each_input(visit); }

    template <class Backend>
    static std::vector<Tensor> run(const Call& call) {
        const LearnableTable table(call);
        std::vector<Tensor> out = empty_like_heads(call.heads);
        Backend::run(learnable_rotary_args(call, table, out), call.heads[0]);
        return out;
    }

    static std::vector<Tensor> meta(const Call& call) { return empty_like_heads(call.heads); }

    static std::vector<Tensor> differentiate(const Call& call, const auto& below) {
        return LearnableRotaryFunction::apply(call.heads, call.frequencies, call.attention_factor, call, below);
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string options =
        "Tensor positions, Tensor frequencies, Tensor attention_factor, str layout='bhsd', str pairing='halves', "
        "bool conjugate=False";
    register_op<LearnableRotary>(library, "(Tensor[] heads, " + options + ") -> Tensor[]");
    register_op<LearnableRotaryBackward>(
        library, "(Tensor[] gradients, Tensor[] heads, " + options + ", bool wants_heads=True) -> Tensor[]");
}

std::vector<Tensor> learnable_rotary(TensorList heads, const Tensor& positions, const Tensor& frequencies,
                                     const Tensor& attention_factor, std::string_view layout, std::string_view pairing,
                                     bool conjugate) {
    return dispatched<LearnableRotary>().call(heads, positions, frequencies, attention_factor, layout, pairing,
                                              conjugate);
}

}  // namespace mrrope
