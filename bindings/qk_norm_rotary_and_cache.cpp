#include "mrrope/qk_norm_rotary_and_cache.h"

#include <limits>

#include "cache_args.h"
#include "mrrope/torch_ops.h"
#include "norm_args.h"
#include "option_names.h"
#include "registration.h"

namespace mrrope {
namespace {

using at::Tensor;

struct QkNormRotaryAndCacheCall {
    CacheCall cache;
    const OptionalTensor& q_weight;
    const OptionalTensor& k_weight;
    double eps;
    double weight_offset;
    std::string_view over;
    const OptionalTensor& gate;
    const OptionalTensor& q_scale;
    const OptionalTensor& q_scale_out;

    QkNormRotaryAndCacheCall(const Tensor& q, const Tensor& q_out, const Tensor& k, const Tensor& v,
                             const OptionalTensor& q_weight, const OptionalTensor& k_weight, const Tensor& positions,
                             const Tensor& table, const Tensor& key_cache, const Tensor& value_cache,
                             const Tensor& slots, bool paged, double eps, double weight_offset, std::string_view over,
                             std::string_view layout, std::string_view cache_layout, std::string_view pairing,
                             const OptionalTensor& key_scale, const OptionalTensor& value_scale,
                             const OptionalTensor& table_index, const OptionalTensor& gate,
                             const OptionalTensor& q_scale, const OptionalTensor& q_scale_out)
        : cache{q,      q_out,        k,       v,         positions,   table,      key_cache, value_cache, slots, paged,
                layout, cache_layout, pairing, key_scale, value_scale, table_index},
          q_weight(q_weight),
          k_weight(k_weight),
          eps(eps),
          weight_offset(weight_offset),
          over(over),
          gate(gate),
          q_scale(q_scale),
          q_scale_out(q_scale_out) {}

    NamedTensor q() const { return {"q", cache.q}; }
    StoredAs q_stored_as() const { return stored_as(cache.named_q_out(), {"q", cache.q}); }

    void each_weight(const auto& visit) const {
        if (q_weight) visit(NamedTensor{"q_weight", *q_weight}, NamedTensor{"q", cache.q});
        if (k_weight) visit(NamedTensor{"k_weight", *k_weight}, NamedTensor{"k", cache.k});
    }

    void each_written(const auto& visit) const {
        for (const NamedTensor& x : cache.written()) visit(x);
        if (gate) visit(NamedTensor{"gate", *gate});
        if (q_scale_out) visit(NamedTensor{"q_scale_out", *q_scale_out});
    }
};

const OptionalTensor no_tensor;

// In place, q keeps its dtype, so there are no scales for it.
struct QkNormRotaryAndCacheInPlaceCall : QkNormRotaryAndCacheCall {
    QkNormRotaryAndCacheInPlaceCall(const Tensor& q, const auto&... others)
        : QkNormRotaryAndCacheCall(q, q, others..., no_tensor, no_tensor) {}
};

void check_kinds(const QkNormRotaryAndCacheCall& call) {
    check_kinds(call.cache);
    check_norm_kinds(call.eps, call.weight_offset, call.over);
    call.each_weight([&](NamedTensor weight, NamedTensor) { check_weight_kind(weight, call.q()); });
    if (call.gate) {
        check_rank({"gate", *call.gate}, layout_named(call.cache.layout));
        check_like({"gate", *call.gate}, call.q());
    }
    const StoredAs q_stored_as = call.q_stored_as();
    TORCH_CHECK_VALUE(!call.q_scale || !call.q_scale_out,
                      "q_scale must come without q_scale_out, which is for computed scales, got both");
    if (call.q_scale) check_scale_kind({"q_scale", *call.q_scale}, q_stored_as, "q_out", {"q", call.cache.q});
    if (call.q_scale_out)
        check_scale_kind({"q_scale_out", *call.q_scale_out}, q_stored_as, "q_out", {"q", call.cache.q});
}

void check_gate(const QkNormRotaryAndCacheCall& call, const Layout& layout) {
    const NamedTensor gate{"gate", *call.gate};
    TORCH_CHECK_VALUE(gate.tensor.sizes() == call.cache.q.sizes(), "gate must have q's shape ", call.cache.q.sizes(),
                      ", got ", gate.tensor.sizes());
    check_last_dimension(gate, layout);
    check_no_internal_overlap(gate);
}

void check_q_scale_out(const QkNormRotaryAndCacheCall& call) {
    const at::IntArrayRef expected = call.cache.q.sizes().slice(0, call.cache.q.dim() - 1);
    TORCH_CHECK_VALUE(call.q_scale_out->sizes() == expected, "q_scale_out must be ", expected,
                      ", one a token and head of q, got ", call.q_scale_out->sizes());
    check_no_internal_overlap({"q_scale_out", *call.q_scale_out});
}

// Beyond what cache_args checks: gate and q_scale_out overlap nothing else, and nothing written overlaps the weights.
void check_no_overlaps(const QkNormRotaryAndCacheCall& call) {
    const auto each_other = [&](const auto& visit) {
        for (const NamedTensor& x : call.cache.heads()) visit(x);
        for (const NamedTensor& x : call.cache.written()) visit(x);
    };
    if (call.gate) each_other([&](NamedTensor x) { check_no_overlap({"gate", *call.gate}, x); });
    if (call.q_scale_out) {
        each_other([&](NamedTensor x) { check_no_overlap({"q_scale_out", *call.q_scale_out}, x); });
    }
    if (call.gate && call.q_scale_out) {
        check_no_overlap({"gate", *call.gate}, {"q_scale_out", *call.q_scale_out});
    }
    call.each_weight([&](NamedTensor weight, NamedTensor) {
        call.each_written([&](NamedTensor written) { check_no_overlap(weight, written); });
    });
}

// `weights` are the call's, contiguous, and must outlive the result.
struct ContiguousWeights {
    Tensor q;
    Tensor k;

    explicit ContiguousWeights(const QkNormRotaryAndCacheCall& call) {
        if (call.q_weight) q = call.q_weight->contiguous();
        if (call.k_weight) k = call.k_weight->contiguous();
    }
};

QkNormRotaryAndCacheArgs qk_norm_rotary_and_cache_args(const QkNormRotaryAndCacheCall& call,
                                                       const ContiguousWeights& weights) {
    const Layout layout = layout_named(call.cache.layout);
    QkNormRotaryAndCacheArgs args;
    static_cast<RotaryAndCacheArgs&>(args) = cache_args(call.cache);
    args.over = over_named(call.over);
    args.eps = call.eps;
    args.weight_offset = call.weight_offset;
    call.each_weight(
        [&](NamedTensor weight, NamedTensor heads) { check_weight_size(weight, heads, layout, args.over); });
    if (weights.q.defined()) args.q_weight = weights.q.const_data_ptr();
    if (weights.k.defined()) args.k_weight = weights.k.const_data_ptr();
    if (call.gate) {
        check_gate(call, layout);
        args.gate = heads_view({"gate", *call.gate}, *call.gate, layout, layout);
        const int64_t heads = 2 * (static_cast<int64_t>(args.rotary.q.heads) + args.k.view.heads);
        TORCH_CHECK_VALUE(heads * args.rotary.head_dim <= std::numeric_limits<int>::max(),
                          "q, k, v and gate must have fewer than 2^31 components a token, got ",
                          heads * args.rotary.head_dim);
    }
    args.q_stored_as = call.q_stored_as();
    if (call.q_scale) {
        args.q_scale = static_cast<const float*>(call.q_scale->const_data_ptr());
        args.q_scale_stride = checked_scale_stride({"q_scale", *call.q_scale}, args.rotary.q.heads, "q");
    }
    if (call.q_scale_out) {
        check_q_scale_out(call);
        args.q_scale_out = static_cast<float*>(call.q_scale_out->data_ptr());
        args.q_scale_out_strides = head_strides(*call.q_scale_out, layout);
    }
    check_no_overlaps(call);
    return args;
}

// The overload `into` has q_out after q, and q's scales at the end.
template <class CallOfForm, class... QAndOut>
struct QkNormRotaryAndCacheTraits {
    static constexpr const char* written = "written";
    static constexpr const char* no_gradient = "caches are written without gradients: use torch.no_grad()";
    using Call = CallOfForm;

    static void each_input(const Call& call, const auto& visit) {
        for (const NamedTensor& x : call.cache.heads()) visit(x);
        call.each_weight([&](NamedTensor weight, NamedTensor) { visit(weight); });
        each_written(call, visit);
    }

    static void each_written(const Call& call, const auto& visit) { call.each_written(visit); }
    static void check(const Call& call) { check_kinds(call); }

    template <class Backend>
    static void run(const Call& call) {
        const ContiguousWeights weights(call);
        Backend::run(qk_norm_rotary_and_cache_args(call, weights), call.cache.q);
    }
};

struct QkNormRotaryAndCacheInPlace : QkNormRotaryAndCacheTraits<QkNormRotaryAndCacheInPlaceCall> {
    static constexpr const char* name = "qk_norm_rotary_and_cache_";
    using Signature = void(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, double,
                           double, std::string_view, std::string_view, std::string_view, std::string_view,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);
};

struct QkNormRotaryAndCacheInto : QkNormRotaryAndCacheTraits<QkNormRotaryAndCacheCall> {
    static constexpr const char* name = "qk_norm_rotary_and_cache_.into";
    using Signature = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                           const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, bool, double, double, std::string_view, std::string_view, std::string_view,
                           std::string_view, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string others =
        "Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, Tensor positions, Tensor table, "
        "Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slots, bool paged, float eps=0.0, "
        "float weight_offset=0.0, str over='head', str layout='bhsd', str cache_layout='nhd', str pairing='halves', "
        "Tensor? key_scale=None, Tensor? value_scale=None, Tensor? table_index=None, Tensor(d!)? gate=None";
    register_op<QkNormRotaryAndCacheInPlace>(library, "(Tensor(a!) q, " + others + ") -> ()");
    register_op<QkNormRotaryAndCacheInto>(library, "(Tensor q, Tensor(a!) q_out, " + others +
                                                       ", Tensor? q_scale=None, Tensor(e!)? q_scale_out=None) -> ()");
}

void qk_norm_rotary_and_cache_(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& q_weight,
                               const OptionalTensor& k_weight, const Tensor& positions, const Tensor& table,
                               const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots, bool paged,
                               double eps, const QkNormRotaryAndCacheOptions& options, const OptionalTensor& q_out) {
    const auto call = [&](const auto& op, const auto& scales, const auto&... heads) {
        std::apply(
            [&](const auto&... scale) {
                op.call(heads..., k, v, q_weight, k_weight, positions, table, key_cache, value_cache, slots, paged, eps,
                        options.weight_offset, name_of(options.over), name_of(options.layout),
                        name_of(options.cache_layout), name_of(options.pairing), options.key_scale, options.value_scale,
                        options.table_index, options.gate, scale...);
            },
            scales);
    };
    if (q_out) {
        return call(dispatched<QkNormRotaryAndCacheInto>(), std::tie(options.q_scale, options.q_scale_out), q, *q_out);
    }
    TORCH_CHECK_VALUE(!options.q_scale && !options.q_scale_out,
                      "q_scale and q_scale_out must come with q_out, got none");
    call(dispatched<QkNormRotaryAndCacheInPlace>(), std::tuple<>(), q);
}

}  // namespace mrrope
