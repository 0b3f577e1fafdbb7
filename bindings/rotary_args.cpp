#include "rotary_args.h"

#include <c10/util/Exception.h>

#include <limits>

namespace mrrope {
namespace {

void check_heads(at::TensorList heads, const Layout& layout, const char* q_name) {
    for (size_t i = 0; i < heads.size(); ++i) check_last_dimension(named_head(heads, i, q_name), layout);
    if (heads.size() == 2) check_k_matches_q(heads[0], heads[1], layout);
}

}  // namespace

void check_table_shape(const at::Tensor& table) {
    const bool is_stack = table.dim() >= 2 && table.size(0) >= 1;
    const bool has_form = table.dim() == 1 || (is_stack && table.dim() == 2) ||
                          (is_stack && table.dim() == 3 && table.size(1) == 2) ||
                          (is_stack && table.dim() == 4 && table.size(1) >= 1 && table.size(2) >= 1);
    TORCH_CHECK_VALUE(has_form && table.size(-1) >= 2 && table.is_contiguous(),
                      "table must be a contiguous int64 tensor of rotary_dim / 2 turns and the attention factor, or a "
                      "stack of those, or of pairs of rows, the second for positions with rows, or of rows of head "
                      "tables, [tables, rows, heads, words], those from the third on for query factors, got ",
                      table.sizes(), " with strides ", table.strides());
}

at::Tensor without_query_factors(const at::Tensor& table) {
    return has_query_factors(table) ? table.slice(1, 0, head_table_rows).contiguous() : table;
}

namespace {

TableChoice table_choice(const RotaryCall& call, const Layout& layout) {
    const at::Tensor& q = call.heads[0];
    const at::Tensor& table = call.table;
    const OptionalTensor& index = call.table_index;
    if (table.dim() == 1) {
        TORCH_CHECK_VALUE(!index, "table_index must come with a stack of tables, got one table");
        return {};
    }
    const int64_t count = table.size(0);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(count <= most, "table must be a stack of less than 2^31 tables, got ", count);
    TORCH_CHECK_VALUE(table.numel() / count <= most, "table must have less than 2^31 words in each of its ", count,
                      " tables, got ", table.numel() / count);
    TableChoice choice{.count = static_cast<int32_t>(count), .stride = static_cast<int32_t>(table.numel() / count)};
    if (table.dim() == 4) {
        choice.heads = static_cast<int32_t>(table.size(2));
        choice.head_stride = static_cast<int32_t>(table.size(3));
        if (has_query_factors(table)) choice.query_factors = query_factors_of(table);
    }
    if (!index) {
        TORCH_CHECK_VALUE(count == 1 || (layout.batch >= 0 && count == layout.batch_of(q)),
                          "table must be one, or one ", "for each of the ", layout.batch_of(q),
                          " sequences, or come with a table_index, got ", count, " tables");
        return choice;
    }
    const int64_t expected = layout.batch < 0 ? q.size(layout.token) : layout.batch_of(q);
    TORCH_CHECK_VALUE(index->dim() == 1 && index->size(0) == expected, "table_index must be [", expected, "], one ",
                      layout.batch < 0 ? "a token" : "a sequence", ", for ", call.q_name, " of ", q.sizes(),
                      " in layout ", layout.name, ", got ", index->sizes());
    const int64_t stride = stride_or_zero(*index, 0);
    TORCH_CHECK_VALUE(stride <= most, "table_index must have its elements less than 2^31 apart, got a stride of ",
                      stride);
    check_range({"table_index", *index}, count);
    choice.index = static_cast<const int32_t*>(index->const_data_ptr());
    (layout.batch < 0 ? choice.token_stride : choice.batch_stride) = static_cast<int32_t>(stride);
    return choice;
}

}  // namespace

void check_head_kinds(at::TensorList heads, std::string_view layout, std::string_view pairing, const char* q_name) {
    TORCH_CHECK_VALUE(heads.size() == 1 || heads.size() == 2, "heads must be [q] or [q, k], got ", heads.size(),
                      " tensors");
    const Layout dims = layout_named(layout);
    pairing_named(pairing);
    const NamedTensor q = named_head(heads, 0, q_name);
    dtype_of(q);
    for (size_t i = 0; i < heads.size(); ++i) {
        const NamedTensor x = named_head(heads, i, q_name);
        check_rank(x, dims);
        check_like(x, q);
    }
}

void check_kinds(const RotaryCall& call) {
    check_head_kinds(call.heads, call.layout, call.pairing, call.q_name);
    const NamedTensor q = call.head(0);
    check_positions_kind({"positions", call.positions}, q);
    check_table_kind(call.table, q);
    if (call.table_index) check_index_kind({"table_index", *call.table_index}, q);
}

void check_writable(const RotaryCall& call) {
    check_heads(call.heads, layout_named(call.layout), call.q_name);
    call.each_head(check_no_internal_overlap);
    if (call.heads.size() == 2) check_no_overlap(call.head(0), call.head(1), " to be rotated in place");
}

RotaryArgs head_args(at::TensorList heads, at::TensorList out, const Layout& layout, const char* q_name) {
    check_heads(heads, layout, q_name);
    const NamedTensor q = named_head(heads, 0, q_name);
    RotaryArgs args;
    args.batch = layout.batch_of(q.tensor);
    args.tokens = q.tensor.size(layout.token);
    args.head_dim = head_dim_of(q);
    args.dtype = dtype_of(q);
    args.q = heads_view(q, out[0], layout, layout);
    if (heads.size() == 2) args.k = heads_view(named_head(heads, 1), out[1], layout, layout);
    const int64_t per_token = (static_cast<int64_t>(args.q.heads) + args.k.heads) * args.head_dim;
    TORCH_CHECK_VALUE(per_token <= std::numeric_limits<int>::max(),
                      "q and k must have fewer than 2^31 components a token, got ", per_token);
    return args;
}

RotaryArgs rotary_args(const RotaryCall& call, at::TensorList out) {
    const Layout layout = layout_named(call.layout);
    const NamedTensor q = call.head(0);
    if (q.tensor.is_same(out[0])) check_writable(call);
    RotaryArgs args = head_args(call.heads, out, layout, call.q_name);
    check_table_shape(call.table);
    check_factors(call.table);
    call.each_head([&](NamedTensor x) { check_heads_have_tables(x, layout, call.table); });
    check_query_factors(q, layout, call.table);
    args.rotary_dim = rotary_dim_of(call.table, q);
    args.positions = positions_view({"positions", call.positions}, q, layout, call.table);
    args.table = static_cast<const uint64_t*>(call.table.const_data_ptr());
    args.choice = table_choice(call, layout);
    args.pairing = pairing_named(call.pairing);
    args.conjugate = call.conjugate;
    return args;
}

}  // namespace mrrope
