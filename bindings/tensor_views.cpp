#include "tensor_views.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include "mrrope/frequency_table.h"
#include "mrrope/rotation.h"

namespace mrrope {
namespace {

constexpr std::array layouts{
    Layout{"bhsd", "[batch, heads, tokens, head_dim]", 0, 2, 1},
    Layout{"bshd", "[batch, tokens, heads, head_dim]", 0, 1, 2},
    Layout{"thd", "[tokens, heads, head_dim]", -1, 0, 1},
};

// (stride, size) of the dimensions longer than 1, innermost first.
auto sorted_dims(const at::Tensor& tensor) {
    c10::SmallVector<std::pair<int64_t, int64_t>, 4> dims;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        if (tensor.size(dim) > 1) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
    std::sort(dims.begin(), dims.end());
    return dims;
}

bool has_internal_overlap(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return false;
    int64_t extent = 1;
    for (const auto& [stride, size] : sorted_dims(tensor)) {
        if (stride < extent) return true;
        extent += stride * (size - 1);
    }
    return false;
}

// How often two tensors step by a stride, in bytes.
struct SharedDim {
    int64_t stride;
    int64_t a_steps;
    int64_t b_steps;
};

using SharedDims = c10::SmallVector<SharedDim, 10>;

// The dimensions of both tensors, and the bytes of their elements, by stride, innermost first.
SharedDims shared_dims(const at::Tensor& a, const at::Tensor& b) {
    SharedDims dims{{1, a.element_size() - 1, b.element_size() - 1}};
    const auto add = [&](const at::Tensor& x, int64_t SharedDim::* steps) {
        for (const auto& [stride, size] : sorted_dims(x)) {
            const int64_t bytes = stride * x.element_size();
            const auto same = std::find_if(dims.begin(), dims.end(), [&](auto& dim) { return dim.stride == bytes; });
            SharedDim& dim = same == dims.end() ? dims.emplace_back(SharedDim{bytes, 0, 0}) : *same;
            dim.*steps += size - 1;
        }
    };
    add(a, &SharedDim::a_steps);
    add(b, &SharedDim::b_steps);
    std::sort(dims.begin(), dims.end(), [](const SharedDim& x, const SharedDim& y) { return x.stride < y.stride; });
    return dims;
}

// Whether a byte of a and a byte of b, each counted from its tensor's first, are `difference` apart. Only those steps
// of the outermost dimension are tried from which the inner ones reach the rest: one or two in slices of one tensor.
bool can_be_apart(c10::ArrayRef<SharedDim> dims, int64_t difference) {
    if (dims.empty()) return difference == 0;
    const c10::ArrayRef<SharedDim> inner = dims.slice(0, dims.size() - 1);
    const auto& [stride, a_steps, b_steps] = dims.back();
    if (stride == 0) return can_be_apart(inner, difference);
    int64_t lowest = 0;
    int64_t highest = 0;
    for (const SharedDim& dim : inner) {
        lowest -= dim.b_steps * dim.stride;
        highest += dim.a_steps * dim.stride;
    }
    // Rounded towards zero, which may add a step, and never leaves one out.
    const int64_t first = std::max(-b_steps, (difference - highest) / stride - 1);
    const int64_t last = std::min(a_steps, (difference - lowest) / stride + 1);
    for (int64_t step = first; step <= last; ++step) {
        if (can_be_apart(inner, difference - step * stride)) return true;
    }
    return false;
}

// torch returns TooHard for views with gaps, such as q and k of one packed projection.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0) return false;
    const at::MemOverlapStatus status = at::get_overlap_status(a, b);
    if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
    const auto* a_start = static_cast<const char*>(a.const_data_ptr());
    const auto* b_start = static_cast<const char*>(b.const_data_ptr());
    return can_be_apart(shared_dims(a, b), b_start - a_start);
}

// "q's dtype ", or "the dtype of keys[0], ".
struct PropertyOf {
    const char* property;
    ArgumentName owner;
};

std::ostream& operator<<(std::ostream& stream, const PropertyOf& of) {
    if (of.owner.index < 0) return stream << of.owner << "'s " << of.property << " ";
    return stream << "the " << of.property << " of " << of.owner << ", ";
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, ArgumentName name) {
    stream << name.text;
    return name.index < 0 ? stream : stream << "[" << name.index << "]";
}

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

DType dtype_of(NamedTensor heads) {
    switch (heads.tensor.scalar_type()) {
        case at::kDouble: return DType::float64;
        case at::kFloat: return DType::float32;
        case at::kHalf: return DType::float16;
        case at::kBFloat16: return DType::bfloat16;
        default: break;
    }
    TORCH_CHECK_TYPE(false, heads.name, " must be float64, float32, float16 or bfloat16, got ",
                     heads.tensor.scalar_type());
}

void check_rank(NamedTensor heads, const Layout& layout) {
    TORCH_CHECK_VALUE(heads.tensor.dim() == layout.rank(), heads.name, " must be ", layout.shape, " for layout ",
                      layout.name, ", got a tensor of ", heads.tensor.dim(), " dimensions");
}

void check_device(NamedTensor x, NamedTensor reference) {
    TORCH_CHECK(x.tensor.device() == reference.tensor.device(), x.name, " must be on ", reference.name, "'s device ",
                reference.tensor.device(), ", got ", x.tensor.device());
}

void check_like(NamedTensor x, NamedTensor reference) {
    TORCH_CHECK_TYPE(x.tensor.scalar_type() == reference.tensor.scalar_type(), x.name, " must have ",
                     (PropertyOf{"dtype", reference.name}), reference.tensor.scalar_type(), ", got ",
                     x.tensor.scalar_type());
    TORCH_CHECK(x.tensor.device() == reference.tensor.device(), x.name, " must be on ",
                (PropertyOf{"device", reference.name}), reference.tensor.device(), ", got ", x.tensor.device());
}

void check_positions_kind(NamedTensor positions, NamedTensor reference) {
    const at::ScalarType dtype = positions.tensor.scalar_type();
    TORCH_CHECK_TYPE(dtype == at::kInt || dtype == at::kLong, positions.name, " must be int32 or int64, got ", dtype);
    check_device(positions, reference);
}

void check_table_kind(const at::Tensor& table, NamedTensor reference) {
    TORCH_CHECK_TYPE(table.scalar_type() == at::kLong, "table must be an int64 tensor, got ", table.scalar_type());
    check_device({"table", table}, reference);
}

void check_index_kind(NamedTensor index, NamedTensor reference) {
    TORCH_CHECK_TYPE(index.tensor.scalar_type() == at::kInt, index.name, " must be int32, got ",
                     index.tensor.scalar_type());
    check_device(index, reference);
}

void check_last_dimension(NamedTensor heads, const Layout& layout) {
    const at::Tensor& x = heads.tensor;
    TORCH_CHECK_VALUE(x.numel() == 0 || x.stride(-1) == 1, heads.name, " must be ", layout.shape,
                      " with a contiguous last dimension, got strides ", x.strides());
}

void check_k_matches_q(const at::Tensor& q, const at::Tensor& k, const Layout& layout) {
    TORCH_CHECK_VALUE(layout.batch_of(q) == layout.batch_of(k) && q.size(layout.token) == k.size(layout.token) &&
                          q.size(-1) == k.size(-1),
                      "k must be ", layout.shape, " and differ from q in the number of heads only, got k of ",
                      k.sizes(), " for q of ", q.sizes());
}

void check_no_internal_overlap(NamedTensor heads) {
    TORCH_CHECK(!has_internal_overlap(heads.tensor), heads.name,
                " must not overlap itself in memory to be written, got strides ", heads.tensor.strides(), " for shape ",
                heads.tensor.sizes(), " (an expanded tensor? clone it first)");
}

void check_no_overlap(NamedTensor a, NamedTensor b, const char* purpose) {
    TORCH_CHECK(!share_memory(a.tensor, b.tensor), a.name, " and ", b.name, " must not share memory", purpose,
                ", got overlapping tensors of ", a.tensor.sizes(), " and ", b.tensor.sizes());
}

void check_range(NamedTensor index, int64_t count) {
    if (!index.tensor.is_cpu()) return;
    const auto* values = static_cast<const int32_t*>(index.tensor.const_data_ptr());
    for (int64_t i = 0; i < index.tensor.size(0); ++i) {
        const int32_t value = values[i * stride_or_zero(index.tensor, 0)];
        TORCH_CHECK_INDEX(0 <= value && value < count, index.name, " must name one of ", count, " tables, 0 to ",
                          count - 1, ", got ", value, " at ", i);
    }
}

bool has_query_factors(const at::Tensor& table) {
    return table.dim() == 4 && table.sym_size(1) > head_table_rows;
}

const uint64_t* query_factors_of(const at::Tensor& table) {
    return static_cast<const uint64_t*>(table.const_data_ptr()) + head_table_rows * table.size(2) * table.size(3);
}

void check_factors(const at::Tensor& table) {
    if (!table.is_cpu()) return;
    const auto* words = static_cast<const uint64_t*>(table.const_data_ptr());
    const int64_t tables = table.dim() == 1 ? 1 : table.size(0);
    const int64_t heads = table.dim() == 4 ? table.size(2) : 1;
    for (int64_t i = 0; i < tables * heads; ++i) {
        const int64_t first_word = i / heads * (table.numel() / tables) + i % heads * table.size(-1);
        const double factor = factor_of(words[first_word + table.size(-1) - 1]);
        if (is_attention_factor(factor)) continue;
        const std::string of_head = heads == 1 ? "" : " of head " + std::to_string(i % heads);
        TORCH_CHECK_VALUE(false, "table must end with the bits of an attention factor, a positive ",
                          "finite number in float32's range, got ", factor, " in table ", i / heads, of_head);
    }
}

void check_query_factors(NamedTensor q, const Layout& layout, const at::Tensor& table) {
    if (!has_query_factors(table)) return;
    const int64_t heads = q.tensor.size(layout.head);
    const int64_t words = (table.size(1) - head_table_rows) * table.size(2) * table.size(3);
    TORCH_CHECK_VALUE(heads <= words, "table must have a query factor for each of the ", heads, " heads of ", q.name,
                      ", got rows for at most ", words);
    if (!table.is_cpu()) return;
    for (int64_t i = 0; i < table.size(0); ++i) {
        const uint64_t* factors = query_factors_of(table) + i * (table.numel() / table.size(0));
        // The words behind the last factor are 0.
        const int64_t count = words - std::count(factors, factors + words, 0);
        TORCH_CHECK_VALUE(count == heads, "table must have a query factor for each of the ", heads, " heads of ",
                          q.name, ", got ", count, " in table ", i);
        for (int64_t head = 0; head < heads; ++head) {
            const double factor = factor_of(factors[head]);
            TORCH_CHECK_VALUE(is_attention_factor(factor), "table must have query factors that are positive finite ",
                              "numbers in float32's range, got ", factor, " for head ", head, " in table ", i);
        }
    }
}

void check_heads_have_tables(NamedTensor heads, const Layout& layout, const at::Tensor& table) {
    if (table.dim() != 4) return;
    const int64_t count = heads.tensor.size(layout.head);
    TORCH_CHECK_VALUE(count % table.size(2) == 0, heads.name, " must have a multiple of ", table.size(2),
                      " heads, the number of head tables, got ", count);
}

int64_t stride_or_zero(const at::Tensor& tensor, int dim) {
    return dim < 0 || tensor.size(dim) <= 1 ? 0 : tensor.stride(dim);
}

std::vector<at::Tensor> empty_like_heads(at::TensorList heads) {
    std::vector<at::Tensor> out;
    out.reserve(heads.size());
    for (const at::Tensor& x : heads) {
        out.push_back(at::empty_like(x));
        // empty_like keeps the order of the strides: if x overlaps itself, its innermost dimension may not be the last.
        if (out.back().sym_stride(-1) != 1) out.back() = at::empty_like(x, at::MemoryFormat::Contiguous);
    }
    return out;
}

at::Tensor with_contiguous_last_dimension(const at::Tensor& gradient) {
    return gradient.sym_stride(-1) == 1 ? gradient : gradient.contiguous();
}

HeadStrides head_strides(const at::Tensor& heads, const Layout& layout) {
    return {stride_or_zero(heads, layout.batch), stride_or_zero(heads, layout.token),
            stride_or_zero(heads, layout.head)};
}

HeadsView heads_view(NamedTensor in, const at::Tensor& out, const Layout& in_layout, const Layout& out_layout) {
    return {.in = in.tensor.const_data_ptr(),
            .out = out.data_ptr(),
            .heads = head_count(in, in_layout),
            .in_strides = head_strides(in.tensor, in_layout),
            .out_strides = head_strides(out, out_layout)};
}

PositionsView positions_view(NamedTensor positions, NamedTensor heads, const Layout& layout) {
    const at::Tensor& x = heads.tensor;
    const at::Tensor& p = positions.tensor;
    const int64_t tokens = x.size(layout.token);
    const int64_t batch = layout.batch_of(x);
    const bool is_row = p.dim() == 1 && p.size(0) == tokens;
    const bool is_matrix =
        layout.batch >= 0 && p.dim() == 2 && p.size(1) == tokens && (p.size(0) == batch || p.size(0) == 1);
    if (layout.batch >= 0) {
        TORCH_CHECK_VALUE(is_row || is_matrix, positions.name, " must be [", tokens, "], [1, ", tokens, "] or [", batch,
                          ", ", tokens, "] for ", heads.name, " of ", x.sizes(), " in layout ", layout.name, ", got ",
                          p.sizes());
    } else {
        TORCH_CHECK_VALUE(is_row, positions.name, " must be [", tokens, "] for ", heads.name, " of ", x.sizes(),
                          " in layout ", layout.name, ", got ", p.sizes());
    }
    return {.data = p.const_data_ptr(),
            .is_int64 = p.scalar_type() == at::kLong,
            .batch_stride = is_matrix ? stride_or_zero(p, 0) : 0,
            .token_stride = stride_or_zero(p, p.dim() - 1)};
}

namespace {

// The second row of a table: `words` for each of its heads, the last of which is unused.
void check_rows_of_pairs(const uint64_t* row_of_pair, int64_t words_of_row, int64_t words, int64_t rows) {
    for (int64_t i = 0; i < words_of_row; ++i) {
        const int64_t pair = i % words;
        const int64_t pairs_from_here = words - 1 - pair;
        if (pairs_from_here == 0) continue;
        const int row = named_row(row_of_pair[i], 0);
        TORCH_CHECK_VALUE(row < rows, "table's second row must name rows of positions, 0 to ", rows - 1, ", got ", row,
                          " for pair ", pair);
        for (int ahead = 1; ahead < std::min<int64_t>(8, pairs_from_here); ++ahead) {
            const int expected = named_row(row_of_pair[i + ahead], 0);
            const int got = named_row(row_of_pair[i], ahead);
            TORCH_CHECK_VALUE(got == expected, "table's second row must repeat the row of pair ", pair + ahead, ", ",
                              expected, ", in byte ", ahead, " of the word of pair ", pair, ", got ", got);
        }
    }
}

}  // namespace

PositionsView positions_view(NamedTensor positions, NamedTensor heads, const Layout& layout, const at::Tensor& table) {
    const at::Tensor& x = heads.tensor;
    const at::Tensor& p = positions.tensor;
    const bool has_rows = table.dim() == 3 || (table.dim() == 4 && table.size(1) >= head_table_rows);
    const int64_t tokens = x.size(layout.token);
    const int64_t batch = layout.batch_of(x);
    TORCH_CHECK_VALUE(!has_rows || layout.batch >= 0 || p.dim() <= 1, positions.name, " must be [", tokens,
                      "] in layout ", layout.name, ", where a token has one position, got ", p.sizes(),
                      ": for several, use layout bshd with a batch of 1 and positions [rows, 1, ", tokens, "]");
    if (!has_rows || p.dim() != 3) return positions_view(positions, heads, layout);
    TORCH_CHECK_VALUE(p.size(0) >= 1 && p.size(2) == tokens && (p.size(1) == batch || p.size(1) == 1), positions.name,
                      " with a table of two rows must be [rows, ", batch, ", ", tokens, "] for ", heads.name, " of ",
                      x.sizes(), " in layout ", layout.name, ", got ", p.sizes());
    TORCH_CHECK_VALUE(p.size(0) <= max_position_rows, positions.name, " must have at most ", max_position_rows,
                      " rows, got ", p.size(0));
    const int64_t words_of_table = table.numel() / table.size(0);
    const int64_t words_of_row = words_of_table / table.size(1);  // those of all heads
    const auto* row_of_pair = static_cast<const uint64_t*>(table.const_data_ptr()) + words_of_row;
    if (table.is_cpu()) {
        for (int64_t i = 0; i < table.size(0); ++i) {
            check_rows_of_pairs(row_of_pair + i * words_of_table, words_of_row, table.size(-1), p.size(0));
        }
    }
    return {.data = p.const_data_ptr(),
            .is_int64 = p.scalar_type() == at::kLong,
            .batch_stride = stride_or_zero(p, 1),
            .token_stride = stride_or_zero(p, 2),
            .rows = p.size(0),
            .row_stride = stride_or_zero(p, 0),
            .row_of_pair = row_of_pair};
}

int head_count(NamedTensor heads, const Layout& layout) {
    const int64_t count = heads.tensor.size(layout.head);
    TORCH_CHECK_VALUE(count <= std::numeric_limits<int>::max(), heads.name, " must have fewer than 2^31 heads, got ",
                      count);
    return static_cast<int>(count);
}

int head_dim_of(NamedTensor heads) {
    const int64_t head_dim = heads.tensor.size(-1);
    TORCH_CHECK_VALUE(head_dim <= std::numeric_limits<int>::max(), heads.name,
                      " must have a head_dim, its last dimension, below 2^31, got ", head_dim);
    return static_cast<int>(head_dim);
}

int rotary_dim_of(const at::Tensor& table, NamedTensor heads) {
    const int64_t rotary_dim = 2 * (table.size(-1) - 1);
    const int head_dim = head_dim_of(heads);
    TORCH_CHECK_VALUE(rotary_dim <= head_dim, "table.rotary_dim must be at most head_dim, the last dimension of ",
                      heads.name, " (", head_dim, "), got ", rotary_dim);
    return static_cast<int>(rotary_dim);
}

}  // namespace mrrope
