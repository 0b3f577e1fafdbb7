#include <utility>

#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"

namespace mrrope {
namespace {

int64_t offset(const HeadStrides& strides, int64_t batch, int64_t token) {
    return batch * strides.batch + token * strides.token;
}

const void* advanced(const PositionsView& positions, int64_t batch, int64_t token) {
    const int64_t index = batch * positions.batch_stride + token * positions.token_stride;
    return static_cast<const char*>(positions.data) + index * (positions.is_int64 ? 8 : 4);
}

CopiedPart slice(const CopiedPart& part, int element_size, int64_t first_batch, int64_t first_token) {
    CopiedPart rest = part;
    if (part.dim == 0) return rest;
    HeadsView& view = rest.view;
    view.in = static_cast<const char*>(view.in) + offset(view.in_strides, first_batch, first_token) * element_size;
    view.out = static_cast<char*>(view.out) + offset(view.out_strides, first_batch, first_token) * element_size;
    return rest;
}

}  // namespace

RotaryArgs slice(const RotaryArgs& args, int64_t first_batch, int64_t batch, int64_t first_token, int64_t tokens) {
    const int element_size = size_of(args.dtype);
    RotaryArgs part = args;
    for (HeadsView* view : {&part.q, &part.k}) {
        if (view->heads == 0) continue;
        view->in =
            static_cast<const char*>(view->in) + offset(view->in_strides, first_batch, first_token) * element_size;
        view->out = static_cast<char*>(view->out) + offset(view->out_strides, first_batch, first_token) * element_size;
    }
    part.positions.data = advanced(args.positions, first_batch, first_token);
    const TableChoice& choice = args.choice;
    if (choice.index != nullptr) {
        part.choice.index += first_batch * choice.batch_stride + first_token * choice.token_stride;
    } else if (choice.count > 1) {
        part.table += first_batch * choice.stride;
        if (part.positions.row_of_pair != nullptr) part.positions.row_of_pair += first_batch * choice.stride;
        if (choice.query_factors != nullptr) part.choice.query_factors += first_batch * choice.stride;
        part.choice.count = static_cast<int32_t>(batch);
    }
    part.batch = batch;
    part.tokens = tokens;
    return part;
}

RotaryAndCacheArgs slice(const RotaryAndCacheArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                         int64_t tokens) {
    const int element_size = size_of(args.rotary.dtype);
    const int cached_size = size_of(args.cached_as, args.rotary.dtype);
    RotaryAndCacheArgs part = args;
    part.rotary = slice(args.rotary, first_batch, batch, first_token, tokens);
    part.slots.of_tokens.data = advanced(args.slots.of_tokens, first_batch, first_token);
    if (!args.slots.paged) part.slots.blocks = batch;
    for (HeadsView* view : {&part.k.view, &part.v.view}) {
        if (view->heads == 0) continue;
        view->in =
            static_cast<const char*>(view->in) + offset(view->in_strides, first_batch, first_token) * element_size;
        if (args.slots.paged) continue;
        view->out = static_cast<char*>(view->out) + offset(view->out_strides, first_batch, 0) * cached_size;
    }
    return part;
}

QkNormRotaryAndCacheArgs slice(const QkNormRotaryAndCacheArgs& args, int64_t first_batch, int64_t batch,
                               int64_t first_token, int64_t tokens) {
    const DType dtype = args.rotary.dtype;
    QkNormRotaryAndCacheArgs part = args;
    static_cast<RotaryAndCacheArgs&>(part) =
        slice(static_cast<const RotaryAndCacheArgs&>(args), first_batch, batch, first_token, tokens);
    if (args.rotary.q.heads > 0) {
        const int64_t first = offset(args.rotary.q.out_strides, first_batch, first_token);
        part.rotary.q.out = static_cast<char*>(args.rotary.q.out) + first * size_of(args.q_stored_as, dtype);
    }
    if (args.gate.heads > 0) {
        const int64_t first = offset(args.gate.in_strides, first_batch, first_token) * size_of(dtype);
        part.gate.in = static_cast<const char*>(args.gate.in) + first;
        part.gate.out = static_cast<char*>(args.gate.out) + first;
    }
    if (args.q_scale_out != nullptr) part.q_scale_out += offset(args.q_scale_out_strides, first_batch, first_token);
    return part;
}

RotaryCosSinArgs slice(const RotaryCosSinArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                       int64_t tokens) {
    RotaryCosSinArgs part = args;
    part.rotary = slice(args.rotary, first_batch, batch, first_token, tokens);
    part.rotary.positions = {};  // there are none to advance
    for (ColumnsView* view : {&part.cos, &part.sin}) {
        const int64_t columns = first_batch * view->batch_stride + first_token * view->token_stride;
        view->data = static_cast<const char*>(view->data) + columns * size_of(args.columns_dtype);
    }
    return part;
}

MlaRotaryArgs slice(const MlaRotaryArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                    int64_t tokens) {
    const int element_size = size_of(args.rotary.dtype);
    return {.rotary = slice(args.rotary, first_batch, batch, first_token, tokens),
            .q_nope = slice(args.q_nope, element_size, first_batch, first_token),
            .k_nope = slice(args.k_nope, element_size, first_batch, first_token)};
}

MlaRotaryGradientArgs slice(const MlaRotaryGradientArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                            int64_t tokens) {
    return {.rotary = slice(args.rotary, first_batch, batch, first_token, tokens),
            .q_nope = slice(args.q_nope, size_of(args.rotary.dtype), first_batch, first_token)};
}

MlaRotaryAndCacheArgs slice(const MlaRotaryAndCacheArgs& args, int64_t first_batch, int64_t batch, int64_t first_token,
                            int64_t tokens) {
    const int element_size = size_of(args.rotary.dtype);
    const int cached_size = is_float8(args.cached_as) ? 1 : element_size;
    MlaRotaryAndCacheArgs part = args;
    part.rotary = slice(args.rotary, first_batch, batch, first_token, tokens);
    part.latent = slice(args.latent, element_size, first_batch, first_token);
    part.slots.of_tokens.data = advanced(args.slots.of_tokens, first_batch, first_token);
    if (!args.slots.paged) part.slots.blocks = batch;
    // The cache is not sliced by tokens.
    const int64_t first_block = args.slots.paged ? 0 : first_batch;
    for (const auto& [view, whole] :
         {std::pair{&part.rotary.k, &args.rotary.k}, {&part.latent.view, &args.latent.view}}) {
        view->out = static_cast<char*>(whole->out) + offset(whole->out_strides, first_block, 0) * cached_size;
    }
    return part;
}

}  // namespace mrrope
