#include <array>
#include <cmath>
#include <limits>

#include "mrrope/torch_ops.h"
#include "registration.h"
#include "rotary_args.h"

namespace mrrope {
namespace {

using at::Tensor;

struct RotaryAndCacheCall {
    const Tensor& q;
    const Tensor& q_out;
    const Tensor& k;
    const Tensor& v;
    const Tensor& positions;
    const Tensor& table;
    const Tensor& key_cache;
    const Tensor& value_cache;
    const Tensor& slots;
    bool paged;
    std::string_view layout;
    std::string_view cache_layout;
    std::string_view pairing;
    const OptionalTensor& key_scale;
    const OptionalTensor& value_scale;
    const OptionalTensor& table_index;

    bool in_place() const { return q.is_same(q_out); }
    bool float8() const { return key_cache.scalar_type() == at::kFloat8_e4m3fn; }
    NamedTensor named_slots() const { return {paged ? "slots" : "cache_positions, or else positions,", slots}; }
    RotaryCall rotary() const { return {q, positions, table, layout, pairing, /*conjugate=*/false, table_index}; }
    std::array<NamedTensor, 3> heads() const { return {{{"q", q}, {"k", k}, {"v", v}}}; }
    std::array<NamedTensor, 2> caches() const { return {{{"key_cache", key_cache}, {"value_cache", value_cache}}}; }
    std::array<NamedTensor, 3> written() const {
        return {{{in_place() ? "q" : "q_out", q_out}, {"key_cache", key_cache}, {"value_cache", value_cache}}};
    }
};

struct RotaryAndCacheInPlaceCall : RotaryAndCacheCall {
    RotaryAndCacheInPlaceCall(const Tensor& q, const auto&... others) : RotaryAndCacheCall{q, q, others...} {}
};

Layout cache_layout_named(std::string_view name) {
    if (name == "nhd") return {"nhd", "[blocks, block_size, heads, head_dim]", 0, 1, 2};
    if (name == "hnd") return {"hnd", "[blocks, heads, block_size, head_dim]", 0, 2, 1};
    TORCH_CHECK_VALUE(false, "cache_layout must be one of nhd, hnd, got '", name, "'");
}

void check_scale_kind(const char* name, const OptionalTensor& scale, const RotaryAndCacheCall& call) {
    if (!scale) return;
    TORCH_CHECK_VALUE(call.float8(), name, " must come with caches of Float8_e4m3fn, got caches of ",
                      call.key_cache.scalar_type());
    TORCH_CHECK_TYPE(scale->scalar_type() == at::kFloat, name, " must be float32, got ", scale->scalar_type());
    check_device({name, *scale}, {"q", call.q});
}

void check_kinds(const RotaryAndCacheCall& call) {
    const NamedTensor q{"q", call.q};
    check_kinds(call.rotary());
    const Layout layout = layout_named(call.layout);
    for (const NamedTensor& heads : {NamedTensor{"k", call.k}, {"v", call.v}, {"q_out", call.q_out}}) {
        check_rank(heads, layout);
        check_like(heads, q);
    }
    const Layout cache_layout = cache_layout_named(call.cache_layout);
    TORCH_CHECK_TYPE(!call.float8() || call.q.scalar_type() != at::kDouble,
                     "q must be float32, float16 or bfloat16 for caches of Float8_e4m3fn, got ", call.q.scalar_type());
    for (const NamedTensor& cache : call.caches()) {
        const at::ScalarType dtype = cache.tensor.scalar_type();
        check_rank(cache, cache_layout);
        TORCH_CHECK_TYPE(dtype == call.q.scalar_type() || dtype == at::kFloat8_e4m3fn, cache.name,
                         " must have q's dtype ", call.q.scalar_type(), " or be Float8_e4m3fn, got ", dtype);
        TORCH_CHECK_TYPE(dtype == call.key_cache.scalar_type(), cache.name, " must have key_cache's dtype ",
                         call.key_cache.scalar_type(), ", got ", dtype);
        check_device(cache, q);
    }
    TORCH_CHECK_VALUE(call.positions.dim() < 3, "positions must be one a token to go with a cache, got ",
                      call.positions.dim(), " dimensions");
    check_positions_kind(call.named_slots(), q);
    check_scale_kind("key_scale", call.key_scale, call);
    check_scale_kind("value_scale", call.value_scale, call);
}

void check_heads(const RotaryAndCacheCall& call, const Layout& layout) {
    check_last_dimension({"k", call.k}, layout);
    check_last_dimension({"v", call.v}, layout);
    check_k_matches_q(call.q, call.k, layout);
    TORCH_CHECK_VALUE(call.v.sizes() == call.k.sizes(), "v must have k's shape ", call.k.sizes(), ", got ",
                      call.v.sizes());
    if (call.in_place()) return;
    TORCH_CHECK_VALUE(call.q_out.sizes() == call.q.sizes(), "q_out must have q's shape ", call.q.sizes(), ", got ",
                      call.q_out.sizes());
    check_last_dimension({"q_out", call.q_out}, layout);
    check_no_internal_overlap({"q_out", call.q_out});
}

void check_caches(const RotaryAndCacheCall& call, const Layout& layout, const Layout& cache_layout) {
    const Tensor& cache = call.key_cache;
    TORCH_CHECK_VALUE(cache.size(cache_layout.head) == call.k.size(layout.head) && cache.size(-1) == call.k.size(-1),
                      "key_cache must be ", cache_layout.shape, " with the ", call.k.size(layout.head), " heads of ",
                      call.k.size(-1), " of k, got ", cache.sizes());
    TORCH_CHECK_VALUE(call.paged || cache.size(0) == layout.batch_of(call.k), "key_cache must hold k's ",
                      layout.batch_of(call.k), " sequences where there are no slots, got ", cache.sizes());
    TORCH_CHECK_VALUE(call.value_cache.sizes() == cache.sizes(), "value_cache must have key_cache's shape ",
                      cache.sizes(), ", got ", call.value_cache.sizes());
    const int64_t slots = cache.size(0) * cache.size(cache_layout.token);
    TORCH_CHECK_VALUE(slots <= std::numeric_limits<int32_t>::max(), "key_cache must have fewer than 2^31 slots, got ",
                      slots);
    for (const NamedTensor& written : call.caches()) {
        check_last_dimension(written, cache_layout);
        check_no_internal_overlap(written);
    }
}

// Written tensors overlap neither q, k and v nor each other.
void check_no_overlaps(const RotaryAndCacheCall& call) {
    const auto written = call.written();
    for (size_t i = 0; i < written.size(); ++i) {
        for (const NamedTensor& read : call.heads()) {
            const bool is_q_in_place = call.in_place() && i == 0 && read.tensor.is_same(call.q);
            if (!is_q_in_place) check_no_overlap(read, written[i]);
        }
        for (size_t j = i + 1; j < written.size(); ++j) check_no_overlap(written[i], written[j]);
    }
}

// CPU slots only: CUDA kernels skip tokens whose slot is out of range.
void check_slots(const RotaryAndCacheCall& call, const CacheSlots& slots, int64_t batch, int64_t tokens) {
    if (!call.slots.is_cpu()) return;
    const PositionsView& view = slots.of_tokens;
    for (int64_t i = 0; i < batch * tokens; ++i) {
        const int64_t index = i / tokens * view.batch_stride + i % tokens * view.token_stride;
        const int64_t slot = view.is_int64 ? static_cast<const int64_t*>(view.data)[index]
                                           : static_cast<const int32_t*>(view.data)[index];
        TORCH_CHECK_INDEX(slot < slots.count(), call.named_slots().name, " must be below ", slots.count(),
                          ", the slots of ", call.paged ? "the cache" : "a sequence",
                          ", or negative to be left out, got ", slot, " for token ", i % tokens, " of sequence ",
                          i / tokens);
    }
}

CacheSlots cache_slots(const RotaryAndCacheCall& call, const Layout& layout, const Layout& cache_layout) {
    const int64_t batch = layout.batch_of(call.k);
    const int64_t tokens = call.k.size(layout.token);
    TORCH_CHECK_VALUE(!call.paged || call.slots.numel() == batch * tokens, "slots must be ", batch * tokens,
                      ", one for each token of k of ", call.k.sizes(), " in layout ", layout.name, ", got ",
                      call.slots.sizes());
    CacheSlots slots{.of_tokens = positions_view(call.named_slots(), {"k", call.k}, layout),
                     .paged = call.paged,
                     .blocks = call.key_cache.size(0),
                     .block_size = call.key_cache.size(cache_layout.token)};
    check_slots(call, slots, batch, tokens);
    return slots;
}

// CPU scales only: CUDA kernels multiply by the inverse, finite or not.
void check_scale_values(const char* name, const Tensor& scale, const CachedHeads& cached) {
    if (!scale.is_cpu()) return;
    for (int64_t i = 0; i < scale.numel(); ++i) {
        const float value = cached.scale[i * cached.scale_stride];
        TORCH_CHECK_VALUE(std::isfinite(value) && std::isfinite(1.0f / value), name,
                          " must be finite, and so large that its inverse is, got ", value, " at index ", i);
    }
}

CachedHeads cached_heads(NamedTensor in, const Tensor& cache, const char* scale_name, const OptionalTensor& scale,
                         const Layout& layout, const Layout& cache_layout) {
    CachedHeads cached{.view = heads_view(in, cache, layout, cache_layout)};
    if (!scale) return cached;
    const int heads = cached.view.heads;
    const bool is_one = scale->numel() == 1;
    TORCH_CHECK_VALUE(is_one || (scale->dim() == 1 && scale->size(0) == heads), scale_name,
                      " must have one element, or [", heads, "], one a head of ", in.name, ", got ", scale->sizes());
    cached.scale = static_cast<const float*>(scale->const_data_ptr());
    cached.scale_stride = is_one ? 0 : stride_or_zero(*scale, 0);
    check_scale_values(scale_name, *scale, cached);
    return cached;
}

RotaryAndCacheArgs rotary_and_cache_args(const RotaryAndCacheCall& call) {
    const Layout layout = layout_named(call.layout);
    const Layout cache_layout = cache_layout_named(call.cache_layout);
    RotaryAndCacheArgs args;
    args.rotary = rotary_args(call.rotary(), call.q_out);
    check_heads(call, layout);
    check_heads_have_tables({"k", call.k}, layout, call.table);
    check_caches(call, layout, cache_layout);
    check_no_overlaps(call);
    args.k = cached_heads({"k", call.k}, call.key_cache, "key_scale", call.key_scale, layout, cache_layout);
    args.v = cached_heads({"v", call.v}, call.value_cache, "value_scale", call.value_scale, layout, cache_layout);
    args.slots = cache_slots(call, layout, cache_layout);
    args.float8 = call.float8();
    const int64_t heads = static_cast<int64_t>(args.rotary.q.heads) + args.k.view.heads + args.v.view.heads;
    TORCH_CHECK_VALUE(heads * args.rotary.head_dim <= std::numeric_limits<int>::max(),
                      "q, k and v must have fewer than 2^31 components a token, got ", heads * args.rotary.head_dim);
    return args;
}

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

    static void check(const Call& call) { check_kinds(call); }

    template <class Backend>
    static void run(const Call& call) {
        Backend::run(rotary_and_cache_args(call), call.q);
    }
};

struct RotaryAndCacheInPlace : RotaryAndCacheTraits<RotaryAndCacheInPlaceCall, const Tensor&> {
    static constexpr const char* name = "rotary_and_cache_";
};

struct RotaryAndCacheInto : RotaryAndCacheTraits<RotaryAndCacheCall, const Tensor&, const Tensor&> {
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
                       const CacheOptions& options, const OptionalTensor& q_out) {
    const auto call = [&](const auto& op, const auto&... heads) {
        op.call(heads..., k, v, positions, table, key_cache, value_cache, slots, paged, options.layout,
                options.cache_layout, options.pairing, options.key_scale, options.value_scale, options.table_index);
    };
    if (q_out) return call(dispatched<RotaryAndCacheInto>(), q, *q_out);
    call(dispatched<RotaryAndCacheInPlace>(), q);
}

}  // namespace mrrope
