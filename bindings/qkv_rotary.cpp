#include "mrrope/qkv_rotary.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>

#include <limits>
#include <string>
#include <vector>

#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"
#include "rotary_args.h"

namespace mrrope {
namespace {

using at::Tensor;

struct QkvRotaryCall {
    const Tensor& x;
    const Tensor& weight;
    const OptionalTensor& bias;
    const Tensor& positions;
    const Tensor& table;
    int64_t q_heads;
    int64_t kv_heads;
    std::string_view pairing;
};

void check_sizes(const QkvRotaryCall& call) {
    const auto& [x, weight, bias, positions, table, q_heads, kv_heads, pairing] = call;
    TORCH_CHECK_VALUE(weight.size(1) == x.size(-1), "weight must be [outputs, ", x.size(-1), "] for x of ", x.sizes(),
                      ", got ", weight.sizes());
    const int64_t outputs = weight.size(0);
    // Before the sum below, which could overflow.
    TORCH_CHECK_VALUE(q_heads <= outputs && kv_heads <= outputs,
                      "num_q_heads and num_kv_heads must be no more than weight's ", outputs, " rows, got ", q_heads,
                      " and ", kv_heads);
    const int64_t all_heads = q_heads + 2 * kv_heads;
    TORCH_CHECK_VALUE(outputs % all_heads == 0 && outputs > 0, "weight must have a row for every component of ",
                      q_heads, " heads of q and ", kv_heads, " each of k and v, a multiple of ", all_heads, ", got ",
                      outputs, " rows");
    TORCH_CHECK_VALUE(!bias || bias->size(0) == outputs, "bias must be [", outputs, "] for weight of ", weight.sizes(),
                      ", got ", bias ? bias->sizes() : at::IntArrayRef());
    TORCH_CHECK_VALUE(outputs <= std::numeric_limits<int>::max() && x.size(-1) <= std::numeric_limits<int>::max(),
                      "weight must have fewer than 2^31 rows and columns, got ", weight.sizes());
}

std::string_view layout_of(const Tensor& projected) {
    return projected.dim() == 3 ? "bshd" : "thd";
}

// Views of the heads of q and of k.
std::vector<Tensor> rotated_heads(const Tensor& projected, int64_t q_heads, int64_t kv_heads) {
    const c10::SymInt head_dim = projected.sym_size(-1) / (q_heads + 2 * kv_heads);
    const auto heads = [&](int64_t first, int64_t count) {
        return projected.slice_symint(-1, first * head_dim, (first + count) * head_dim)
            .unflatten_symint(-1, {c10::SymInt(count), head_dim});
    };
    return {heads(0, q_heads), heads(q_heads, kv_heads)};
}

RotaryArgs rotary_args_of(const QkvRotaryCall& call, const Tensor& projected) {
    const std::vector<Tensor> heads = rotated_heads(projected, call.q_heads, call.kv_heads);
    return rotary_args({heads, call.positions, call.table, layout_of(projected), call.pairing, /*conjugate=*/false,
                        /*table_index=*/std::nullopt},
                       heads);
}

template <class Backend>
Tensor unfused(const QkvRotaryCall& call) {
    const Tensor projected = at::linear(call.x, call.weight, call.bias);
    Backend::run(rotary_args_of(call, projected), projected);
    return projected;
}

#ifdef MRROPE_WITH_CUDA

// The stride between rows of x, across sequences. torch leaves the stride of a dimension of size 1 unspecified.
int64_t row_stride_of(const Tensor& x) {
    return x.dim() == 3 && x.size(1) == 1 ? x.stride(0) : x.stride(-2);
}

// Whether the fused kernels can read the tensors: equally spaced rows without overlap, one table, one position per
// token. Head tables are unfused: cuBLAS, then rotary.
bool is_fusible(const QkvRotaryCall& call) {
    const auto& [x, weight, bias, positions, table, q_heads, kv_heads, pairing] = call;
    const bool equally_spaced = x.dim() == 2 || x.size(0) == 1 || x.stride(0) == x.size(1) * row_stride_of(x);
    const bool no_overlap = row_stride_of(x) >= x.size(-1) && weight.stride(0) >= weight.size(1);
    return equally_spaced && no_overlap && x.stride(-1) == 1 && weight.stride(-1) == 1 &&
           (!bias || bias->stride(0) == 1) && (table.dim() == 1 || table.dim() == 2) &&
           table.numel() == table.size(-1) && positions.dim() <= 2;
}

// All arguments but positions, table and result, which the plan does not depend on.
QkvRotaryArgs shape_args(const QkvRotaryCall& call) {
    const auto& [x, weight, bias, positions, table, q_heads, kv_heads, pairing] = call;
    QkvRotaryArgs args;
    args.x = x.const_data_ptr();
    args.x_stride = row_stride_of(x);
    args.weight = weight.const_data_ptr();
    args.weight_stride = weight.stride(0);
    args.bias = bias ? bias->const_data_ptr() : nullptr;
    args.batch = x.dim() == 3 ? x.size(0) : 1;
    args.tokens = x.size(-2);
    args.inputs = static_cast<int>(x.size(-1));
    args.q_heads = static_cast<int>(q_heads);
    args.kv_heads = static_cast<int>(kv_heads);
    args.head_dim = static_cast<int>(weight.size(0) / (q_heads + 2 * kv_heads));
    args.rotary_dim = static_cast<int>(2 * (table.size(-1) - 1));
    args.dtype = dtype_of({"x", x});
    args.pairing = pairing_named(pairing);
    return args;
}

Tensor fused(const QkvRotaryCall& call, QkvRotaryArgs args, const QkvRotaryPlan& plan) {
    const Tensor& x = call.x;
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = call.weight.size(0);
    const Tensor projected = at::empty(sizes, x.options());
    const RotaryArgs rotary = rotary_args_of(call, projected);
    args.out = projected.data_ptr();
    args.positions = rotary.positions;
    args.table = rotary.table;
    const c10::DeviceGuard guard(x.device());
    const Tensor workspace =
        at::empty({static_cast<int64_t>(qkv_rotary_workspace_cuda(args, plan))}, x.options().dtype(at::kByte));
    qkv_rotary_cuda(args, plan, workspace.data_ptr(), Cuda::current_stream(x.device()));
    return projected;
}

#endif

// The backward pass is unfused: it rotates the gradient back and differentiates a plain GEMM. All its ops are
// differentiable, so double backward works.
struct QkvRotaryFunction : torch::autograd::Function<QkvRotaryFunction> {
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                          const OptionalTensor& bias, const QkvRotaryCall& call, const auto& below) {
        context->save_for_backward({x, weight, call.positions, call.table});
        context->saved_data["has_bias"] = bias.has_value();
        context->saved_data["q_heads"] = call.q_heads;
        context->saved_data["kv_heads"] = call.kv_heads;
        context->saved_data["pairing"] = call.pairing;
        return below();
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        std::vector<Tensor> result(5);  // x, weight, bias, and none for call and below
        const auto saved = context->get_saved_variables();
        const Tensor& x = saved[0];
        const Tensor& weight = saved[1];
        const int64_t q_heads = context->saved_data["q_heads"].toInt();
        const int64_t kv_heads = context->saved_data["kv_heads"].toInt();
        const Tensor gradient = with_contiguous_last_dimension(gradients[0]);
        std::vector<Tensor> parts = rotary(rotated_heads(gradient, q_heads, kv_heads), saved[2], saved[3],
                                           {.layout = heads_layout_named(layout_of(gradient)),
                                            .pairing = pairing_named(context->saved_data["pairing"].toStringRef()),
                                            .conjugate = true});
        for (Tensor& part : parts) part = part.flatten(-2);
        const c10::SymInt head_dim = gradient.sym_size(-1) / (q_heads + 2 * kv_heads);
        parts.push_back(gradient.slice_symint(-1, (q_heads + kv_heads) * head_dim));
        const Tensor rotated_back = at::cat(parts, -1);
        if (context->needs_input_grad(0)) result[0] = rotated_back.matmul(weight);
        const Tensor rows = rotated_back.dim() == 3 ? rotated_back.flatten(0, 1) : rotated_back;
        if (context->needs_input_grad(1)) result[1] = rows.t().mm(x.dim() == 3 ? x.flatten(0, 1) : x);
        // Without a bias there is no third edge to ask about.
        const bool has_bias = context->saved_data["has_bias"].toBool();
        if (has_bias && context->needs_input_grad(2)) result[2] = rows.sum(0);
        return result;
    }
};

struct QkvRotary {
    static constexpr const char* name = "qkv_rotary";
    using Call = QkvRotaryCall;
    using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, int64_t,
                             int64_t, std::string_view);

    static void each_input(const Call& call, const auto& visit) {
        visit(NamedTensor{"x", call.x});
        visit(NamedTensor{"weight", call.weight});
        if (call.bias) visit(NamedTensor{"bias", *call.bias});
    }

    static void check(const Call& call) {
        const NamedTensor x{"x", call.x};
        dtype_of(x);
        pairing_named(call.pairing);
        TORCH_CHECK_VALUE(call.x.dim() == 2 || call.x.dim() == 3,
                          "x must be [batch, tokens, inputs] or [tokens, inputs], got a tensor of ", call.x.dim(),
                          " dimensions");
        TORCH_CHECK_VALUE(call.weight.dim() == 2, "weight must be [outputs, inputs], got a tensor of ",
                          call.weight.dim(), " dimensions");
        TORCH_CHECK_VALUE(!call.bias || call.bias->dim() == 1, "bias must be [outputs] or None, got a tensor of ",
                          call.bias ? call.bias->dim() : 0, " dimensions");
        TORCH_CHECK_VALUE(call.q_heads >= 1, "num_q_heads must be at least 1, got ", call.q_heads);
        TORCH_CHECK_VALUE(call.kv_heads >= 1, "num_kv_heads must be at least 1, got ", call.kv_heads);
        each_input(call, [&](NamedTensor input) { check_like(input, x); });
        check_positions_kind({"positions", call.positions}, x);
        check_table_kind(call.table, x);
    }

    template <class Backend>
    static Tensor run(const Call& call) {
        check_sizes(call);
#ifdef MRROPE_WITH_CUDA
        if constexpr (std::is_same_v<Backend, Cuda>) {
            if (is_fusible(call)) {
                const c10::DeviceGuard guard(call.x.device());
                const QkvRotaryArgs args = shape_args(call);
                const QkvRotaryPlan plan = plan_qkv_rotary_cuda(args);
                if (plan.kernel != QkvRotaryPlan::unfused) return fused(call, args, plan);
            }
        }
#endif
        return unfused<Backend>(call);
    }

    static Tensor meta(const Call& call) {
        c10::SymDimVector sizes(call.x.sym_sizes().begin(), call.x.sym_sizes().end());
        sizes.back() = call.weight.sym_size(0);
        return at::empty_symint(sizes, call.x.options());
    }

    static Tensor differentiate(const Call& call, const auto& below) {
        return QkvRotaryFunction::apply(call.x, call.weight, call.bias, call, below);
    }
};

// Kernels that only this op registers; Args are those of its signature.
template <class Signature>
struct QkvRotaryKernels;

template <class... Args>
struct QkvRotaryKernels<Tensor(Args...)> {
    // Casts as for at::linear: x, weight and bias to autocast's dtype, unless they are float64.
    template <at::DeviceType device>
    static Tensor autocast(Args... args) {
        const QkvRotaryCall call{args...};
        const c10::impl::ExcludeDispatchKeyGuard below_autocast(
            at::autocast::get_autocast_dispatch_key_from_device_type(device));
        const auto cast = [](const auto& x) {
            return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), x, device);
        };
        return dispatched<QkvRotary>().call(cast(call.x), cast(call.weight), cast(call.bias), call.positions,
                                            call.table, call.q_heads, call.kv_heads, call.pairing);
    }

#ifdef MRROPE_WITH_CUDA
    // Runs the plan [kernel, swizzle, raster], for measurements.
    static Tensor planned(Args... args, at::IntArrayRef plan) {
        const QkvRotaryCall call{args...};
        QkvRotary::check(call);
        check_sizes(call);
        TORCH_CHECK_VALUE(plan.size() == 3, "plan must be [kernel, swizzle, raster], got ", plan);
        TORCH_CHECK_VALUE(is_fusible(call), "x, weight, positions and table must have a form that a plan can take");
        return fused(call, shape_args(call),
                     {.kernel = static_cast<int>(plan[0]),
                      .swizzle = static_cast<int>(plan[1]),
                      .raster = plan[2] == 0 ? QkvRotaryPlan::Raster::rows : QkvRotaryPlan::Raster::columns});
    }

    // The launch plan that qkv_rotary chooses for these arguments.
    static std::vector<int64_t> plan(Args... args) {
        const QkvRotaryCall call{args...};
        if (!is_fusible(call)) return {QkvRotaryPlan::unfused, 1, 0};
        const c10::DeviceGuard guard(call.x.device());
        const QkvRotaryPlan plan = plan_qkv_rotary_cuda(shape_args(call));
        return {plan.kernel, plan.swizzle, static_cast<int64_t>(plan.raster)};
    }
#endif
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string arguments =
        "Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor table, int num_q_heads, int num_kv_heads, "
        "str pairing";
    using Own = QkvRotaryKernels<QkvRotary::Signature>;
    register_op<QkvRotary>(library, "(" + arguments + "='halves') -> Tensor");
    library.impl(QkvRotary::name, c10::DispatchKey::AutocastCPU, Own::autocast<at::kCPU>);
    library.impl(QkvRotary::name, c10::DispatchKey::AutocastCUDA, Own::autocast<at::kCUDA>);
#ifdef MRROPE_WITH_CUDA
    library.def(("qkv_rotary_planned(" + arguments + ", int[] plan) -> Tensor").c_str());
    library.impl("qkv_rotary_planned", c10::DispatchKey::CUDA, Own::planned);
    library.def(("qkv_rotary_plan(" + arguments + ") -> int[]").c_str());
    library.impl("qkv_rotary_plan", c10::DispatchKey::CUDA, Own::plan);
    library.def("qkv_rotary_kernels() -> str[]", qkv_rotary_kernels_cuda);
#endif
}

Tensor qkv_rotary(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& positions,
                  const Tensor& table, int64_t num_q_heads, int64_t num_kv_heads, const QkvRotaryOptions& options) {
    return dispatched<QkvRotary>().call(x, weight, bias, positions, table, num_q_heads, num_kv_heads,
                                        name_of(options.pairing));
}

}  // namespace mrrope
