#pragma once

#include <string>
#include <tuple>
#include <type_traits>

#include "field_count.h"
#include "mrrope/learnable_rotary.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"

// The fields of every struct of arguments, by name.

namespace mrrope::testing {

template <class T>
struct Field {
    const char* name;  // empty: a base, whose fields are those of the struct
    T& value;
};

template <class T>
Field(const char*, T&) -> Field<T>;

inline auto fields_of(HeadStrides& s) {
    return std::tuple{Field{"batch", s.batch}, Field{"token", s.token}, Field{"head", s.head}};
}

inline auto fields_of(HeadsView& v) {
    return std::tuple{Field{"in", v.in}, Field{"out", v.out}, Field{"heads", v.heads},
                      Field{"in_strides", v.in_strides}, Field{"out_strides", v.out_strides}};
}

inline auto fields_of(PositionsView& p) {
    return std::tuple{Field{"data", p.data},
                      Field{"is_int64", p.is_int64},
                      Field{"batch_stride", p.batch_stride},
                      Field{"token_stride", p.token_stride},
                      Field{"rows", p.rows},
                      Field{"row_stride", p.row_stride},
                      Field{"row_of_pair", p.row_of_pair}};
}

inline auto fields_of(TableChoice& c) {
    return std::tuple{Field{"count", c.count},
                      Field{"stride", c.stride},
                      Field{"heads", c.heads},
                      Field{"head_stride", c.head_stride},
                      Field{"index", c.index},
                      Field{"batch_stride", c.batch_stride},
                      Field{"token_stride", c.token_stride},
                      Field{"query_factors", c.query_factors}};
}

inline auto fields_of(RotaryArgs& a) {
    return std::tuple{Field{"q", a.q},
                      Field{"k", a.k},
                      Field{"positions", a.positions},
                      Field{"table", a.table},
                      Field{"choice", a.choice},
                      Field{"batch", a.batch},
                      Field{"tokens", a.tokens},
                      Field{"head_dim", a.head_dim},
                      Field{"rotary_dim", a.rotary_dim},
                      Field{"dtype", a.dtype},
                      Field{"pairing", a.pairing},
                      Field{"conjugate", a.conjugate}};
}

inline auto fields_of(ColumnsView& c) {
    return std::tuple{Field{"data", c.data}, Field{"batch_stride", c.batch_stride},
                      Field{"token_stride", c.token_stride}};
}

inline auto fields_of(RotaryCosSinArgs& a) {
    return std::tuple{Field{"rotary", a.rotary}, Field{"cos", a.cos}, Field{"sin", a.sin},
                      Field{"columns_dtype", a.columns_dtype}, Field{"columns_per_pair", a.columns_per_pair}};
}

inline auto fields_of(CacheSlots& s) {
    return std::tuple{Field{"of_tokens", s.of_tokens}, Field{"paged", s.paged}, Field{"blocks", s.blocks},
                      Field{"block_size", s.block_size}};
}

inline auto fields_of(CachedHeads& c) {
    return std::tuple{Field{"view", c.view}, Field{"scale", c.scale}, Field{"scale_stride", c.scale_stride}};
}

inline auto fields_of(RotaryAndCacheArgs& a) {
    return std::tuple{Field{"rotary", a.rotary}, Field{"k", a.k}, Field{"v", a.v}, Field{"slots", a.slots},
                      Field{"cached_as", a.cached_as}};
}

inline auto fields_of(QkNorm& n) {
    return std::tuple{Field{"q_weight", n.q_weight}, Field{"k_weight", n.k_weight}, Field{"eps", n.eps},
                      Field{"weight_offset", n.weight_offset}, Field{"over", n.over}};
}

inline auto fields_of(QkNormRotaryArgs& a) {
    return std::tuple{Field{"", static_cast<QkNorm&>(a)}, Field{"rotary", a.rotary}};
}

inline auto fields_of(OutputGradient& g) {
    return std::tuple{Field{"data", g.data}, Field{"strides", g.strides}, Field{"weights", g.weights},
                      Field{"weight_sums", g.weight_sums}};
}

inline auto fields_of(QkNormRotaryGradientArgs& a) {
    return std::tuple{Field{"call", a.call}, Field{"q", a.q}, Field{"k", a.k}};
}

inline auto fields_of(QkNormRotaryAndCacheArgs& a) {
    return std::tuple{Field{"", static_cast<RotaryAndCacheArgs&>(a)},
                      Field{"", static_cast<QkNorm&>(a)},
                      Field{"q_stored_as", a.q_stored_as},
                      Field{"q_scale", a.q_scale},
                      Field{"q_scale_stride", a.q_scale_stride},
                      Field{"q_scale_out", a.q_scale_out},
                      Field{"q_scale_out_strides", a.q_scale_out_strides},
                      Field{"gate", a.gate}};
}

inline auto fields_of(LearnableRotaryArgs& a) {
    return std::tuple{Field{"rotary", a.rotary},
                      Field{"frequencies", a.frequencies},
                      Field{"attention_factors", a.attention_factors},
                      Field{"table_dtype", a.table_dtype},
                      Field{"tables", a.tables},
                      Field{"packed_tables", a.packed_tables}};
}

inline auto fields_of(RotatedGradient& g) {
    return std::tuple{Field{"data", g.data}, Field{"strides", g.strides}};
}

inline auto fields_of(LearnableRotaryGradientArgs& a) {
    return std::tuple{Field{"call", a.call},
                      Field{"q", a.q},
                      Field{"k", a.k},
                      Field{"frequencies", a.frequencies},
                      Field{"attention_factors", a.attention_factors},
                      Field{"table_sums", a.table_sums}};
}

inline auto fields_of(CopiedPart& p) {
    return std::tuple{Field{"view", p.view}, Field{"dim", p.dim}};
}

inline auto fields_of(MlaRotaryArgs& a) {
    return std::tuple{Field{"rotary", a.rotary}, Field{"q_nope", a.q_nope}, Field{"k_nope", a.k_nope}};
}

inline auto fields_of(MlaRotaryGradientArgs& a) {
    return std::tuple{Field{"rotary", a.rotary}, Field{"q_nope", a.q_nope}};
}

inline auto fields_of(MlaRotaryAndCacheArgs& a) {
    return std::tuple{Field{"rotary", a.rotary}, Field{"latent", a.latent}, Field{"slots", a.slots},
                      Field{"cached_as", a.cached_as}, Field{"scale", a.scale}};
}

inline auto fields_of(RescaleCacheArgs& a) {
    return std::tuple{Field{"keys", a.keys},
                      Field{"strides", a.strides},
                      Field{"positions", a.positions},
                      Field{"tables", a.tables},
                      Field{"table_count", a.table_count},
                      Field{"table_layers", a.table_layers},
                      Field{"layer_of_keys", a.layer_of_keys},
                      Field{"table_rows", a.table_rows},
                      Field{"table_heads", a.table_heads},
                      Field{"from", a.from},
                      Field{"to", a.to},
                      Field{"batch", a.batch},
                      Field{"tokens", a.tokens},
                      Field{"heads", a.heads},
                      Field{"rotary_dim", a.rotary_dim},
                      Field{"dtype", a.dtype},
                      Field{"pairing", a.pairing}};
}

// Calls visit(path, value) for every field that is no struct of fields. A new field that is not listed above does not
// compile.
template <class Args, class Visit>
void for_each_leaf(Args& args, const Visit& visit, const std::string& path = "") {
    const auto fields = fields_of(args);
    static_assert(std::tuple_size_v<std::remove_cv_t<decltype(fields)>> == field_count<Args>(), "list every field");
    const auto visit_field = [&](const auto& field) {
        const bool is_nested = !path.empty() && field.name[0] != '\0';
        const std::string name = path + (is_nested ? "." : "") + field.name;
        if constexpr (requires { fields_of(field.value); }) {
            for_each_leaf(field.value, visit, name);
        } else {
            visit(name, field.value);
        }
    };
    std::apply([&](const auto&... field) { (visit_field(field), ...); }, fields);
}

}  // namespace mrrope::testing
