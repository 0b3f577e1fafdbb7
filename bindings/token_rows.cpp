#include "token_rows.h"

#include <c10/util/Exception.h>

namespace mrrope {
namespace {

const char* row_shape(const Layout& layout) {
    return layout.batch < 0 ? "[tokens, dim]" : "[batch, tokens, dim]";
}

}  // namespace

Layout row_layout(const at::Tensor& rows, const Layout& layout) {
    if (rows.dim() == layout.rank()) return layout;
    return {layout.name, row_shape(layout), layout.batch, layout.batch < 0 ? 0 : 1, -1};
}

void check_row_kind(NamedTensor rows, HeadDimension head, NamedTensor q, const Layout& layout) {
    const int64_t dims = rows.tensor.dim();
    if (head == HeadDimension::allowed) {
        TORCH_CHECK_VALUE(dims == layout.rank() - 1 || dims == layout.rank(), rows.name, " must be ", row_shape(layout),
                          ", or ", layout.shape, " with one head, for layout ", layout.name, ", got a tensor of ", dims,
                          " dimensions");
    } else {
        TORCH_CHECK_VALUE(dims == layout.rank() - 1, rows.name, " must be ", row_shape(layout), " for layout ",
                          layout.name, ", got a tensor of ", dims, " dimensions");
    }
    check_like(rows, q);
}

void check_row_sizes(NamedTensor rows, NamedTensor q, const Layout& layout) {
    const at::Tensor& x = rows.tensor;
    const Layout dims = row_layout(x, layout);
    const bool fits = dims.batch_of(x) == layout.batch_of(q.tensor) &&
                      x.size(dims.token) == q.tensor.size(layout.token) && (dims.head < 0 || x.size(dims.head) == 1);
    TORCH_CHECK_VALUE(fits, rows.name, " must be ", dims.shape, dims.head < 0 ? "" : " with one head and", " with the ",
                      layout.batch_of(q.tensor), " sequences of ", q.tensor.size(layout.token), " tokens of ", q.name,
                      ", got ", x.sizes());
    check_last_dimension(rows, dims);
}

void check_one_table_for_all_heads(const at::Tensor& table) {
    TORCH_CHECK_VALUE(table.dim() != 4 || table.size(2) == 1,
                      "table must be one for all heads, since they share the rope part of the key, got ", table.size(2),
                      " head tables");
    TORCH_CHECK_VALUE(!has_query_factors(table), "table must be one without query factors, got ", table.sizes());
}

HeadsView behind(const HeadsView& heads, int64_t components, DType dtype) {
    HeadsView rest = heads;
    rest.in = static_cast<const char*>(heads.in) + components * size_of(dtype);
    rest.out = static_cast<char*>(heads.out) + components * size_of(dtype);
    return rest;
}

}  // namespace mrrope
