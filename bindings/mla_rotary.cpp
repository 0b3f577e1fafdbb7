#include <ATen/Functions.h>

#include <limits>
#include <tuple>

#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"
#include "rotary_args.h"
#include "token_rows.h"

namespace mrrope {
namespace {

using at::Tensor;
using TwoTensors = std::tuple<Tensor, Tensor>;

struct MlaRotaryCall {
    const Tensor& q;
    const Tensor& k_nope;
    const Tensor& k_rope;
    const Tensor& positions;
    const Tensor& table;
    std::string_view layout;
    std::string_view pairing;
    bool conjugate;
    const OptionalTensor& table_index;

    RotaryCall rotary() const { return {q, positions, table, layout, pairing, conjugate, table_index}; }
    NamedTensor named_q() const { return {"q", q}; }
    NamedTensor named_k_nope() const { return {"k_nope", k_nope}; }
    NamedTensor named_k_rope() const { return {"k_rope", k_rope}; }
};

// The gradients of mla_rotary's results, and its other arguments.
struct MlaRotaryBackwardCall {
    const Tensor& q_gradient;
    const Tensor& key_gradient;
    const Tensor& positions;
    const Tensor& table;
    std::string_view layout;
    std::string_view pairing;
    bool conjugate;
    const OptionalTensor& table_index;

    // The gradient is the rotation by the negated angle.
    RotaryCall rotary() const {
        return {q_gradient, positions, table, layout, pairing, !conjugate, table_index, "q_gradient"};
    }
    NamedTensor named_q() const { return {"q_gradient", q_gradient}; }
    NamedTensor named_key() const { return {"key_gradient", key_gradient}; }
};

void check_positions_have_one_row(const Tensor& positions) {
    TORCH_CHECK_VALUE(positions.dim() < 3, "positions must be one a token, got ", positions.dim(), " dimensions");
}

// [nope | rope] heads of the key, contiguous as those of a concatenation.
Tensor empty_key(const Tensor& k_nope, const Tensor& k_rope) {
    c10::SymDimVector sizes(k_nope.sym_sizes());
    sizes.back() = sizes.back() + k_rope.sym_size(-1);
    return at::empty_symint(sizes, k_nope.options());
}

void check_components(int64_t q_heads, int64_t k_heads, int64_t head_dim) {
    TORCH_CHECK_VALUE((q_heads + k_heads) * head_dim <= std::numeric_limits<int>::max(),
                      "q and the key must have fewer than 2^31 components a token, got ",
                      (q_heads + k_heads) * head_dim);
}

// Moves the rotation behind the leading part of q's heads, and returns that part.
CopiedPart split_queries(RotaryArgs& args) {
    const CopiedPart nope{.view = args.q, .dim = args.head_dim - args.rotary_dim};
    args.q = behind(args.q, nope.dim, args.dtype);
    args.head_dim = args.rotary_dim;
    return nope;
}

// The rope part of the key's heads is read from a row, or added up to one: its heads are all at one place.
HeadStrides shared_by_heads(const Tensor& rows, const Layout& layout) {
    HeadStrides strides = head_strides(rows, row_layout(rows, layout));
    strides.head = 0;
    return strides;
}

MlaRotaryArgs mla_rotary_args(const MlaRotaryCall& call, const Tensor& q_out, const Tensor& key) {
    const Layout layout = layout_named(call.layout);
    check_one_table_for_all_heads(call.table);
    MlaRotaryArgs args;
    args.rotary = rotary_args(call.rotary(), q_out);
    RotaryArgs& rotary = args.rotary;
    check_row_sizes(call.named_k_rope(), call.named_q(), layout);
    const int64_t rope_dim = call.k_rope.size(-1);
    TORCH_CHECK_VALUE(rope_dim == rotary.rotary_dim, "k_rope must have table.rotary_dim (", rotary.rotary_dim,
                      ") components, got ", call.k_rope.sizes());
    const int64_t nope_dim = rotary.head_dim - rope_dim;
    const Tensor& k_nope = call.k_nope;
    TORCH_CHECK_VALUE(layout.batch_of(k_nope) == rotary.batch && k_nope.size(layout.token) == rotary.tokens &&
                          k_nope.size(-1) == nope_dim,
                      "k_nope must be ", layout.shape, " with the sequences and tokens of q of ", call.q.sizes(),
                      " and its ", nope_dim, " components before the rope part, got ", k_nope.sizes());
    check_last_dimension(call.named_k_nope(), layout);
    args.k_nope = {.view = heads_view(call.named_k_nope(), key, layout, layout), .dim = static_cast<int>(nope_dim)};
    check_components(rotary.q.heads, args.k_nope.view.heads, rotary.head_dim);
    args.q_nope = split_queries(rotary);
    rotary.k = behind(args.k_nope.view, nope_dim, rotary.dtype);
    rotary.k.in = call.k_rope.const_data_ptr();
    rotary.k.in_strides = shared_by_heads(call.k_rope, layout);
    return args;
}

TwoTensors mla_rotary_conjugate(const Tensor& q, const Tensor& k_nope, const Tensor& k_rope, const Tensor& positions,
                                const Tensor& table, std::string_view layout, std::string_view pairing, bool conjugate,
                                const OptionalTensor& table_index);

// What both autograd functions save.
void save(torch::autograd::AutogradContext* context, const auto& call) {
    context->save_for_backward({call.positions, call.table, call.table_index.value_or(Tensor())});
    context->saved_data["layout"] = call.layout;
    context->saved_data["pairing"] = call.pairing;
    context->saved_data["conjugate"] = call.conjugate;
}

// Calls f with what `save` saved, in the order of the schemas.
auto with_saved(torch::autograd::AutogradContext* context, const auto& f) {
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    return f(saved[0], saved[1], data["layout"].toStringRef(), data["pairing"].toStringRef(),
             data["conjugate"].toBool(), saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt);
}

// The gradient of the gradient is the op itself, of k_nope = 0: k_nope's gradient is not among the results.
struct MlaRotaryBackwardFunction : torch::autograd::Function<MlaRotaryBackwardFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, const Tensor&,
                                       const Tensor& key_gradient, const MlaRotaryBackwardCall& call,
                                       const auto& below) {
        save(context, call);
        c10::SymDimVector k_nope_sizes(key_gradient.sym_sizes());
        k_nope_sizes.back() = k_nope_sizes.back() - 2 * (call.table.sym_size(-1) - 1);
        context->saved_data["k_nope_sizes"] =
            c10::IValue(std::vector<c10::SymInt>(k_nope_sizes.begin(), k_nope_sizes.end()));
        const auto [q, k_rope] = below();
        return {q, k_rope};
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const auto sizes = context->saved_data["k_nope_sizes"].toSymIntVector();
        const Tensor q = with_contiguous_last_dimension(gradients[0]);
        const Tensor k_rope = with_contiguous_last_dimension(gradients[1]);
        const auto [q_gradient, key_gradient] = with_saved(context, [&](const auto&... options) {
            return mla_rotary_conjugate(q, at::zeros_symint(sizes, q.options()), k_rope, options...);
        });
        return {q_gradient, key_gradient, Tensor(), Tensor()};
    }
};

// Returns the gradients of q and of k_rope, the latter without a dimension of heads.
struct MlaRotaryBackward {
    static constexpr const char* name = "mla_rotary_backward";
    using Call = MlaRotaryBackwardCall;
    using Signature = TwoTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::string_view,
                                 std::string_view, bool, const OptionalTensor&);

    static void check(const Call& call) {
        check_kinds(call.rotary());
        check_positions_have_one_row(call.positions);
        check_rank(call.named_key(), layout_named(call.layout));
        check_like(call.named_key(), call.named_q());
    }

    static void each_input(const Call& call, const auto& visit) {
        visit(call.named_q());
        visit(call.named_key());
    }

    static TwoTensors meta(const Call& call) {
        const Layout layout = layout_named(call.layout);
        c10::SymDimVector sizes;
        if (layout.batch >= 0) sizes.push_back(call.key_gradient.sym_size(layout.batch));
        sizes.push_back(call.key_gradient.sym_size(layout.token));
        sizes.push_back(2 * (call.table.sym_size(-1) - 1));
        return {empty_like_heads(call.q_gradient)[0], at::empty_symint(sizes, call.key_gradient.options())};
    }

    template <class Backend>
    static TwoTensors run(const Call& call) {
        const Layout layout = layout_named(call.layout);
        check_table_shape(call.table);  // the sizes of the results follow from it
        check_one_table_for_all_heads(call.table);
        auto [q, k_rope] = meta(call);
        MlaRotaryGradientArgs args;
        args.rotary = rotary_args(call.rotary(), q);
        RotaryArgs& rotary = args.rotary;
        const Tensor& key = call.key_gradient;
        TORCH_CHECK_VALUE(layout.batch_of(key) == rotary.batch && key.size(layout.token) == rotary.tokens &&
                              key.size(-1) == rotary.head_dim,
                          "key_gradient must be ", layout.shape, " and differ from q_gradient of ",
                          call.q_gradient.sizes(), " in the number of heads only, got ", key.sizes());
        check_last_dimension(call.named_key(), layout);
        rotary.k = {.in = static_cast<const char*>(key.const_data_ptr()) +
                          (rotary.head_dim - rotary.rotary_dim) * size_of(rotary.dtype),
                    .out = k_rope.data_ptr(),
                    .heads = head_count(call.named_key(), layout),
                    .in_strides = head_strides(key, layout),
                    .out_strides = shared_by_heads(k_rope, layout)};
        check_components(rotary.q.heads, rotary.k.heads, rotary.head_dim);
        args.q_nope = split_queries(rotary);
        if (rotary.k.heads == 0) k_rope.zero_();
        Backend::run(args, call.q_gradient);
        return {q, k_rope};
    }

    static TwoTensors differentiate(const Call& call, const auto& below) {
        const auto results = MlaRotaryBackwardFunction::apply(call.q_gradient, call.key_gradient, call, below);
        return {results[0], results[1]};
    }
};

// Saves neither q nor the key. k_nope's gradient is a view of the key's.
struct MlaRotaryFunction : torch::autograd::Function<MlaRotaryFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, const Tensor&, const Tensor& k_nope,
                                       const Tensor& k_rope, const MlaRotaryCall& call, const auto& below) {
        save(context, call);
        context->saved_data["nope_dim"] = k_nope.sym_size(-1);
        context->saved_data["head"] = row_layout(k_rope, layout_named(call.layout)).head;
        const auto [q, key] = below();
        return {q, key};
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const Tensor q = with_contiguous_last_dimension(gradients[0]);
        const Tensor key = with_contiguous_last_dimension(gradients[1]);
        auto [q_gradient, k_rope_gradient] = with_saved(
            context, [&](const auto&... options) { return dispatched<MlaRotaryBackward>().call(q, key, options...); });
        const int64_t head = context->saved_data["head"].toInt();
        if (head >= 0) k_rope_gradient = k_rope_gradient.unsqueeze(head);
        return {q_gradient, key.narrow_symint(-1, 0, context->saved_data["nope_dim"].toSymInt()), k_rope_gradient,
                Tensor(), Tensor()};
    }
};

struct MlaRotary {
    static constexpr const char* name = "mla_rotary";
    using Call = MlaRotaryCall;
    using Signature = TwoTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                 std::string_view, std::string_view, bool, const OptionalTensor&);

    static void check(const Call& call) {
        const Layout layout = layout_named(call.layout);
        check_kinds(call.rotary());
        check_positions_have_one_row(call.positions);
        check_rank(call.named_k_nope(), layout);
        check_like(call.named_k_nope(), call.named_q());
        check_row_kind(call.named_k_rope(), HeadDimension::allowed, call.named_q(), layout);
    }

    static void each_input(const Call& call, const auto& visit) {
        visit(call.named_q());
        visit(call.named_k_nope());
        visit(call.named_k_rope());
    }

    static TwoTensors meta(const Call& call) {
        return {empty_like_heads(call.q)[0], empty_key(call.k_nope, call.k_rope)};
    }

    template <class Backend>
    static TwoTensors run(const Call& call) {
        const auto [q, key] = meta(call);
        Backend::run(mla_rotary_args(call, q, key), call.q);
        return {q, key};
    }

    static TwoTensors differentiate(const Call& call, const auto& below) {
        const auto results = MlaRotaryFunction::apply(call.q, call.k_nope, call.k_rope, call, below);
        return {results[0], results[1]};
    }
};

TwoTensors mla_rotary_conjugate(const Tensor& q, const Tensor& k_nope, const Tensor& k_rope, const Tensor& positions,
                                const Tensor& table, std::string_view layout, std::string_view pairing, bool conjugate,
                                const OptionalTensor& table_index) {
    return dispatched<MlaRotary>().call(q, k_nope, k_rope, positions, table, layout, pairing, conjugate, table_index);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string options =
        "Tensor positions, Tensor table, str layout='bhsd', str pairing='interleaved', bool conjugate=False, "
        "Tensor? table_index=None) -> (Tensor, Tensor)";
    register_op<MlaRotary>(library, "(Tensor q, Tensor k_nope, Tensor k_rope, " + options);
    register_op<MlaRotaryBackward>(library, "(Tensor q_gradient, Tensor key_gradient, " + options);
}

std::tuple<Tensor, Tensor> mla_rotary(const Tensor& q, const Tensor& k_nope, const Tensor& k_rope,
                                      const Tensor& positions, const Tensor& table, const MlaRotaryOptions& options) {
    return mla_rotary_conjugate(q, k_nope, k_rope, positions, table, name_of(options.layout), name_of(options.pairing),
                                /*conjugate=*/false, options.table_index);
}

}  // namespace mrrope
