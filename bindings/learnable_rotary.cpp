#include <ATen/Functions.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "mrrope/torch_ops.h"
#include "option_names.h"
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
    const Tensor& packed_tables;
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

// The sizes of the tables: one of frequencies and attention_factor may have a single row for all.
struct TableSizes {
    int64_t tables;
    int64_t pairs;

    explicit TableSizes(const LearnableRotaryCall& call) {
        const int64_t rows = call.frequencies.size(0);
        const int64_t factors = call.attention_factor.size(0);
        tables = std::max(rows, factors);
        pairs = call.frequencies.size(1);
        TORCH_CHECK_VALUE(rows >= 1 && pairs >= 1,
                          "frequencies must be [key heads or 1, rotary_dim / 2], and not empty, got ",
                          call.frequencies.sizes());
        TORCH_CHECK_VALUE(factors == rows || factors == 1 || (rows == 1 && factors > 0), "attention_factor must be [1]",
                          " or [", rows, "] for frequencies of ", call.frequencies.sizes(), ", got ",
                          call.attention_factor.sizes());
    }
};

// Checks sizes and strides, then fills the backends' struct, without the table itself. Without `out`, heads have no
// output.
LearnableRotaryArgs learnable_rotary_args(const LearnableRotaryCall& call, const TableSizes& sizes, TensorList out) {
    const Layout layout = layout_named(call.layout);
    const NamedTensor q = call.head(0);
    LearnableRotaryArgs args;
    args.table_dtype = dtype_of({"frequencies", call.frequencies});
    RotaryArgs& rotary = args.rotary;
    if (call.heads.size() == 2) check_k_matches_q(call.heads[0], call.heads[1], layout);
    for (size_t i = 0; i < call.heads.size(); ++i) {
        const NamedTensor x = call.head(i);
        check_last_dimension(x, layout);
        HeadsView& view = i == 0 ? rotary.q : rotary.k;
        view.in = x.tensor.const_data_ptr();
        view.in_strides = head_strides(x.tensor, layout);
        view.heads = head_count(x, layout);
        TORCH_CHECK_VALUE(view.heads % sizes.tables == 0, x.name, " must have a multiple of ", sizes.tables,
                          " heads, the tables of frequencies and attention_factor, got ", view.heads);
        if (out.empty()) continue;
        view.out = out[i].data_ptr();
        view.out_strides = head_strides(out[i], layout);
    }
    const int64_t head_dim = head_dim_of(q);
    const int64_t rotary_dim = 2 * sizes.pairs;
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
    args.tables = static_cast<int>(std::min(sizes.tables, most));  // more than the heads only if there are none
    return args;
}

// The gradients of heads, if wanted, then those of frequencies and attention_factor.
struct LearnableRotaryBackward {
    static constexpr const char* name = "learnable_rotary_backward";
    using Call = LearnableRotaryBackwardCall;
    using Signature = std::vector<Tensor>(TensorList, const Tensor&, TensorList, const Tensor&, const Tensor&,
                                          const Tensor&, std::string_view, std::string_view, bool, bool);

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
        const NamedTensor packed{"packed_tables", call.packed_tables};
        TORCH_CHECK_TYPE(packed.tensor.scalar_type() == at::kLong, "packed_tables must be int64, got ",
                         packed.tensor.scalar_type());
        check_device(packed, call.forward.head(0));
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
        const TableSizes sizes(forward);
        const Tensor& packed = call.packed_tables;
        TORCH_CHECK_VALUE(packed.is_contiguous() && packed.sizes() == at::IntArrayRef({sizes.tables, sizes.pairs + 1}),
                          "packed_tables must be contiguous and [", sizes.tables, ", ", sizes.pairs + 1,
                          "], those of the forward pass, got ", packed.sizes(), " with strides ", packed.strides());
        std::vector<Tensor> result;
        if (call.wants_heads) result = empty_like_heads(forward.heads);
        LearnableRotaryGradientArgs args;
        args.call = learnable_rotary_args(forward, sizes, result);
        args.call.packed_tables = static_cast<uint64_t*>(packed.data_ptr());
        for (size_t i = 0; i < call.gradients.size(); ++i) {
            const auto& [name, x] = call.gradient(i);
            const Tensor& heads = forward.heads[i];
            TORCH_CHECK_VALUE(x.sizes() == heads.sizes() && (x.numel() == 0 || x.stride(-1) == 1), name, " must be ",
                              heads.sizes(), " with a contiguous last dimension, got ", x.sizes(), " with strides ",
                              x.strides());
            (i == 0 ? args.q : args.k) = RotatedGradient{x.const_data_ptr(), head_strides(x, layout)};
        }
        const at::TensorOptions options = forward.frequencies.options();
        const Tensor frequencies = at::empty({sizes.tables, sizes.pairs}, options);
        const Tensor attention_factors = at::empty({sizes.tables}, options);
        const Tensor sums = at::empty({Backend::table_sum_rows(args, forward.heads[0]), sizes.tables, sizes.pairs + 1},
                                      options.dtype(at::kDouble));
        args.frequencies = frequencies.data_ptr();
        args.attention_factors = attention_factors.data_ptr();
        args.table_sums = static_cast<double*>(sums.data_ptr());
        Backend::run(args, forward.heads[0]);
        // A part with one row for all tables gets the sum of their gradients.
        const auto of_rows = [&](const Tensor& gradient, int64_t rows) {
            return rows == sizes.tables ? gradient : gradient.sum(0, /*keepdim=*/true);
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

// Saves q, k and the packed tables only where the table's gradient is wanted. Without it, the backward pass is the op
// itself, by the negated angle, and is differentiable again.
struct LearnableRotaryFunction : torch::autograd::Function<LearnableRotaryFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, TensorList heads,
                                       const Tensor& frequencies, const Tensor& attention_factor,
                                       const LearnableRotaryCall& call, const auto& below) {
        context->set_materialize_grads(false);
        std::vector<Tensor> results = below();
        std::vector<Tensor> saved{call.positions, frequencies, attention_factor};
        if (frequencies.requires_grad() || attention_factor.requires_grad()) {
            saved.push_back(results.back());
            saved.insert(saved.end(), heads.begin(), heads.end());
        }
        context->save_for_backward(std::move(saved));
        context->saved_data["layout"] = call.layout;
        context->saved_data["pairing"] = call.pairing;
        context->saved_data["conjugate"] = call.conjugate;
        return results;
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const size_t count = gradients.size() - 1;  // the packed tables have none
        std::vector<Tensor> result(count + 4);      // heads, frequencies, attention_factor, and none for call and below
        const auto saved = context->get_saved_variables();
        const bool wants_table = context->needs_input_grad(count) || context->needs_input_grad(count + 1);
        std::vector<size_t> wanted;
        std::vector<Tensor> given, heads;
        bool wants_heads = false;
        for (size_t i = 0; i < count; ++i) {
            if (!gradients[i].defined() || !(context->needs_input_grad(i) || wants_table)) continue;
            wanted.push_back(i);
            given.push_back(with_contiguous_last_dimension(gradients[i]));
            if (wants_table) heads.push_back(saved[4 + i]);
            wants_heads = wants_heads || context->needs_input_grad(i);
        }
        if (given.empty()) return result;
        auto& data = context->saved_data;
        const std::string_view layout = data["layout"].toStringRef();
        const std::string_view pairing = data["pairing"].toStringRef();
        const bool conjugate = data["conjugate"].toBool();
        std::vector<Tensor> found;
        if (wants_table) {
            found = dispatched<LearnableRotaryBackward>().call(given, saved[3], heads, saved[0], saved[1], saved[2],
                                                               layout, pairing, conjugate, wants_heads);
            result[count + 1] = found.back();
            found.pop_back();
            result[count] = found.back();
            found.pop_back();
        } else {
            found = learnable_rotary(
                given, saved[0], saved[1], saved[2],
                {.layout = heads_layout_named(layout), .pairing = pairing_named(pairing), .conjugate = !conjugate});
        }
        for (size_t i = 0; i < found.size(); ++i) result[wanted[i]] = found[i];
        return result;
    }
};

// The rotated heads, then the packed tables, for the backward pass.
struct LearnableRotary {
    static constexpr const char* name = "learnable_rotary";
    using Call = LearnableRotaryCall;
    using Signature = std::vector<Tensor>(TensorList, const Tensor&, const Tensor&, const Tensor&, std::string_view,
                                          std::string_view, bool);

    static void check(const Call& call) { check_kinds(call); }
    static void each_input(const Call& call, const auto& visit) { call.each_input(visit); }

    template <class Backend>
    static std::vector<Tensor> run(const Call& call) {
        const TableSizes sizes(call);
        const Tensor frequencies = call.frequencies.expand({sizes.tables, sizes.pairs}).contiguous();
        const Tensor attention_factors = call.attention_factor.expand({sizes.tables}).contiguous();
        const Tensor packed = at::empty({sizes.tables, sizes.pairs + 1}, packed_options(call));
        std::vector<Tensor> result = empty_like_heads(call.heads);
        LearnableRotaryArgs args = learnable_rotary_args(call, sizes, result);
        args.frequencies = frequencies.const_data_ptr();
        args.attention_factors = attention_factors.const_data_ptr();
        args.packed_tables = static_cast<uint64_t*>(packed.data_ptr());
        Backend::run(args, call.heads[0]);
        result.push_back(packed);
        return result;
    }

    static std::vector<Tensor> meta(const Call& call) {
        const c10::SymInt tables = call.frequencies.sym_size(0).max(call.attention_factor.sym_size(0));
        std::vector<Tensor> result = empty_like_heads(call.heads);
        result.push_back(at::empty_symint({tables, call.frequencies.sym_size(1) + 1}, packed_options(call)));
        return result;
    }

    static std::vector<Tensor> differentiate(const Call& call, const auto& below) {
        return LearnableRotaryFunction::apply(call.heads, call.frequencies, call.attention_factor, call, below);
    }

private:
    static at::TensorOptions packed_options(const Call& call) { return call.frequencies.options().dtype(at::kLong); }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string options =
        "Tensor positions, Tensor frequencies, Tensor attention_factor, str layout='bhsd', str pairing='halves', "
        "bool conjugate=False";
    register_op<LearnableRotary>(library, "(Tensor[] heads, " + options + ") -> Tensor[]");
    register_op<LearnableRotaryBackward>(library, "(Tensor[] gradients, Tensor packed_tables, Tensor[] heads, " +
                                                      options + ", bool wants_heads=True) -> Tensor[]");
}

std::vector<Tensor> learnable_rotary(TensorList heads, const Tensor& positions, const Tensor& frequencies,
                                     const Tensor& attention_factor, const LearnableRotaryOptions& options) {
    std::vector<Tensor> result =
        dispatched<LearnableRotary>().call(heads, positions, frequencies, attention_factor, name_of(options.layout),
                                           name_of(options.pairing), options.conjugate);
    result.pop_back();
    return result;
}

}  // namespace mrrope
