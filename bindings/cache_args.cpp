#include "cache_args.h"

#include <c10/util/Exception.h>

#include <limits>

#include "cache_slots.h"

namespace mrrope {
namespace {

using at::Tensor;

Layout cache_layout_named(std::string_view name) {
    if (name == "nhd") return {"nhd", "[blocks, block_size, heads, head_dim]", 0, 1, 2};
    if (name == "hnd") return {"hnd", "[blocks, heads, block_size, head_dim]", 0, 2, 1};
    TORCH_CHECK_VALUE(false, "cache_layout must be one of nhd, hnd, got '", name, "'");
}

void check_heads(const CacheCall& call, const Layout& layout) {
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

void check_caches(const CacheCall& call, const Layout& layout, const Layout& cache_layout) {
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

// Written tensors overlap neither q, k and v nor each other. In place, q and q_out are one argument.
void check_no_overlaps(const CacheCall& call) {
    const NamedTensor q{"q", call.q};
    const auto written = call.written();
    for (size_t i = 0; i < written.size(); ++i) {
        const bool is_q_in_place = call.in_place() && i == 0;
        if (!is_q_in_place) check_no_overlap(q, written[i]);
        check_no_overlap({"k", call.k}, written[i]);
        check_no_overlap({"v", call.v}, written[i]);
        for (size_t j = i + 1; j < written.size(); ++j) check_no_overlap(written[i], written[j]);
    }
}

CachedHeads cached_heads(NamedTensor in, const Tensor& cache, const char* scale_name, const OptionalTensor& scale,
                         const Layout& layout, const Layout& cache_layout) {
    CachedHeads cached{.view = heads_view(in, cache, layout, cache_layout)};
    if (!scale) return cached;
    cached.scale = static_cast<const float*>(scale->const_data_ptr());
    cached.scale_stride = checked_scale_stride({scale_name, *scale}, cached.view.heads, in.name.text);
    return cached;
}

}  // namespace

StoredAs stored_as(NamedTensor x, NamedTensor q) {
    const at::ScalarType dtype = x.tensor.scalar_type();
    const at::ScalarType heads_dtype = q.tensor.scalar_type();
    if (dtype == heads_dtype) return StoredAs::heads_dtype;
    TORCH_CHECK_TYPE(dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2, x.name, " must have ", q.name,
                     "'s dtype ", heads_dtype, " or be Float8_e4m3fn or Float8_e5m2, got ", dtype);
    TORCH_CHECK_TYPE(heads_dtype != at::kDouble, q.name, " must be float32, float16 or bfloat16 for ", x.name, " of ",
                     dtype, ", got ", heads_dtype);
    return dtype == at::kFloat8_e5m2 ? StoredAs::float8_e5m2 : StoredAs::float8_e4m3;
}

void check_scale_kind(NamedTensor scale, StoredAs results, const char* results_name, NamedTensor q) {
    TORCH_CHECK_VALUE(is_float8(results), scale.name, " must come with ", results_name,
                      " of Float8_e4m3fn or Float8_e5m2, got ", q.tensor.scalar_type());
    TORCH_CHECK_TYPE(scale.tensor.scalar_type() == at::kFloat, scale.name, " must be float32, got ",
                     scale.tensor.scalar_type());
    check_device(scale, q);
}

void check_kinds(const CacheCall& call) {
    const NamedTensor q{"q", call.q};
    check_kinds(call.rotary());
    const Layout layout = layout_named(call.layout);
    for (const NamedTensor& heads : {NamedTensor{"k", call.k}, {"v", call.v}}) {
        check_rank(heads, layout);
        check_like(heads, q);
    }
    check_rank(call.named_q_out(), layout);
    check_device(call.named_q_out(), q);
    const Layout cache_layout = cache_layout_named(call.cache_layout);
    for (const NamedTensor& cache : call.caches()) {
        check_rank(cache, cache_layout);
        stored_as(cache, q);
        TORCH_CHECK_TYPE(cache.tensor.scalar_type() == call.key_cache.scalar_type(), cache.name,
                         " must have key_cache's dtype ", call.key_cache.scalar_type(), ", got ",
                         cache.tensor.scalar_type());
        check_device(cache, q);
    }
    check_positions_kind(call.named_slots(), q);
    const StoredAs cached_as = stored_as({"key_cache", call.key_cache}, q);
    if (call.key_scale) check_scale_kind({"key_scale", *call.key_scale}, cached_as, "caches", q);
    if (call.value_scale) check_scale_kind({"value_scale", *call.value_scale}, cached_as, "caches", q);
}

int64_t checked_scale_stride(NamedTensor scale, int heads, const char* heads_name) {
    const Tensor& x = scale.tensor;
    const bool is_one = x.numel() == 1;
    TORCH_CHECK_VALUE(is_one || (x.dim() == 1 && x.size(0) == heads), scale.name, " must have one element, or [", heads,
                      "], one a head of ", heads_name, ", got ", x.sizes());
    check_float8_scales(scale);
    return is_one ? 0 : stride_or_zero(x, 0);
}

RotaryAndCacheArgs cache_args(const CacheCall& call) {
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
    args.slots = cache_slots(call.named_slots(), call.paged, call.key_cache.size(0),
                             call.key_cache.size(cache_layout.token), {"k", call.k}, layout);
    args.cached_as = stored_as({"key_cache", call.key_cache}, {"q", call.q});
    const int64_t heads = static_cast<int64_t>(args.rotary.q.heads) + args.k.view.heads + args.v.view.heads;
    TORCH_CHECK_VALUE(heads * args.rotary.head_dim <= std::numeric_limits<int>::max(),
                      "q, k and v must have fewer than 2^31 components a token, got ", heads * args.rotary.head_dim);
    return args;
}

}  // namespace mrrope
