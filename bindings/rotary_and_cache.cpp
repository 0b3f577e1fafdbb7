#include "cache_args.h"
#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"

namespace mrrope {
namespace {

using at::Tensor;

struct RotaryAndCacheInPlaceCall : CacheCall {
    RotaryAndCacheInPlaceCall(const Tensor& q, const auto&... others) : CacheCall{q, q, others...} {}
};

// q_out is the second argument of the overload `into`; in place, it is q.
template <class CallOfForm, class... QAndOut>
struct RotaryAndCacheTraits {
    static constexpr const char* written = "written";
    static constexpr const char* no_gradient = "caches are written without gradients: use torch.no_grad()";
    using Call = CallOfForm;
    using Signature = void(QAndOut..., const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const Tensor&, bool, std::string_view, std::string_view, std::string_view,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);

    static void each_input(const Call& call, const auto& visit) {
        for (const NamedTensor& x : call.heads()) visit(x);
        each_written(call, visit);
    }

    static void each_written(const Call& call, const auto& visit) {
        for (const NamedTensor& x : call.written()) visit(x);
    }

    static void check(const Call& call) {
        check_kinds(call);
        check_like(call.named_q_out(), {"q", call.q});
    }

    template <class Backend>
    static void run(const Call& call) {
        Backend::run(cache_args(call), call.q);
    }
};

struct RotaryAndCacheInPlace : RotaryAndCacheTraits<RotaryAndCacheInPlaceCall, const Tensor&> {
    static constexpr const char* name = "rotary_and_cache_";
};

struct RotaryAndCacheInto : RotaryAndCacheTraits<CacheCall, const Tensor&, const Tensor&> {
    static constexpr const char* name = "rotary_and_cache_.into";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string others =
        "Tensor k, Tensor v, Tensor positions, Tensor table, Tensor(b!) key_cache, Tensor(c!) value_cache, "
        "Tensor slots, bool paged, str layout='bhsd', str cache_layout='nhd', str pairing='halves', "
        "Tensor? key_scale=None, Tensor? value_scale=None, Tensor? table_index=None) -> ()";
    register_op<RotaryAndCacheInPlace>(library, "(Tensor(a!) q, " + others);
    register_op<RotaryAndCacheInto>(library, "(Tensor q, Tensor(a!) q_out, " + others);
}

void rotary_and_cache_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& table,
                       const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots, bool paged,
                       const RotaryAndCacheOptions& options, const OptionalTensor& q_out) {
    const auto call = [&](const auto& op, const auto&... heads) {
        op.call(heads..., k, v, positions, table, key_cache, value_cache, slots, paged, name_of(options.layout),
                name_of(options.cache_layout), name_of(options.pairing), options.key_scale, options.value_scale,
                options.table_index);
    };
    if (q_out) return call(dispatched<RotaryAndCacheInto>(), q, *q_out);
    call(dispatched<RotaryAndCacheInPlace>(), q);
}

}  // namespace mrrope
