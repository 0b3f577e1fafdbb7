#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/autograd.h>
#include <torch/library.h>

#include <string>

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

using RotarySignature = std::vector<Tensor>(TensorList, const Tensor&, const Tensor&, c10::string_view,
                                            c10::string_view, bool, const Index&);
using RotaryInPlaceSignature = void(TensorList, const Tensor&, const Tensor&, c10::string_view, c10::string_view, bool,
                                    const Index&);

const auto& rotary_op() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("mrrope::rotary", "").typed<RotarySignature>();
    return op;
}

const auto& rotary_in_place_op() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("mrrope::rotary_", "").typed<RotaryInPlaceSignature>();
    return op;
}

// --- backends
// ----------------------------------------------------------------------------------------------------------

template <class Backend>
std::vector<Tensor> rotary_on(TensorList heads, const Tensor& positions, const Tensor& table, c10::string_view layout,
                              c10::string_view pairing, bool conjugate, const Index& table_index) {
    check_kinds(heads, {positions, table, layout, pairing, conjugate, table_index});
    std::vector<Tensor> out = like(heads);
    Backend::run(rotary_args(heads, out, {positions, table, layout, pairing, conjugate, table_index}), heads[0]);
    return out;
}

template <class Backend>
void rotary_in_place_on(TensorList heads, const Tensor& positions, const Tensor& table, c10::string_view layout,
                        c10::string_view pairing, bool conjugate, const Index& table_index) {
    Backend::run(rotary_args(heads, heads, {positions, table, layout, pairing, conjugate, table_index}), heads[0]);
}

std::vector<Tensor> rotary_meta(TensorList heads, const Tensor& positions, const Tensor& table, c10::string_view layout,
                                c10::string_view pairing, bool conjugate, const Index& table_index) {
    check_kinds(heads, {positions, table, layout, pairing, conjugate, table_index});
    return like(heads);
}

void rotary_in_place_meta(TensorList heads, const Tensor& positions, const Tensor& table, c10::string_view layout,
                          c10::string_view pairing, bool conjugate, const Index& table_index) {
    check_kinds(heads, {positions, table, layout, pairing, conjugate, table_index});
}

// --- autograd
// ----------------------------------------------------------------------------------------------------------

// The gradient is the rotation by the negated angle: the same op again, which makes it differentiable in turn. Neither
// q nor k is kept for it.
struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
    static constexpr bool is_traceable = true;

    static std::vector<Tensor> forward(torch::autograd::AutogradContext* context, const Tensor& q,
                                       const std::optional<Tensor>& k, const Tensor& positions, const Tensor& table,
                                       const std::string& layout, const std::string& pairing, bool conjugate,
                                       const Index& table_index) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        context->set_materialize_grads(false);
        context->save_for_backward({positions, table, table_index.value_or(Tensor())});
        context->saved_data["layout"] = layout;
        context->saved_data["pairing"] = pairing;
        context->saved_data["conjugate"] = conjugate;
        std::vector<Tensor> heads{q};
        if (k) heads.push_back(*k);
        return rotary_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        constexpr size_t inputs = 8;
        std::vector<Tensor> result(inputs);
        std::vector<size_t> wanted;
        std::vector<Tensor> heads;
        for (size_t i = 0; i < gradients.size(); ++i) {
            if (!gradients[i].defined() || !context->needs_input_grad(i)) continue;
            wanted.push_back(i);
            heads.push_back(with_contiguous_last_dimension(gradients[i]));
        }
        if (heads.empty()) return result;
        const auto saved = context->get_saved_variables();
        const std::vector<Tensor> turned_back =
            rotary_op().call(heads, saved[0], saved[1], context->saved_data["layout"].toStringRef(),
                             context->saved_data["pairing"].toStringRef(), !context->saved_data["conjugate"].toBool(),
                             saved[2].defined() ? Index(saved[2]) : std::nullopt);
        for (size_t i = 0; i < wanted.size(); ++i) result[wanted[i]] = turned_back[i];
        return result;
    }
};

std::vector<Tensor> rotary_autograd(TensorList heads, const Tensor& positions, const Tensor& table,
                                    c10::string_view layout, c10::string_view pairing, bool conjugate,
                                    const Index& table_index) {
    if (!needs_gradient(heads)) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return rotary_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
    }
    check_kinds(heads, {positions, table, layout, pairing, conjugate, table_index});
    const std::optional<Tensor> k = heads.size() == 2 ? std::optional<Tensor>(heads[1]) : std::nullopt;
    return RotaryFunction::apply(heads[0], k, positions, table, std::string(layout), std::string(pairing), conjugate,
                                 table_index);
}

void rotary_in_place_autograd(TensorList heads, const Tensor& positions, const Tensor& table, c10::string_view layout,
                              c10::string_view pairing, bool conjugate, const Index& table_index) {
    if (!needs_gradient(heads)) {
        const at::AutoDispatchBelowAutograd below_autograd;
        return rotary_in_place_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
    }
    check_kinds(heads, {positions, table, layout, pairing, conjugate, table_index});
    const c10::DispatchKeySet traced({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
    bool has_memory = true;
    for (size_t i = 0; i < heads.size(); ++i) {
        const at::TensorBase& x = heads[i];
        const at::TensorBase& owner = x.is_view() ? x._base() : x;
        TORCH_CHECK(!(owner.is_leaf() && owner.requires_grad()), head_name(i), " is a ",
                    x.is_view() ? "view of a " : "",
                    "leaf tensor that requires grad and cannot be rotated in place: use rotary, or torch.no_grad()");
        has_memory = has_memory && !x.key_set().has_any(traced);
    }
    if (has_memory) check_writable(heads, layout);
    // Autograd knows what copying over a tensor means for its views and its history.
    const std::vector<Tensor> turned =
        rotary_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
    for (size_t i = 0; i < heads.size(); ++i) heads[i].copy_(turned[i]);
}

void rotary_in_place_versioned(TensorList heads, const Tensor& positions, const Tensor& table, c10::string_view layout,
                               c10::string_view pairing, bool conjugate, const Index& table_index) {
    for (size_t i = 0; i < heads.size(); ++i) {
        TORCH_CHECK(!heads[i].is_inference() || c10::InferenceMode::is_enabled(), head_name(i),
                    " was made in inference mode and cannot be rotated in place outside it: clone it first");
    }
    {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        rotary_in_place_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
    }
    for (const Tensor& x : heads) torch::autograd::impl::bump_version(x);
}

}  // namespace

TORCH_LIBRARY(mrrope, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    m.def(
        "rotary(Tensor[] heads, Tensor positions, Tensor table, str layout='bhsd', str pairing='halves', "
        "bool conjugate=False, Tensor? table_index=None) -> Tensor[]",
        tags);
    m.def(
        "rotary_(Tensor(a!)[] heads, Tensor positions, Tensor table, str layout='bhsd', str pairing='halves', "
        "bool conjugate=False, Tensor? table_index=None) -> ()",
        tags);
}

TORCH_LIBRARY_IMPL(mrrope, CPU, m) {
    m.impl("rotary", rotary_on<Cpu>);
    m.impl("rotary_", rotary_in_place_on<Cpu>);
}

TORCH_LIBRARY_IMPL(mrrope, CUDA, m) {
    m.impl("rotary", rotary_on<Cuda>);
    m.impl("rotary_", rotary_in_place_on<Cuda>);
}

TORCH_LIBRARY_IMPL(mrrope, Meta, m) {
    m.impl("rotary", rotary_meta);
    m.impl("rotary_", rotary_in_place_meta);
}

TORCH_LIBRARY_IMPL(mrrope, Autograd, m) {
    m.impl("rotary", rotary_autograd);
    m.impl("rotary_", rotary_in_place_autograd);
}

TORCH_LIBRARY_IMPL(mrrope, ADInplaceOrView, m) {
    m.impl("rotary_", rotary_in_place_versioned);
}

// --- for C++
// -----------------------------------------------------------------------------------------------------------

Tensor packed_tensor(const FrequencyTable& table, at::Device device) {
    const std::vector<uint64_t> words = packed(table);
    const Tensor host = at::empty({static_cast<int64_t>(words.size())}, at::kLong);
    std::copy(words.begin(), words.end(), static_cast<uint64_t*>(host.data_ptr()));
    return host.to(device);
}

std::vector<Tensor> rotary(TensorList heads, const Tensor& positions, const Tensor& table, std::string_view layout,
                           std::string_view pairing, bool conjugate, const Index& table_index) {
    return rotary_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
}

void rotary_(TensorList heads, const Tensor& positions, const Tensor& table, std::string_view layout,
             std::string_view pairing, bool conjugate, const Index& table_index) {
    rotary_in_place_op().call(heads, positions, table, layout, pairing, conjugate, table_index);
}

}  // namespace mrrope
