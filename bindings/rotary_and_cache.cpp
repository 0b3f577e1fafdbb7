#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/autograd.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>

#include "backends.h"
#include "gradients.h"
#include "mrrope/torch_ops.h"
#include "rotary_args.h"
#include "tensor_views.h"

namespace mrrope {
namespace {

using at::Tensor;
using Index = std::optional<Tensor>;

// The arguments of both forms of the op; in place, q_out is q.
struct CacheCall {
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
    c10::string_view layout;
    c10::string_view cache_layout;
    c10::string_view pairing;
    const Index& key_scale;
    const Index& value_scale;
    const Index& table_index;

    bool in_place() const { return q.is_same(q_out); }
    bool float8() const { return key_cache.scalar_type() == at::kFloat8_e4m3fn; }
    const char* slots_name() const { return paged ? "slots" : "cache_positions, or else positions,"; }
    RotaryOptions rotary() const { return {positions, table, layout, pairing, false, table_index}; }
    std::array<NamedHeads, 3> heads() const { return {{{"q", q}, {"k", k}, {"v", v}}}; }
    std::array<NamedHeads, 3> written() const {
        return {{{in_place() ? "q" : "q_out", q_out}, {"key_cache", key_cache}, {"value_cache", value_cache}}};
    }
};

using IntoSignature = void(const Tensor& q, const Tensor& q_out, const Tensor& k, const Tensor& v,
                           const Tensor& positions, const Tensor& table, const Tensor& key_cache,
                           const Tensor& value_cache, const Tensor& slots, bool paged, c10::string_view layout,
                           c10::string_view cache_layout, c10::string_view pairing, const Index& key_scale,
                           const Index& value_scale, const Index& table_index);
using InPlaceSignature = void(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions,
                              const Tensor& table, const Tensor& key_cache, const Tensor& value_cache,
                              const Tensor& slots, bool paged, c10::string_view layout, c10::string_view cache_layout,
                              c10::string_view pairing, const Index& key_scale, const Index& value_scale,
                              const Index& table_index);

struct Into {
    static constexpr const char* overload = "into";
    using Signature = IntoSignature;

    template <class... Args>
    static CacheCall call(const Args&... args) {
        return {args...};
    }
};

struct InPlace {
    static constexpr const char* overload = "";
    using Signature = InPlaceSignature;

    template <class... Args>
    static CacheCall call(const Tensor& q, const Args&... args) {
        return {q, q, args...};
    }
};

template <class Form>
const auto& cache_op() {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mrrope::rotary_and_cache_", Form::overload)
                               .template typed<typename Form::Signature>();
    return op;
}

// --- checks
// ------------------------------------------------------------------------------------------------------------

Layout cache_layout_named(c10::string_view name) {
    if (name == "nhd") return {"nhd", "[blocks, block_size, heads, head_dim]", 0, 1, 2};
    if (name == "hnd") return {"hnd", "[blocks, heads, block_size, head_dim]", 0, 2, 1};
    TORCH_CHECK_VALUE(false, "cache_layout must be one of nhd, hnd, got '", name, "'");
}

void check_like_q(NamedHeads heads, const Tensor& q) {
    TORCH_CHECK_TYPE(heads.tensor.scalar_type() == q.scalar_type(), heads.name, " must have q's dtype ",
                     q.scalar_type(), ", got ", heads.tensor.scalar_type());
    TORCH_CHECK(heads.tensor.device() == q.device(), heads.name, " must be on q's device ", q.device(), ", got ",
                heads.tensor.device());
}

void check_scale_kind(const char* name, const Index& scale, const CacheCall& call) {
    if (!scale) return;
    TORCH_CHECK_VALUE(call.float8(), name, " must come with caches of Float8_e4m3fn, got caches of ",
                      call.key_cache.scalar_type());
    TORCH_CHECK_TYPE(scale->scalar_type() == at::kFloat, name, " must be float32, got ", scale->scalar_type());
    TORCH_CHECK(scale->device() == call.q.device(), name, " must be on q's device ", call.q.device(), ", got ",
                scale->device());
}

// The checks that need no sizes.
void check_kinds(const CacheCall& call) {
    const NamedHeads q{"q", call.q};
    check_kinds(call.q, call.rotary());
    const Layout layout = layout_named(call.layout);
    const std::array others{NamedHeads{"k", call.k}, NamedHeads{"v", call.v}, NamedHeads{"q_out", call.q_out}};
    for (const NamedHeads& heads : others) {
        check_rank(heads, layout);
        check_like_q(heads, call.q);
    }
    const Layout cache_layout = cache_layout_named(call.cache_layout);
    TORCH_CHECK_TYPE(!call.float8() || call.q.scalar_type() != at::kDouble,
                     "q must be float32, float16 or bfloat16 for caches of Float8_e4m3fn, got ", call.q.scalar_type());
    for (const NamedHeads& cache : {NamedHeads{"key_cache", call.key_cache}, {"value_cache", call.value_cache}}) {
        const Tensor& x = cache.tensor;
        check_rank(cache, cache_layout);
        TORCH_CHECK_TYPE(x.scalar_type() == call.q.scalar_type() || x.scalar_type() == at::kFloat8_e4m3fn, cache.name,
                         " must have q's dtype ", call.q.scalar_type(), " or be Float8_e4m3fn, got ", x.scalar_type());
        TORCH_CHECK_TYPE(x.scalar_type() == call.key_cache.scalar_type(), cache.name, " must have key_cache's dtype ",
                         call.key_cache.scalar_type(), ", got ", x.scalar_type());
        TORCH_CHECK(x.device() == call.q.device(), cache.name, " must be on q's device ", call.q.device(), ", got ",
                    x.device());
    }
    TORCH_CHECK_VALUE(call.positions.dim() < 3, "positions must be one a token to go with a cache, got ",
                      call.positions.dim(), " dimensions");
    check_positions_kind(call.slots, q, call.slots_name());
    check_scale_kind("key_scale", call.key_scale, call);
    check_scale_kind("value_scale", call.value_scale, call);
}

void check_heads(const CacheCall& call, const Layout& layout) {
    const Tensor& q = call.q;
    const Tensor& k = call.k;
    check_last_dimension({"k", k}, layout);
    check_last_dimension({"v", call.v}, layout);
    TORCH_CHECK_VALUE(layout.batch_of(q) == layout.batch_of(k) && q.size(layout.token) == k.size(layout.token) &&
                          q.size(-1) == k.size(-1),
                      "k must be ", layout.shape, " and differ from q in the number of heads only, got k of ",
                      k.sizes(), " for q of ", q.sizes());
    TORCH_CHECK_VALUE(call.v.sizes() == k.sizes(), "v must have k's shape ", k.sizes(), ", got ", call.v.sizes());
    if (call.in_place()) return;
    TORCH_CHECK_VALUE(call.q_out.sizes() == q.sizes(), "q_out must have q's shape ", q.sizes(), ", got ",
                      call.q_out.sizes());
    check_last_dimension({"q_out", call.q_out}, layout);
    check_own_memory({"q_out", call.q_out});
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
    for (const NamedHeads& written : call.written()) {
        if (written.tensor.is_same(call.q_out)) continue;
        check_last_dimension(written, cache_layout);
        check_own_memory(written);
    }
}

// What is written is nothing else's, neither read nor written.
void check_all_apart(const CacheCall& call) {
    const auto written = call.written();
    for (size_t i = 0; i < written.size(); ++i) {
        for (const NamedHeads& read : call.heads()) {
            const bool is_q_in_place = call.in_place() && i == 0 && read.tensor.is_same(call.q);
            if (!is_q_in_place) check_apart(read, written[i]);
        }
        for (size_t j = i + 1; j < written.size(); ++j) check_apart(written[i], written[j]);
    }
}

// On the CPU; kernels leave out tokens whose slot is not there.
void check_slots(const CacheCall& call, const CacheSlots& slots, int64_t batch, int64_t tokens) {
    if (!call.slots.is_cpu()) return;
    const PositionsView& view = slots.of_tokens;
    for (int64_t at = 0; at < batch * tokens; ++at) {
        const int64_t index = at / tokens * view.batch_stride + at % tokens * view.token_stride;
        const int64_t slot = view.is_int64 ? static_cast<const int64_t*>(view.data)[index]
                                           : static_cast<const int32_t*>(view.data)[index];
        TORCH_CHECK_INDEX(slot < slots.count(), call.slots_name(), " must be below ", slots.count(), ", the slots of ",
                          call.paged ? "the cache" : "a sequence", ", or negative to be left out, ", "got ", slot,
                          " for token ", at % tokens, " of sequence ", at / tokens);
    }
}

CacheSlots slots_of(const CacheCall& call, const Layout& layout, const Layout& cache_layout) {
    const int64_t batch = layout.batch_of(call.k);
    const int64_t tokens = call.k.size(layout.token);
    TORCH_CHECK_VALUE(!call.paged || call.slots.numel() == batch * tokens, "slots must be ", batch * tokens,
                      ", one for each token of k of ", call.k.sizes(), " in layout ", layout.name, ", got ",
                      call.slots.sizes());
    CacheSlots slots{.of_tokens = positions_of(call.slots, {"k", call.k}, layout, call.slots_name()),
                     .paged = call.paged,
                     .blocks = call.key_cache.size(0),
                     .block_size = call.key_cache.size(cache_layout.token)};
    check_slots(call, slots, batch, tokens);
    return slots;
}

// On the CPU; kernels multiply by the inverse, whatever comes out.
void check_scale_values(const char* name, const Tensor& scale, const CachedHeads& cached) {
    if (!scale.is_cpu()) return;
    for (int64_t at = 0; at < scale.numel(); ++at) {
        const float value = cached.scale[at * cached.scale_stride];
        TORCH_CHECK_VALUE(std::isfinite(value) && std::isfinite(1.0f / value), name,
                          " must be finite, and so large that its inverse is, got ", value, " at index ", at);
    }
}

CachedHeads cached_heads(NamedHeads in, const Tensor& cache, const char* scale_name, const Index& scale,
                         const Layout& layout, const Layout& cache_layout) {
    const int heads = heads_of(in, layout);
    CachedHeads cached{.view = {.in = in.tensor.const_data_ptr(),
                                .out = cache.data_ptr(),
                                .heads = heads,
                                .in_strides = strides_of(in.tensor, layout),
                                .out_strides = strides_of(cache, cache_layout)}};
    if (!scale) return cached;
    const bool is_one = scale->numel() == 1;
    TORCH_CHECK_VALUE(is_one || (scale->dim() == 1 && scale->size(0) == heads), scale_name,
                      " must have one element, or [", heads, "], one a head of ", in.name, ", got ", scale->sizes());
    cached.scale = static_cast<const float*>(scale->const_data_ptr());
    cached.scale_stride = is_one ? 0 : step(*scale, 0);
    check_scale_values(scale_name, *scale, cached);
    return cached;
}

RotaryAndCacheArgs args_of(const CacheCall& call) {
    check_kinds(call);
    const Layout layout = layout_named(call.layout);
    const Layout cache_layout = cache_layout_named(call.cache_layout);
    RotaryAndCacheArgs args;
    args.rotary = rotary_args(call.q, call.q_out, call.rotary());
    check_heads(call, layout);
    check_caches(call, layout, cache_layout);
    check_all_apart(call);
    args.k = cached_heads({"k", call.k}, call.key_cache, "key_scale", call.key_scale, layout, cache_layout);
    args.v = cached_heads({"v", call.v}, call.value_cache, "value_scale", call.value_scale, layout, cache_layout);
    args.slots = slots_of(call, layout, cache_layout);
    args.float8 = call.float8();
    const int64_t heads = static_cast<int64_t>(args.rotary.q.heads) + args.k.view.heads + args.v.view.heads;
    TORCH_CHECK_VALUE(heads * args.rotary.head_dim <= std::numeric_limits<int>::max(),
                      "q, k and v must have fewer than 2^31 components a token, got ", heads * args.rotary.head_dim);
    return args;
}

// --- kernels
// -----------------------------------------------------------------------------------------------------------

template <class Form, class Signature = typename Form::Signature>
struct Kernels;

template <class Form, class... Args>
struct Kernels<Form, void(Args...)> {
    template <class Backend>
    static void run(Args... args) {
        const CacheCall call = Form::call(args...);
        Backend::run(args_of(call), call.q);
    }

    static void meta(Args... args) { check_kinds(Form::call(args...)); }

    static void versioned(Args... args) {
        const CacheCall call = Form::call(args...);
        for (const NamedHeads& written : call.written()) {
            TORCH_CHECK(!written.tensor.is_inference() || c10::InferenceMode::is_enabled(), written.name,
                        " was made in inference mode and cannot be written outside it: clone it first");
        }
        {
            const at::AutoDispatchBelowADInplaceOrView below_autograd;
            cache_op<Form>().call(args...);
        }
        for (const NamedHeads& written : call.written()) torch::autograd::impl::bump_version(written.tensor);
    }

    // A cache is for reading on without gradients: to write what carries any would lose them.
    static void autograd(Args... args) {
        const CacheCall call = Form::call(args...);
        const auto check = [](const auto& all) {
            for (const NamedHeads& heads : all) {
                TORCH_CHECK(!needs_gradient(heads.tensor), heads.name,
                            " requires grad, and caches are written without gradients: use torch.no_grad()");
            }
        };
        check(call.heads());
        check(call.written());
        const at::AutoDispatchBelowAutograd below_autograd;
        cache_op<Form>().call(args...);
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, m) {
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    m.def(
        "rotary_and_cache_(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor table, Tensor(b!) key_cache, "
        "Tensor(c!) value_cache, Tensor slots, bool paged, str layout='bhsd', str cache_layout='nhd', "
        "str pairing='halves', Tensor? key_scale=None, Tensor? value_scale=None, Tensor? table_index=None) -> ()",
        tags);
    m.def(
        "rotary_and_cache_.into(Tensor q, Tensor(a!) q_out, Tensor k, Tensor v, Tensor positions, Tensor table, "
        "Tensor(b!) key_cache, Tensor(c!) value_cache, Tensor slots, bool paged, str layout='bhsd', "
        "str cache_layout='nhd', str pairing='halves', Tensor? key_scale=None, Tensor? value_scale=None, "
        "Tensor? table_index=None) -> ()",
        tags);
}

TORCH_LIBRARY_IMPL(mrrope, CPU, m) {
    m.impl("rotary_and_cache_", Kernels<InPlace>::run<Cpu>);
    m.impl("rotary_and_cache_.into", Kernels<Into>::run<Cpu>);
}

TORCH_LIBRARY_IMPL(mrrope, CUDA, m) {
    m.impl("rotary_and_cache_", Kernels<InPlace>::run<Cuda>);
    m.impl("rotary_and_cache_.into", Kernels<Into>::run<Cuda>);
}

TORCH_LIBRARY_IMPL(mrrope, Meta, m) {
    m.impl("rotary_and_cache_", Kernels<InPlace>::meta);
    m.impl("rotary_and_cache_.into", Kernels<Into>::meta);
}

TORCH_LIBRARY_IMPL(mrrope, Autograd, m) {
    m.impl("rotary_and_cache_", Kernels<InPlace>::autograd);
    m.impl("rotary_and_cache_.into", Kernels<Into>::autograd);
}

TORCH_LIBRARY_IMPL(mrrope, ADInplaceOrView, m) {
    m.impl("rotary_and_cache_", Kernels<InPlace>::versioned);
    m.impl("rotary_and_cache_.into", Kernels<Into>::versioned);
}

void rotary_and_cache_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& table,
                       const Tensor& key_cache, const Tensor& value_cache, const Tensor& slots, bool paged,
                       const CacheOptions& options, const Index& q_out) {
    const auto call = [&](const auto& op, const auto&... heads) {
        op.call(heads..., k, v, positions, table, key_cache, value_cache, slots, paged, options.layout,
                options.cache_layout, options.pairing, options.key_scale, options.value_scale, options.table_index);
    };
    if (q_out) return call(cache_op<Into>(), q, *q_out);
    call(cache_op<InPlace>(), q);
}

}  // namespace mrrope
