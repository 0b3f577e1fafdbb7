#include "rotary_args.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <vector>

namespace mrrope {
namespace {

// Which dimension of q and k is which; -1 where there is none.
struct Layout {
    const char* name;
    const char* shape;
    int batch;
    int token;
    int head;

    int rank() const { return batch < 0 ? 3 : 4; }
};

constexpr std::array layouts{
    Layout{"bhsd", "[batch, heads, tokens, head_dim]", 0, 2, 1},
    Layout{"bshd", "[batch, tokens, heads, head_dim]", 0, 1, 2},
    Layout{"thd", "[tokens, heads, head_dim]", -1, 0, 1},
};

Layout layout_named(std::string_view name) {
    for (const Layout& layout : layouts) {
        if (name == layout.name) return layout;
    }
    TORCH_CHECK_VALUE(false, "layout must be one of bhsd, bshd, thd, got '", name, "'");
}

Pairing pairing_named(std::string_view name) {
    if (name == "halves") return Pairing::halves;
    if (name == "interleaved") return Pairing::interleaved;
    TORCH_CHECK_VALUE(false, "pairing must be one of halves, interleaved, got '", name, "'");
}

DType dtype_of(at::ScalarType type) {
    switch (type) {
        case at::kDouble: return DType::float64;
        case at::kFloat: return DType::float32;
        case at::kHalf: return DType::float16;
        case at::kBFloat16: return DType::bfloat16;
        default: break;
    }
    TORCH_CHECK_TYPE(false, "q must be float64, float32, float16 or bfloat16, got ", type);
}

int64_t size_or_one(const at::Tensor& tensor, int dim) {
    return dim < 0 ? 1 : tensor.size(dim);
}

// A dimension of one element is never stepped along, and torch leaves anything at all as its stride.
int64_t step(const at::Tensor& tensor, int dim) {
    return dim < 0 || tensor.size(dim) <= 1 ? 0 : tensor.stride(dim);
}

HeadStrides strides_of(const at::Tensor& tensor, const Layout& layout) {
    return {step(tensor, layout.batch), step(tensor, layout.token), step(tensor, layout.head)};
}

void check_heads(at::TensorList heads, const Layout& layout) {
    const at::Tensor& q = heads[0];
    for (size_t i = 0; i < heads.size(); ++i) {
        const at::Tensor& x = heads[i];
        TORCH_CHECK_VALUE(x.numel() == 0 || x.stride(-1) == 1, head_name(i), " must be ", layout.shape,
                          " with a contiguous last dimension, got strides ", x.strides());
    }
    if (heads.size() == 1) return;
    const at::Tensor& k = heads[1];
    const bool agree = size_or_one(q, layout.batch) == size_or_one(k, layout.batch) &&
                       q.size(layout.token) == k.size(layout.token) && q.size(-1) == k.size(-1);
    TORCH_CHECK_VALUE(agree, "k must be ", layout.shape, " and differ from q in the number of heads only, got k of ",
                      k.sizes(), " for q of ", q.sizes());
}

// positions of [rows, batch, tokens], and which row turns each pair.
PositionsView position_rows_of(const at::Tensor& positions, const at::Tensor& table, const at::Tensor& q,
                               const Layout& layout) {
    const int64_t tokens = q.size(layout.token);
    const int64_t batch = size_or_one(q, layout.batch);
    TORCH_CHECK_VALUE(layout.batch >= 0 && positions.size(0) >= 1 && positions.size(2) == tokens &&
                          (positions.size(1) == batch || positions.size(1) == 1),
                      "positions with a table of two rows must be [rows, ", batch, ", ", tokens, "] for q of ",
                      q.sizes(), " in layout ", layout.name, ", got ", positions.sizes());
    const auto* row_of_pair = static_cast<const int64_t*>(table.const_data_ptr()) + table.size(1);
    if (table.is_cpu()) {
        for (int64_t pair = 0; pair < table.size(1) - 1; ++pair) {
            TORCH_CHECK_VALUE(0 <= row_of_pair[pair] && row_of_pair[pair] < positions.size(0),
                              "table's second row must name rows of positions, 0 to ", positions.size(0) - 1, ", got ",
                              row_of_pair[pair], " for pair ", pair);
        }
    }
    return {.data = positions.const_data_ptr(),
            .is_int64 = positions.scalar_type() == at::kLong,
            .batch_stride = step(positions, 1),
            .token_stride = step(positions, 2),
            .rows = positions.size(0),
            .row_stride = step(positions, 0),
            .row_of_pair = reinterpret_cast<const uint64_t*>(row_of_pair)};
}

PositionsView positions_of(const at::Tensor& positions, const at::Tensor& q, const Layout& layout) {
    const int64_t tokens = q.size(layout.token);
    const int64_t batch = size_or_one(q, layout.batch);
    const bool is_row = positions.dim() == 1 && positions.size(0) == tokens;
    const bool is_matrix = layout.batch >= 0 && positions.dim() == 2 && positions.size(1) == tokens &&
                           (positions.size(0) == batch || positions.size(0) == 1);
    if (layout.batch >= 0) {
        TORCH_CHECK_VALUE(is_row || is_matrix, "positions must be [", tokens, "], [1, ", tokens, "] or [", batch, ", ",
                          tokens, "] for q of ", q.sizes(), " in layout ", layout.name, ", got ", positions.sizes());
    } else {
        TORCH_CHECK_VALUE(is_row, "positions must be [", tokens, "] for q of ", q.sizes(), " in layout ", layout.name,
                          ", got ", positions.sizes());
    }
    return {.data = positions.const_data_ptr(),
            .is_int64 = positions.scalar_type() == at::kLong,
            .batch_stride = is_matrix ? step(positions, 0) : 0,
            .token_stride = step(positions, positions.dim() - 1)};
}

int rotary_dim_of(const at::Tensor& table, const at::Tensor& q) {
    const bool is_row = table.dim() == 1 || (table.dim() == 2 && table.size(0) == 2);
    TORCH_CHECK_VALUE(
        is_row && table.size(-1) >= 2 && table.is_contiguous(),
        "table must be a contiguous int64 tensor of rotary_dim / 2 turns and the attention factor, or two "
        "such rows, the second for positions with rows, got ",
        table.sizes(), " with strides ", table.strides());
    const int64_t rotary_dim = 2 * (table.size(-1) - 1);
    TORCH_CHECK_VALUE(rotary_dim <= q.size(-1), "table.rotary_dim must be at most head_dim, the last dimension of q (",
                      q.size(-1), "), got ", rotary_dim);
    return static_cast<int>(rotary_dim);
}

// Whether every element has memory of its own: sorted by stride, each dimension must step over all the ones below it.
bool has_own_memory(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return true;
    std::vector<int64_t> dims(tensor.dim());
    std::iota(dims.begin(), dims.end(), 0);
    std::sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
    int64_t reach = 1;
    for (const int64_t dim : dims) {
        if (tensor.size(dim) == 1) continue;
        if (tensor.stride(dim) < reach) return false;
        reach += tensor.stride(dim) * (tensor.size(dim) - 1);
    }
    return true;
}

HeadsView view_of(const at::Tensor& in, const at::Tensor& out, const Layout& layout) {
    const int64_t heads = in.size(layout.head);
    TORCH_CHECK_VALUE(heads <= std::numeric_limits<int>::max(), "q and k must have fewer than 2^31 heads, got ", heads);
    return {.in = in.const_data_ptr(),
            .out = out.data_ptr(),
            .heads = static_cast<int>(heads),
            .in_strides = strides_of(in, layout),
            .out_strides = strides_of(out, layout)};
}

}  // namespace

void check_writable(at::TensorList heads, std::string_view layout) {
    check_heads(heads, layout_named(layout));
    for (size_t i = 0; i < heads.size(); ++i) {
        TORCH_CHECK(has_own_memory(heads[i]), head_name(i),
                    " must not overlap itself in memory to be rotated in place, got strides ", heads[i].strides(),
                    " for shape ", heads[i].sizes(), " (an expanded tensor? clone it first)");
    }
    if (heads.size() == 1) return;
    const at::MemOverlapStatus status = at::get_overlap_status(heads[0], heads[1]);
    TORCH_CHECK(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial &&
                    (heads[0].numel() == 0 || heads[0].const_data_ptr() != heads[1].const_data_ptr()),
                "q and k must not share memory to be rotated in place, got overlapping tensors of ", heads[0].sizes(),
                " and ", heads[1].sizes());
}

const char* head_name(size_t index) {
    return index == 0 ? "q" : "k";
}

void check_kinds(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
                 std::string_view layout_name, std::string_view pairing) {
    TORCH_CHECK_VALUE(heads.size() == 1 || heads.size() == 2, "heads must be [q] or [q, k], got ", heads.size(),
                      " tensors");
    const Layout layout = layout_named(layout_name);
    pairing_named(pairing);
    const at::Tensor& q = heads[0];
    dtype_of(q.scalar_type());
    for (size_t i = 0; i < heads.size(); ++i) {
        const at::Tensor& x = heads[i];
        TORCH_CHECK_VALUE(x.dim() == layout.rank(), head_name(i), " must be ", layout.shape, " for layout ",
                          layout.name, ", got a tensor of ", x.dim(), " dimensions");
        TORCH_CHECK_TYPE(x.scalar_type() == q.scalar_type(), "k must have q's dtype ", q.scalar_type(), ", got ",
                         x.scalar_type());
        TORCH_CHECK(x.device() == q.device(), "k must be on q's device ", q.device(), ", got ", x.device());
    }
    TORCH_CHECK_TYPE(positions.scalar_type() == at::kInt || positions.scalar_type() == at::kLong,
                     "positions must be int32 or int64, got ", positions.scalar_type());
    TORCH_CHECK(positions.device() == q.device(), "positions must be on q's device ", q.device(), ", got ",
                positions.device());
    TORCH_CHECK_TYPE(table.scalar_type() == at::kLong, "table must be an int64 tensor, got ", table.scalar_type());
    TORCH_CHECK(table.device() == q.device(), "table must be on q's device ", q.device(), ", got ", table.device());
}

RotaryArgs rotary_args(at::TensorList in, at::TensorList out, const at::Tensor& positions, const at::Tensor& table,
                       std::string_view layout_name, std::string_view pairing, bool conjugate) {
    check_kinds(in, positions, table, layout_name, pairing);
    const Layout layout = layout_named(layout_name);
    check_heads(in, layout);
    if (in[0].is_same(out[0])) check_writable(in, layout_name);

    const at::Tensor& q = in[0];
    RotaryArgs args;
    args.rotary_dim = rotary_dim_of(table, q);
    args.positions = table.dim() == 2 && positions.dim() == 3 ? position_rows_of(positions, table, q, layout)
                                                              : positions_of(positions, q, layout);
    args.table = static_cast<const uint64_t*>(table.const_data_ptr());
    args.batch = size_or_one(q, layout.batch);
    args.tokens = q.size(layout.token);
    args.head_dim = static_cast<int>(q.size(-1));
    args.dtype = dtype_of(q.scalar_type());
    args.pairing = pairing_named(pairing);
    args.conjugate = conjugate;
    args.q = view_of(q, out[0], layout);
    if (in.size() == 2) args.k = view_of(in[1], out[1], layout);
    const int64_t per_token = (static_cast<int64_t>(args.q.heads) + args.k.heads) * args.head_dim;
    TORCH_CHECK_VALUE(per_token <= std::numeric_limits<int>::max(),
                      "q and k must have fewer than 2^31 components a token, got ", per_token);
    return args;
}

}  // namespace mrrope
