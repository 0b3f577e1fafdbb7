#include "rotary_args.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <limits>

#include "mrrope/rotation.h"
#include "tensor_views.h"

namespace mrrope {
namespace {

NamedHeads named(at::TensorList heads, size_t index) {
    return {head_name(index), heads[index]};
}

void check_heads(at::TensorList heads, const Layout& layout) {
    for (size_t i = 0; i < heads.size(); ++i) check_last_dimension(named(heads, i), layout);
    if (heads.size() == 1) return;
    const at::Tensor& q = heads[0];
    const at::Tensor& k = heads[1];
    const bool agree = layout.batch_of(q) == layout.batch_of(k) && q.size(layout.token) == k.size(layout.token) &&
                       q.size(-1) == k.size(-1);
    TORCH_CHECK_VALUE(agree, "k must be ", layout.shape, " and differ from q in the number of heads only, got k of ",
                      k.sizes(), " for q of ", q.sizes());
}

void check_table_shape(const at::Tensor& table) {
    const bool has_form = table.dim() == 1 || (table.dim() == 2 && table.size(0) >= 1) ||
                          (table.dim() == 3 && table.size(0) >= 1 && table.size(1) == 2);
    TORCH_CHECK_VALUE(has_form && table.size(-1) >= 2 && table.is_contiguous(),
                      "table must be a contiguous int64 tensor of rotary_dim / 2 turns and the attention factor, or a "
                      "stack of those, or of pairs of rows, the second for positions with rows, got ",
                      table.sizes(), " with strides ", table.strides());
}

TableChoice choice_of(const at::Tensor& table, const std::optional<at::Tensor>& index, const at::Tensor& q,
                      const Layout& layout) {
    if (table.dim() == 1) {
        TORCH_CHECK_VALUE(!index, "table_index must come with a stack of tables, got one table");
        return {};
    }
    const int64_t count = table.size(0);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    TORCH_CHECK_VALUE(count <= most, "table must be a stack of less than 2^31 tables, got ", count);
    TableChoice choice{.count = static_cast<int32_t>(count), .stride = static_cast<int32_t>(table.numel() / count)};
    if (!index) {
        TORCH_CHECK_VALUE(count == 1 || (layout.batch >= 0 && count == layout.batch_of(q)),
                          "table must be one, or one ", "for each of the ", layout.batch_of(q),
                          " sequences, or come with a table_index, got ", count, " tables");
        return choice;
    }
    const int64_t expected = layout.batch < 0 ? q.size(layout.token) : layout.batch_of(q);
    TORCH_CHECK_VALUE(index->dim() == 1 && index->size(0) == expected, "table_index must be [", expected, "], one ",
                      layout.batch < 0 ? "a token" : "a sequence", ", for q of ", q.sizes(), " in layout ", layout.name,
                      ", got ", index->sizes());
    const int64_t apart = step(*index, 0);
    TORCH_CHECK_VALUE(apart <= most, "table_index must have its elements less than 2^31 apart, got a stride of ",
                      apart);
    check_range("table_index", *index, count);
    choice.index = static_cast<const int32_t*>(index->const_data_ptr());
    (layout.batch < 0 ? choice.token_stride : choice.batch_stride) = static_cast<int32_t>(apart);
    return choice;
}

// positions of [rows, batch, tokens], and which row turns each pair.
PositionsView position_rows_of(const at::Tensor& positions, const at::Tensor& table, const at::Tensor& q,
                               const Layout& layout) {
    const int64_t tokens = q.size(layout.token);
    const int64_t batch = layout.batch_of(q);
    TORCH_CHECK_VALUE(layout.batch >= 0 && positions.size(0) >= 1 && positions.size(2) == tokens &&
                          (positions.size(1) == batch || positions.size(1) == 1),
                      "positions with a table of two rows must be [rows, ", batch, ", ", tokens, "] for q of ",
                      q.sizes(), " in layout ", layout.name, ", got ", positions.sizes());
    const int64_t words = table.size(-1);
    const auto* row_of_pair = static_cast<const uint64_t*>(table.const_data_ptr()) + words;
    if (table.is_cpu()) {
        for (int64_t i = 0; i < table.size(0) * (words - 1); ++i) {
            const int64_t pair = i % (words - 1);
            const uint64_t row = without_negation(row_of_pair[i / (words - 1) * 2 * words + pair]);
            TORCH_CHECK_VALUE(row < static_cast<uint64_t>(positions.size(0)),
                              "table's second row must name rows of positions, 0 to ", positions.size(0) - 1, ", got ",
                              row, " for pair ", pair);
        }
    }
    return {.data = positions.const_data_ptr(),
            .is_int64 = positions.scalar_type() == at::kLong,
            .batch_stride = step(positions, 1),
            .token_stride = step(positions, 2),
            .rows = positions.size(0),
            .row_stride = step(positions, 0),
            .row_of_pair = row_of_pair};
}

HeadsView view_of(NamedHeads in, const at::Tensor& out, const Layout& layout) {
    return {.in = in.tensor.const_data_ptr(),
            .out = out.data_ptr(),
            .heads = heads_of(in, layout),
            .in_strides = strides_of(in.tensor, layout),
            .out_strides = strides_of(out, layout)};
}

}  // namespace

void check_writable(at::TensorList heads, std::string_view layout) {
    check_heads(heads, layout_named(layout));
    for (size_t i = 0; i < heads.size(); ++i) check_own_memory(named(heads, i));
    if (heads.size() == 1) return;
    check_apart(named(heads, 0), named(heads, 1), " to be rotated in place");
}

const char* head_name(size_t index) {
    return index == 0 ? "q" : "k";
}

void check_kinds(at::TensorList heads, const RotaryOptions& options) {
    TORCH_CHECK_VALUE(heads.size() == 1 || heads.size() == 2, "heads must be [q] or [q, k], got ", heads.size(),
                      " tensors");
    const Layout layout = layout_named(options.layout);
    pairing_named(options.pairing);
    const at::Tensor& q = heads[0];
    dtype_of(named(heads, 0));
    for (size_t i = 0; i < heads.size(); ++i) {
        const at::Tensor& x = heads[i];
        check_rank(named(heads, i), layout);
        TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), "k must have q's dtype ", q.scalar_type(), ", got ",
                         x.scalar_type());
        TORCH_CHECK(x.device() == q.device(), "k must be on q's device ", q.device(), ", got ", x.device());
    }
    check_positions_kind(options.positions, named(heads, 0));
    check_table_kind(options.table, named(heads, 0));
    if (options.table_index) check_index_kind("table_index", *options.table_index, named(heads, 0));
}

RotaryArgs rotary_args(at::TensorList in, at::TensorList out, const RotaryOptions& options) {
    check_kinds(in, options);
    const Layout layout = layout_named(options.layout);
    check_heads(in, layout);
    if (in[0].is_same(out[0])) check_writable(in, options.layout);

    const at::Tensor& q = in[0];
    const at::Tensor& table = options.table;
    check_table_shape(table);
    check_attention_factors(table);
    RotaryArgs args;
    args.rotary_dim = rotary_dim_of(table, named(in, 0));
    args.positions = table.dim() == 3 && options.positions.dim() == 3
                         ? position_rows_of(options.positions, table, q, layout)
                         : positions_of(options.positions, named(in, 0), layout);
    args.table = static_cast<const uint64_t*>(table.const_data_ptr());
    args.choice = choice_of(table, options.table_index, q, layout);
    args.batch = layout.batch_of(q);
    args.tokens = q.size(layout.token);
    args.head_dim = static_cast<int>(q.size(-1));
    args.dtype = dtype_of(named(in, 0));
    args.pairing = pairing_named(options.pairing);
    args.conjugate = options.conjugate;
    args.q = view_of(named(in, 0), out[0], layout);
    if (in.size() == 2) args.k = view_of(named(in, 1), out[1], layout);
    const int64_t per_token = (static_cast<int64_t>(args.q.heads) + args.k.heads) * args.head_dim;
    TORCH_CHECK_VALUE(per_token <= std::numeric_limits<int>::max(),
                      "q and k must have fewer than 2^31 components a token, got ", per_token);
    return args;
}

}  // namespace mrrope
