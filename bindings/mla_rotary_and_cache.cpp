#include <array>
#include <limits>

#include "cache_args.h"
#include "cache_slots.h"
#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"
#include "rotary_args.h"
#include "token_rows.h"

namespace mrrope {
namespace {

using at::Tensor;

struct MlaRotaryAndCacheCall {
    const Tensor& q_rope;
    const Tensor& q_out;
    const Tensor& k_rope;
    const Tensor& latent;
    const Tensor& positions;
    const Tensor& table;
    const Tensor& cache;
    const Tensor& slots;
    bool paged;
    std::string_view layout;
    std::string_view pairing;
    const OptionalTensor& scale;
    const OptionalTensor& table_index;

    bool in_place() const { return q_rope.is_same(q_out); }
    StoredAs cached_as() const { return stored_as(named_cache(), named_q()); }
    RotaryCall rotary() const {
        return {q_rope, positions, table, layout, pairing, /*conjugate=*/false, table_index, "q_rope"};
    }
    NamedTensor named_q() const { return {"q_rope", q_rope}; }
    NamedTensor named_q_out() const { return {in_place() ? "q_rope" : "q_out", q_out}; }
    NamedTensor named_k_rope() const { return {"k_rope", k_rope}; }
    NamedTensor named_latent() const { return {"latent", latent}; }
    NamedTensor named_cache() const { return {"cache", cache}; }
    NamedTensor named_slots() const { return {paged ? "slots" : "cache_positions, or else positions,", slots}; }
    std::array<NamedTensor, 3> read() const { return {named_q(), named_k_rope(), named_latent()}; }
    std::array<NamedTensor, 2> written() const { return {named_q_out(), named_cache()}; }
};

struct MlaRotaryAndCacheInPlaceCall : MlaRotaryAndCacheCall {
    MlaRotaryAndCacheInPlaceCall(const Tensor& q_rope, const auto&... others)
        : MlaRotaryAndCacheCall{q_rope, q_rope, others...} {}
};

void check_kinds(const MlaRotaryAndCacheCall& call) {
    const NamedTensor q = call.named_q();
    check_kinds(call.rotary());
    const Layout layout = layout_named(call.layout);
    check_rank(call.named_q_out(), layout);
    check_like(call.named_q_out(), q);
    check_row_kind(call.named_k_rope(), HeadDimension::allowed, q, layout);
    check_row_kind(call.named_latent(), HeadDimension::forbidden, q, layout);
    TORCH_CHECK_VALUE(call.positions.dim() < 3, "positions must be one a token to go with a cache, got ",
                      call.positions.dim(), " dimensions");
    check_positions_kind(call.named_slots(), q);
    TORCH_CHECK_VALUE(call.cache.dim() == 3, "cache must be [blocks, block_size, latent_dim + rope_dim], got a tensor ",
                      "of ", call.cache.dim(), " dimensions");
    const StoredAs cached_as = call.cached_as();
    check_device(call.named_cache(), q);
    if (call.scale) check_scale_kind({"scale", *call.scale}, cached_as, "a cache", q);
}

void check_cache(const MlaRotaryAndCacheCall& call, int64_t batch) {
    const Tensor& cache = call.cache;
    const int64_t row = call.latent.size(-1) + call.k_rope.size(-1);
    TORCH_CHECK_VALUE(cache.size(-1) == row, "cache must be [blocks, block_size, ", row,
                      "], with the components of latent and of k_rope, got ", cache.sizes());
    TORCH_CHECK_VALUE(cache.numel() == 0 || cache.stride(-1) == 1,
                      "cache must have a contiguous last dimension, got strides ", cache.strides());
    TORCH_CHECK_VALUE(call.paged || cache.size(0) == batch, "cache must hold q_rope's ", batch,
                      " sequences where there are no slots, got ", cache.sizes());
    const int64_t slots = cache.size(0) * cache.size(1);
    TORCH_CHECK_VALUE(slots <= std::numeric_limits<int32_t>::max(), "cache must have fewer than 2^31 slots, got ",
                      slots);
    check_no_internal_overlap(call.named_cache());
}

// Written tensors overlap neither what is read nor each other. In place, q_rope and q_out are one argument.
void check_no_overlaps(const MlaRotaryAndCacheCall& call) {
    for (const NamedTensor& read : call.read()) check_no_overlap(read, call.named_cache());
    check_no_overlap(call.named_k_rope(), call.named_q_out());
    check_no_overlap(call.named_latent(), call.named_q_out());
    if (call.in_place()) return;
    check_no_overlap(call.named_q(), call.named_q_out());
    check_no_overlap(call.named_q_out(), call.named_cache());
}

// Two parts of every row of the cache: the first row's parts, and the strides of blocks and slots.
HeadsView cached_view(const Tensor& rows, const Layout& layout, const MlaRotaryAndCacheCall& call,
                      int64_t first_component) {
    return {.in = rows.const_data_ptr(),
            .out = static_cast<char*>(call.cache.data_ptr()) + first_component * call.cache.element_size(),
            .heads = 1,
            .in_strides = head_strides(rows, row_layout(rows, layout)),
            .out_strides = {.batch = stride_or_zero(call.cache, 0), .token = stride_or_zero(call.cache, 1), .head = 0}};
}

MlaRotaryAndCacheArgs mla_rotary_and_cache_args(const MlaRotaryAndCacheCall& call) {
    const Layout layout = layout_named(call.layout);
    check_one_table_for_all_heads(call.table);
    MlaRotaryAndCacheArgs args;
    args.rotary = rotary_args(call.rotary(), call.q_out);
    RotaryArgs& rotary = args.rotary;
    TORCH_CHECK_VALUE(rotary.head_dim == rotary.rotary_dim, "q_rope must have table.rotary_dim (", rotary.rotary_dim,
                      ") components a head, got ", call.q_rope.sizes());
    check_row_sizes(call.named_k_rope(), call.named_q(), layout);
    check_row_sizes(call.named_latent(), call.named_q(), layout);
    TORCH_CHECK_VALUE(call.k_rope.size(-1) == rotary.rotary_dim, "k_rope must have table.rotary_dim (",
                      rotary.rotary_dim, ") components, got ", call.k_rope.sizes());
    if (!call.in_place()) {
        TORCH_CHECK_VALUE(call.q_out.sizes() == call.q_rope.sizes(), "q_out must have q_rope's shape ",
                          call.q_rope.sizes(), ", got ", call.q_out.sizes());
        check_last_dimension(call.named_q_out(), layout);
        check_no_internal_overlap(call.named_q_out());
    }
    check_cache(call, rotary.batch);
    check_no_overlaps(call);
    const int64_t latent_dim = call.latent.size(-1);
    const int64_t components = latent_dim + (int64_t{rotary.q.heads} + 1) * rotary.rotary_dim;
    TORCH_CHECK_VALUE(components <= std::numeric_limits<int>::max(),
                      "q_rope, k_rope and latent must have fewer than 2^31 components a token, got ", components);
    args.latent = {.view = cached_view(call.latent, layout, call, 0), .dim = static_cast<int>(latent_dim)};
    rotary.k = cached_view(call.k_rope, layout, call, latent_dim);
    args.slots =
        cache_slots(call.named_slots(), call.paged, call.cache.size(0), call.cache.size(1), call.named_q(), layout);
    args.cached_as = call.cached_as();
    args.scale = one_scale(call.scale);
    return args;
}

// q_out is the second argument of the overload `into`; in place, it is q_rope.
template <class CallOfForm, class... QAndOut>
struct MlaRotaryAndCacheTraits {
    static constexpr const char* written = "written";
    static constexpr const char* no_gradient = "caches are written without gradients: use torch.no_grad()";
    using Call = CallOfForm;
    using Signature = void(QAndOut..., const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, bool, std::string_view, std::string_view, const OptionalTensor&,
                           const OptionalTensor&);

    static void each_input(const Call& call, const auto& visit) {
        for (const NamedTensor& x : call.read()) visit(x);
        each_written(call, visit);
    }

    static void each_written(const Call& call, const auto& visit) {
        for (const NamedTensor& x : call.written()) visit(x);
    }

    static void check(const Call& call) { check_kinds(call); }

    template <class Backend>
    static void run(const Call& call) {
        Backend::run(mla_rotary_and_cache_args(call), call.q_rope);
    }
};

struct MlaRotaryAndCacheInPlace : MlaRotaryAndCacheTraits<MlaRotaryAndCacheInPlaceCall, const Tensor&> {
    static constexpr const char* name = "mla_rotary_and_cache_";
};

struct MlaRotaryAndCacheInto : MlaRotaryAndCacheTraits<MlaRotaryAndCacheCall, const Tensor&, const Tensor&> {
    static constexpr const char* name = "mla_rotary_and_cache_.into";
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    const std::string others =
        "Tensor k_rope, Tensor latent, Tensor positions, Tensor table, Tensor(b!) cache, Tensor slots, bool paged, "
        "str layout='bhsd', str pairing='interleaved', Tensor? scale=None, Tensor? table_index=None) -> ()";
    register_op<MlaRotaryAndCacheInPlace>(library, "(Tensor(a!) q_rope, " + others);
    register_op<MlaRotaryAndCacheInto>(library, "(Tensor q_rope, Tensor(a!) q_out, " + others);
}

void mla_rotary_and_cache_(const Tensor& q_rope, const Tensor& k_rope, const Tensor& latent, const Tensor& positions,
                           const Tensor& table, const Tensor& cache, const Tensor& slots, bool paged,
                           const MlaRotaryAndCacheOptions& options, const OptionalTensor& q_out) {
    const auto call = [&](const auto& op, const auto&... heads) {
        op.call(heads..., k_rope, latent, positions, table, cache, slots, paged, name_of(options.layout),
                name_of(options.pairing), options.scale, options.table_index);
    };
    if (q_out) return call(dispatched<MlaRotaryAndCacheInto>(), q_rope, *q_out);
    call(dispatched<MlaRotaryAndCacheInPlace>(), q_rope);
}

}  // namespace mrrope
