#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/autograd.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
#include <torch/library.h>

#include <string>
#include <type_traits>
#include <vector>

#include "backends.h"
#include "tensor_views.h"

// Registers an op under every dispatch key. Op is a struct of traits:
//   name                          with the overload, if any
//   Signature                     C++ types of the schema's arguments, in order
//   Call                          the same arguments by name, constructible from them in order
//   check(call)                   checks rank, dtype and device; runs before run, meta and differentiate
//   run<Backend>(call)            CPU and CUDA kernel; Backend is Cpu or Cuda
//   meta(call)                    results without values, for ops that return tensors
//   each_input(call, visit)       visits the tensors that may require grad
// One of:
//   differentiate(call, below)    autograd kernel if an input requires grad; below() calls the op below autograd
//   no_gradient                   why such an input is refused, for the message
// For ops that write their arguments:
//   each_written(call, visit)     visits the tensors whose version is incremented
//   written                       what the op does to them, for messages

// Of torch.ops. The package for the Hub of kernels has its own, so that both can be loaded.
#ifndef MRROPE_NAMESPACE
#define MRROPE_NAMESPACE mrrope
#endif

namespace mrrope {

// True for forward-mode tangents, too: ops without forward-mode derivatives refuse them instead of dropping them.
inline bool needs_gradient(const at::Tensor& x) {
    return (at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
}

// The backward pass of an autograd function of (heads, call, below) whose gradient is a rotation of those given:
// rotate(gradients, are_of_k_alone) of the wanted ones.
inline std::vector<at::Tensor> backward_by_rotation(torch::autograd::AutogradContext* context,
                                                    const std::vector<at::Tensor>& gradients, const auto& rotate) {
    std::vector<at::Tensor> result(gradients.size() + 2);  // none for call and below
    std::vector<size_t> wanted;
    std::vector<at::Tensor> heads;
    for (size_t i = 0; i < gradients.size(); ++i) {
        if (!gradients[i].defined() || !context->needs_input_grad(i)) continue;
        wanted.push_back(i);
        heads.push_back(with_contiguous_last_dimension(gradients[i]));
    }
    if (heads.empty()) return result;
    const bool are_of_k_alone = wanted.front() == 1;
    const std::vector<at::Tensor> rotated = rotate(heads, are_of_k_alone);
    for (size_t i = 0; i < wanted.size(); ++i) result[wanted[i]] = rotated[i];
    return result;
}

template <class Op>
const auto& dispatched() {
    static const auto op = [] {
        const c10::OperatorName name =
            torch::jit::parseName(std::string(C10_STRINGIZE(MRROPE_NAMESPACE) "::") + Op::name);
        return c10::Dispatcher::singleton()
            .findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str())
            .template typed<typename Op::Signature>();
    }();
    return op;
}

template <class Op, class Signature = typename Op::Signature>
struct Kernels;

template <class Op, class Result, class... Args>
struct Kernels<Op, Result(Args...)> {
    using Call = typename Op::Call;
    static constexpr bool writes = requires { Op::written; };

    template <class Backend>
    static Result run(Args... args) {
        const Call call{args...};
        Op::check(call);
        return Op::template run<Backend>(call);
    }

    static Result meta(Args... args) {
        const Call call{args...};
        Op::check(call);
        if constexpr (!std::is_void_v<Result>) return Op::meta(call);
    }

    static Result autograd(Args... args) {
        const Call call{args...};
        const auto below = [&]() -> Result {
            // Ops that write dispatch to ADInplaceOrView next: increment_versions.
            const std::conditional_t<writes, at::AutoDispatchBelowAutograd, at::AutoDispatchBelowADInplaceOrView> guard;
            return dispatched<Op>().call(args...);
        };
        if constexpr (requires { Op::no_gradient; }) {
            Op::each_input(call, [](NamedTensor x) {
                TORCH_CHECK(!needs_gradient(x.tensor), x.name, " requires grad, and ", Op::no_gradient);
            });
        } else {
            bool differentiable = false;
            Op::each_input(call, [&](NamedTensor x) { differentiable = differentiable || needs_gradient(x.tensor); });
            if (differentiable) {
                Op::check(call);
                return Op::differentiate(call, below);
            }
        }
        return below();
    }

    static void increment_versions(Args... args) {
        const Call call{args...};
        Op::each_written(call, [](NamedTensor x) {
            TORCH_CHECK(!x.tensor.is_inference() || c10::InferenceMode::is_enabled(), x.name,
                        " was made in inference mode and cannot be ", Op::written, " outside it: clone it first");
        });
        {
            const at::AutoDispatchBelowADInplaceOrView guard;
            dispatched<Op>().call(args...);
        }
        Op::each_written(call, [](NamedTensor x) { torch::autograd::impl::bump_version(x.tensor); });
    }
};

// `schema` without the name: "(arguments) -> results".
template <class Op>
void register_op(torch::Library& library, const std::string& schema) {
    library.def((Op::name + schema).c_str(), {at::Tag::pt2_compliant_tag});
    library.impl(Op::name, c10::DispatchKey::CPU, Kernels<Op>::template run<Cpu>);
    library.impl(Op::name, c10::DispatchKey::CUDA, Kernels<Op>::template run<Cuda>);
    library.impl(Op::name, c10::DispatchKey::Meta, Kernels<Op>::meta);
    library.impl(Op::name, c10::DispatchKey::Autograd, Kernels<Op>::autograd);
    if constexpr (Kernels<Op>::writes) {
        library.impl(Op::name, c10::DispatchKey::ADInplaceOrView, Kernels<Op>::increment_versions);
    }
}

}  // namespace mrrope
