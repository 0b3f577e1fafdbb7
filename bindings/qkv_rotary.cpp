#include "mrrope/qkv_rotary.h"

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/autograd.h>
#include <torch/library.h>

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
using Bias = std::optional<Tensor>;

using QkvRotarySignature = Tensor(const Tensor&, const Tensor&, const Bias&, const Tensor&, const Tensor&, int64_t,
                                  int64_t, c10::string_view);

const auto& qkv_rotary_op() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("mrrope::qkv_rotary", "").typed<QkvRotarySignature>();
    return op;
}

struct HeadCounts {
    int64_t q;
    int64_t kv;
};

// --- checks
// ------------------------------------------------------------------------------------------------------------

// Those that need no sizes.
void check_kinds(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions, const Tensor& table,
                 HeadCounts heads, c10::string_view pairing) {
    const NamedHeads named{"x", x};
    dtype_of(named);
    pairing_named(pairing);
    TORCH_CHECK_VALUE(x.dim() == 2 || x.dim() == 3,
                      "x must be [batch, tokens, inputs] or [tokens, inputs], got a tensor of ", x.dim(),
                      " dimensions");
    TORCH_CHECK_VALUE(weight.dim() == 2, "weight must be [outputs, inputs], got a tensor of ", weight.dim(),
                      " dimensions");
    TORCH_CHECK_VALUE(!bias || bias->dim() == 1, "bias must be [outputs] or None, got a tensor of ",
                      bias ? bias->dim() : 0, " dimensions");
    TORCH_CHECK_VALUE(heads.q >= 1, "num_q_heads must be at least 1, got ", heads.q);
    TORCH_CHECK_VALUE(heads.kv >= 1, "num_kv_heads must be at least 1, got ", heads.kv);
    const auto check_like_x = [&](const char* name, const Tensor& tensor) {
        TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(), name, " must have x's dtype ", x.scalar_type(),
                         ", got ", tensor.scalar_type());
        TORCH_CHECK(tensor.device() == x.device(), name, " must be on x's device ", x.device(), ", got ",
                    tensor.device());
    };
    check_like_x("weight", weight);
    if (bias) check_like_x("bias", *bias);
    check_positions_kind(positions, named);
    check_table_kind(table, named);
}

void check_sizes(const Tensor& x, const Tensor& weight, const Bias& bias, HeadCounts heads) {
    TORCH_CHECK_VALUE(weight.size(1) == x.size(-1), "weight must be [outputs, ", x.size(-1), "] for x of ", x.sizes(),
                      ", got ", weight.sizes());
    const int64_t outputs = weight.size(0);
    // Before they are added up: the sum of any two numbers may be none.
    TORCH_CHECK_VALUE(heads.q <= outputs && heads.kv <= outputs,
                      "num_q_heads and num_kv_heads must be no more than weight's ", outputs, " rows, got ", heads.q,
                      " and ", heads.kv);
    const int64_t all_heads = heads.q + 2 * heads.kv;
    TORCH_CHECK_VALUE(outputs % all_heads == 0 && outputs > 0, "weight must have a row for every component of ",
                      heads.q, " heads of q and ", heads.kv, " each of k and v, a multiple of ", all_heads, ", got ",
                      outputs, " rows");
    TORCH_CHECK_VALUE(!bias || bias->size(0) == outputs, "bias must be [", outputs, "] for weight of ", weight.sizes(),
                      ", got ", bias ? bias->sizes() : at::IntArrayRef());
    TORCH_CHECK_VALUE(outputs <= std::numeric_limits<int>::max() && x.size(-1) <= std::numeric_limits<int>::max(),
                      "weight must have fewer than 2^31 rows and columns, got ", weight.sizes());
}

// --- the product, seen as heads
// --------------------------------------------------------------------------------------------

std::string_view layout_of(const Tensor& projected) {
    return projected.dim() == 3 ? "bshd" : "thd";
}

// The heads of q and of k, as views; v's are what is left.
std::vector<Tensor> rotated_heads(const Tensor& projected, HeadCounts heads) {
    const c10::SymInt head_dim = projected.sym_size(-1) / (heads.q + 2 * heads.kv);
    const auto part = [&](int64_t first, int64_t count) {
        return projected.slice_symint(-1, first * head_dim, (first + count) * head_dim)
            .unflatten_symint(-1, {c10::SymInt(count), head_dim});
    };
    return {part(0, heads.q), part(heads.q, heads.kv)};
}

template <class Backend>
Tensor project_then_rotate(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                           const Tensor& table, HeadCounts heads, c10::string_view pairing) {
    const Tensor projected = at::linear(x, weight, bias);
    const std::vector<Tensor> rotated = rotated_heads(projected, heads);
    Backend::run(rotary_args(rotated, rotated, {positions, table, layout_of(projected), pairing, false, std::nullopt}),
                 projected);
    return projected;
}

// --- backends
// ----------------------------------------------------------------------------------------------------------

Tensor qkv_rotary_cpu(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                      const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    check_kinds(x, weight, bias, positions, table, {q_heads, kv_heads}, pairing);
    check_sizes(x, weight, bias, {q_heads, kv_heads});
    return project_then_rotate<Cpu>(x, weight, bias, positions, table, {q_heads, kv_heads}, pairing);
}

#ifdef MRROPE_WITH_CUDA

// From row to row of x, whatever sequences they belong to. Of one element, torch leaves any stride at all.
int64_t row_stride_of(const Tensor& x) {
    return x.dim() == 3 && x.size(1) == 1 ? x.stride(0) : x.stride(-2);
}

// All but positions, table and result, which do not count for the plan.
QkvRotaryArgs shaped_args(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& table,
                          HeadCounts heads, c10::string_view pairing) {
    QkvRotaryArgs args;
    args.x = x.const_data_ptr();
    args.x_stride = row_stride_of(x);
    args.weight = weight.const_data_ptr();
    args.weight_stride = weight.stride(0);
    args.bias = bias ? bias->const_data_ptr() : nullptr;
    args.batch = x.dim() == 3 ? x.size(0) : 1;
    args.tokens = x.size(-2);
    args.inputs = static_cast<int>(x.size(-1));
    args.q_heads = static_cast<int>(heads.q);
    args.kv_heads = static_cast<int>(heads.kv);
    args.head_dim = static_cast<int>(weight.size(0) / (heads.q + 2 * heads.kv));
    args.rotary_dim = static_cast<int>(2 * (table.size(-1) - 1));
    args.dtype = dtype_of({"x", x});
    args.pairing = pairing_named(pairing);
    return args;
}

// Whether the fused kernels read such tensors: rows that follow each other and do not overlap, and one table and
// position a token.
bool has_plain_form(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                    const Tensor& table) {
    const bool rows_follow = x.dim() == 2 || x.size(0) == 1 || x.stride(0) == x.size(1) * row_stride_of(x);
    const bool rows_apart = row_stride_of(x) >= x.size(-1) && weight.stride(0) >= weight.size(1);
    return rows_follow && rows_apart && x.stride(-1) == 1 && weight.stride(-1) == 1 &&
           (!bias || bias->stride(0) == 1) && (table.dim() == 1 || table.dim() == 2) &&
           table.numel() == table.size(-1) && positions.dim() <= 2;
}

Tensor project_and_rotate(const Tensor& x, const Tensor& weight, const Tensor& positions, const Tensor& table,
                          HeadCounts heads, c10::string_view pairing, QkvRotaryArgs args, const QkvRotaryPlan& plan) {
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    const Tensor projected = at::empty(sizes, x.options());
    const std::vector<Tensor> rotated = rotated_heads(projected, heads);
    const RotaryArgs checked =
        rotary_args(rotated, rotated, {positions, table, layout_of(projected), pairing, false, std::nullopt});
    args.out = projected.data_ptr();
    args.positions = checked.positions;
    args.table = checked.table;
    const c10::cuda::CUDAGuard guard(x.device());
    const Tensor workspace =
        at::empty({static_cast<int64_t>(qkv_rotary_workspace_cuda(args, plan))}, x.options().dtype(at::kByte));
    qkv_rotary_cuda(args, plan, workspace.data_ptr(), c10::cuda::getCurrentCUDAStream(x.device().index()).stream());
    return projected;
}

Tensor qkv_rotary_cuda_op(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                          const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    const HeadCounts heads{q_heads, kv_heads};
    check_kinds(x, weight, bias, positions, table, heads, pairing);
    check_sizes(x, weight, bias, heads);
    if (has_plain_form(x, weight, bias, positions, table)) {
        const c10::cuda::CUDAGuard guard(x.device());
        const QkvRotaryArgs args = shaped_args(x, weight, bias, table, heads, pairing);
        const QkvRotaryPlan plan = plan_qkv_rotary_cuda(args);
        if (plan.kernel != QkvRotaryPlan::unfused) {
            return project_and_rotate(x, weight, positions, table, heads, pairing, args, plan);
        }
    }
    return project_then_rotate<Cuda>(x, weight, bias, positions, table, heads, pairing);
}

// The same by a plan of the caller's: [kernel, swizzle, raster], for measuring.
Tensor qkv_rotary_planned(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                          const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing,
                          at::IntArrayRef plan) {
    const HeadCounts heads{q_heads, kv_heads};
    check_kinds(x, weight, bias, positions, table, heads, pairing);
    check_sizes(x, weight, bias, heads);
    TORCH_CHECK_VALUE(plan.size() == 3, "plan must be [kernel, swizzle, raster], got ", plan);
    TORCH_CHECK_VALUE(has_plain_form(x, weight, bias, positions, table),
                      "x, weight, positions and table must have a form that a plan can take");
    const QkvRotaryPlan by{.kernel = static_cast<int>(plan[0]),
                           .swizzle = static_cast<int>(plan[1]),
                           .raster = plan[2] == 0 ? QkvRotaryPlan::Raster::rows : QkvRotaryPlan::Raster::columns};
    return project_and_rotate(x, weight, positions, table, heads, pairing,
                              shaped_args(x, weight, bias, table, heads, pairing), by);
}

std::vector<int64_t> qkv_rotary_plan(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                                     const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    if (!has_plain_form(x, weight, bias, positions, table)) return {QkvRotaryPlan::unfused, 1, 0};
    const c10::cuda::CUDAGuard guard(x.device());
    const QkvRotaryPlan plan = plan_qkv_rotary_cuda(shaped_args(x, weight, bias, table, {q_heads, kv_heads}, pairing));
    return {plan.kernel, plan.swizzle, static_cast<int64_t>(plan.raster)};
}

std::vector<std::string> qkv_rotary_kernels() {
    return qkv_rotary_kernels_cuda();
}

#else

Tensor qkv_rotary_cuda_op(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                          const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    return project_then_rotate<Cuda>(x, weight, bias, positions, table, {q_heads, kv_heads}, pairing);
}

#endif

Tensor qkv_rotary_meta(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                       const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    check_kinds(x, weight, bias, positions, table, {q_heads, kv_heads}, pairing);
    c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
    sizes.back() = weight.sym_size(0);
    return at::empty_symint(sizes, x.options());
}

// --- autograd
// ----------------------------------------------------------------------------------------------------------

// Backwards, the two apart: the gradient is rotated back, and then is that of a plain product. By differentiable ops,
// so that it can be differentiated in turn.
class QkvRotaryFunction : public torch::autograd::Function<QkvRotaryFunction> {
public:
    static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& weight,
                          const Bias& bias, const Tensor& positions, const Tensor& table, int64_t q_heads,
                          int64_t kv_heads, const std::string& pairing) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        context->save_for_backward({x, weight, positions, table});
        context->saved_data["q_heads"] = q_heads;
        context->saved_data["kv_heads"] = kv_heads;
        context->saved_data["pairing"] = pairing;
        return qkv_rotary_op().call(x, weight, bias, positions, table, q_heads, kv_heads, pairing);
    }

    static std::vector<Tensor> backward(torch::autograd::AutogradContext* context, std::vector<Tensor> gradients) {
        constexpr size_t inputs = 8;
        std::vector<Tensor> result(inputs);
        const auto saved = context->get_saved_variables();
        const Tensor& x = saved[0];
        const Tensor& weight = saved[1];
        const HeadCounts heads{context->saved_data["q_heads"].toInt(), context->saved_data["kv_heads"].toInt()};
        const Tensor gradient = with_contiguous_last_dimension(gradients[0]);
        std::vector<Tensor> parts = rotary(rotated_heads(gradient, heads), saved[2], saved[3], layout_of(gradient),
                                           context->saved_data["pairing"].toStringRef(), /*conjugate=*/true);
        for (Tensor& part : parts) part = part.flatten(-2);
        const c10::SymInt head_dim = gradient.sym_size(-1) / (heads.q + 2 * heads.kv);
        parts.push_back(gradient.slice_symint(-1, (heads.q + heads.kv) * head_dim));
        const Tensor turned_back = at::cat(parts, -1);
        if (context->needs_input_grad(0)) result[0] = turned_back.matmul(weight);
        const Tensor rows = turned_back.dim() == 3 ? turned_back.flatten(0, 1) : turned_back;
        if (context->needs_input_grad(1)) result[1] = rows.t().mm(x.dim() == 3 ? x.flatten(0, 1) : x);
        if (context->needs_input_grad(2)) result[2] = rows.sum(0);
        return result;
    }
};

Tensor qkv_rotary_autograd(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                           const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    if (!needs_gradient(x) && !needs_gradient(weight) && !(bias && needs_gradient(*bias))) {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        return qkv_rotary_op().call(x, weight, bias, positions, table, q_heads, kv_heads, pairing);
    }
    return QkvRotaryFunction::apply(x, weight, bias, positions, table, q_heads, kv_heads, std::string(pairing));
}

// --- autocast
// ----------------------------------------------------------------------------------------------------------

// As at::linear: x, weight and bias are cast, all but float64, and the result has the dtype of autocast.
template <at::DeviceType device>
Tensor qkv_rotary_autocast(const Tensor& x, const Tensor& weight, const Bias& bias, const Tensor& positions,
                           const Tensor& table, int64_t q_heads, int64_t kv_heads, c10::string_view pairing) {
    const c10::impl::ExcludeDispatchKeyGuard below_autocast(
        at::autocast::get_autocast_dispatch_key_from_device_type(device));
    const auto cast = [&](const auto& given) {
        return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), given, device);
    };
    return qkv_rotary_op().call(cast(x), cast(weight), cast(bias), positions, table, q_heads, kv_heads, pairing);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, m) {
    m.def(
        "qkv_rotary(Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor table, int num_q_heads, "
        "int num_kv_heads, str pairing='halves') -> Tensor",
        {at::Tag::pt2_compliant_tag});
#ifdef MRROPE_WITH_CUDA
    m.def(
        "qkv_rotary_planned(Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor table, int num_q_heads, "
        "int num_kv_heads, str pairing, int[] plan) -> Tensor");
    m.def(
        "qkv_rotary_plan(Tensor x, Tensor weight, Tensor? bias, Tensor positions, Tensor table, int num_q_heads, "
        "int num_kv_heads, str pairing) -> int[]");
    m.def("qkv_rotary_kernels() -> str[]", qkv_rotary_kernels);
#endif
}

TORCH_LIBRARY_IMPL(mrrope, CPU, m) {
    m.impl("qkv_rotary", qkv_rotary_cpu);
}

TORCH_LIBRARY_IMPL(mrrope, CUDA, m) {
    m.impl("qkv_rotary", qkv_rotary_cuda_op);
#ifdef MRROPE_WITH_CUDA
    m.impl("qkv_rotary_planned", qkv_rotary_planned);
    m.impl("qkv_rotary_plan", qkv_rotary_plan);
#endif
}

TORCH_LIBRARY_IMPL(mrrope, Meta, m) {
    m.impl("qkv_rotary", qkv_rotary_meta);
}

TORCH_LIBRARY_IMPL(mrrope, Autograd, m) {
    m.impl("qkv_rotary", qkv_rotary_autograd);
}

TORCH_LIBRARY_IMPL(mrrope, AutocastCPU, m) {
    m.impl("qkv_rotary", qkv_rotary_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(mrrope, AutocastCUDA, m) {
    m.impl("qkv_rotary", qkv_rotary_autocast<at::kCUDA>);
}

Tensor qkv_rotary(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& positions,
                  const Tensor& table, int64_t num_q_heads, int64_t num_kv_heads, std::string_view pairing) {
    return qkv_rotary_op().call(x, weight, bias, positions, table, num_q_heads, num_kv_heads, pairing);
}

}  // namespace mrrope
