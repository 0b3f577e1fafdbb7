#include <ATen/Functions.h>

#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"
#include "rotary_args.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

// The gradient is the rotation by the negated angle: the same op, so it is differentiable again and saves neither q
// nor k.
struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, TensorList, const RotaryCall& call,
                                       const auto& below) {
        context->set_materialize_grads(false);
        context->save_for_backward({call.positions, call.table, call.table_index.value_or(Tensor())});
        context->saved_data["layout"] = call.layout;
        context->saved_data["pairing"] = call.pairing;
        context->saved_data["conjugate"] = call.conjugate;
        return below();
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        const auto saved = context->get_saved_variables();
        auto& data = context->saved_data;
        return backward_by_rotation(context, gradients, [&](TensorList heads, bool are_of_k_alone) {
            return rotary(heads, saved[0], are_of_k_alone ? without_query_factors(saved[1]) : saved[1],
                          {.layout = heads_layout_named(data["layout"].toStringRef()),
                           .pairing = pairing_named(data["pairing"].toStringRef()),
                           .conjugate = !data["conjugate"].toBool(),
                           .table_index = saved[2].defined() ? OptionalTensor(saved[2]) : std::nullopt});
        });
    }
};

template <class Result>
struct RotaryTraits {
    using Call = RotaryCall;
    using Signature = Result(TensorList, const Tensor&, const Tensor&, std::string_view, std::string_view, bool,
                             const OptionalTensor&);

    static void check(const RotaryCall& call) { check_kinds(call); }
    static void each_input(const RotaryCall& call, const auto& visit) { call.each_head(visit); }
};

struct Rotary : RotaryTraits<std::vector<Tensor>> {
    static constexpr const char* name = "rotary";

    template <class Backend>
    static std::vector<Tensor> run(const RotaryCall& call) {
        std::vector<Tensor> out = empty_like_heads(call.heads);
        Backend::run(rotary_args(call, out), call.heads[0]);
        return out;
    }

    static std::vector<Tensor> meta(const RotaryCall& call) { return empty_like_heads(call.heads); }

    static std::vector<Tensor> differentiate(const RotaryCall& call, const auto& below) {
        return RotaryFunction::apply(call.heads, call, below);
    }
};

struct RotaryInPlace : RotaryTraits<void> {
    static constexpr const char* name = "rotary_";
    static constexpr const char* written = "rotated in place";

    static void each_written(const RotaryCall& call, const auto& visit) { call.each_head(visit); }

    template <class Backend>
    static void run(const RotaryCall& call) {
        Backend::run(rotary_args(call, call.heads), call.heads[0]);
    }

    // Rotates out of place and copies: copy_ updates the history of the tensor and of its views.
    static void differentiate(const RotaryCall& call, const auto&) {
        const c10::DispatchKeySet traced({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
        bool has_memory = true;
        call.each_head([&](NamedTensor x) {
            const at::TensorBase& owner = x.tensor.is_view() ? x.tensor._base() : x.tensor;
            TORCH_CHECK(
                !(owner.is_leaf() && owner.requires_grad()), x.name, " is a ", x.tensor.is_view() ? "view of a " : "",
                "leaf tensor that requires grad and cannot be rotated in place: use rotary, or torch.no_grad()");
            has_memory = has_memory && !x.tensor.key_set().has_any(traced);
        });
        // Fake and functionalized tensors have no data pointers, which check_writable compares.
        if (has_memory) check_writable(call);
        const std::vector<Tensor> rotated = rotary(call.heads, call.positions, call.table,
                                                   {.layout = heads_layout_named(call.layout),
                                                    .pairing = pairing_named(call.pairing),
                                                    .conjugate = call.conjugate,
                                                    .table_index = call.table_index});
        for (size_t i = 0; i < rotated.size(); ++i) call.heads[i].copy_(rotated[i]);
    }
};

}  // namespace

TORCH_LIBRARY(mrrope, library) {
    const std::string options =
        "Tensor positions, Tensor table, str layout='bhsd', str pairing='halves', bool conjugate=False, "
        "Tensor? table_index=None";
    register_op<Rotary>(library, "(Tensor[] heads, " + options + ") -> Tensor[]");
    register_op<RotaryInPlace>(library, "(Tensor(a!)[] heads, " + options + ") -> ()");
}

Tensor packed_tensor(const FrequencyTable& table, at::Device device) {
    const std::vector<uint64_t> words = packed(table);
    const Tensor host = at::empty({static_cast<int64_t>(words.size())}, at::kLong);
    std::copy(words.begin(), words.end(), static_cast<uint64_t*>(host.data_ptr()));
    return host.to(device);
}

std::vector<Tensor> rotary(TensorList heads, const Tensor& positions, const Tensor& table,
                           const RotaryOptions& options) {
    return dispatched<Rotary>().call(heads, positions, table, name_of(options.layout), name_of(options.pairing),
                                     options.conjugate, options.table_index);
}

void rotary_(TensorList heads, const Tensor& positions, const Tensor& table, const RotaryOptions& options) {
    dispatched<RotaryInPlace>().call(heads, positions, table, name_of(options.layout), name_of(options.pairing),
                                     options.conjugate, options.table_index);
}

}  // namespace mrrope
