#include "tensor_views.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "mrrope/frequency_table.h"
#include "mrrope/rotation.h"

namespace mrrope {
namespace {

constexpr std::array layouts{
    Layout{"bhsd", "[batch, heads, tokens, head_dim]", 0, 2, 1},
    Layout{"bshd", "[batch, tokens, heads, head_dim]", 0, 1, 2},
    Layout{"thd", "[tokens, heads, head_dim]", -1, 0, 1},
};

// Sorted by stride, each dimension must step over all the ones below it.
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

// The bytes from a tensor's first element on that are all its own, without a gap.
std::pair<const char*, const char*> first_run(const at::Tensor& tensor) {
    std::vector<std::pair<int64_t, int64_t>> steps;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        if (tensor.size(dim) > 1) steps.emplace_back(tensor.stride(dim), tensor.size(dim));
    }
    std::sort(steps.begin(), steps.end());
    int64_t run = 1;
    for (const auto& [stride, size] : steps) {
        if (stride != run) break;
        run *= size;
    }
    const char* start = static_cast<const char*>(tensor.const_data_ptr());
    return {start, start + run * tensor.element_size()};
}

// Of views with gaps, such as q and k in one packed projection, torch does not tell; their first heads do.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0 || b.numel() == 0) return false;
    const at::MemOverlapStatus status = at::get_overlap_status(a, b);
    if (status != at::MemOverlapStatus::TooHard) return status != at::MemOverlapStatus::No;
    const auto [a_start, a_end] = first_run(a);
    const auto [b_start, b_end] = first_run(b);
    return a_start < b_end && b_start < a_end;
}

void check_device(const char* name, const at::Tensor& tensor, NamedHeads heads) {
    TORCH_CHECK(tensor.device() == heads.tensor.device(), name, " must be on ", heads.name, "'s device ",
                heads.tensor.device(), ", got ", tensor.device());
}

}  // namespace

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

DType dtype_of(NamedHeads heads) {
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

void check_rank(NamedHeads heads, const Layout& layout) {
    TORCH_CHECK_VALUE(heads.tensor.dim() == layout.rank(), heads.name, " must be ", layout.shape, " for layout ",
                      layout.name, ", got a tensor of ", heads.tensor.dim(), " dimensions");
}

void check_positions_kind(const at::Tensor& positions, NamedHeads heads, const char* name) {
    TORCH_CHECK_TYPE(positions.scalar_type() == at::kInt || positions.scalar_type() == at::kLong, name,
                     " must be int32 or int64, got ", positions.scalar_type());
    check_device(name, positions, heads);
}

void check_table_kind(const at::Tensor& table, NamedHeads heads) {
    TORCH_CHECK_TYPE(table.scalar_type() == at::kLong, "table must be an int64 tensor, got ", table.scalar_type());
    check_device("table", table, heads);
}

void check_index_kind(const char* name, const at::Tensor& index, NamedHeads heads) {
    TORCH_CHECK_TYPE(index.scalar_type() == at::kInt, name, " must be int32, got ", index.scalar_type());
    check_device(name, index, heads);
}

void check_last_dimension(NamedHeads heads, const Layout& layout) {
    const at::Tensor& x = heads.tensor;
    TORCH_CHECK_VALUE(x.numel() == 0 || x.stride(-1) == 1, heads.name, " must be ", layout.shape,
                      " with a contiguous last dimension, got strides ", x.strides());
}

void check_own_memory(NamedHeads heads) {
    TORCH_CHECK(has_own_memory(heads.tensor), heads.name,
                " must not overlap itself in memory to be written, got strides ", heads.tensor.strides(), " for shape ",
                heads.tensor.sizes(), " (an expanded tensor? clone it first)");
}

void check_apart(NamedHeads a, NamedHeads b, const char* why) {
    TORCH_CHECK(!share_memory(a.tensor, b.tensor), a.name, " and ", b.name, " must not share memory", why,
                ", got overlapping tensors of ", a.tensor.sizes(), " and ", b.tensor.sizes());
}

void check_range(const char* name, const at::Tensor& index, int64_t count) {
    if (!index.is_cpu()) return;
    const auto* values = static_cast<const int32_t*>(index.const_data_ptr());
    for (int64_t i = 0; i < index.size(0); ++i) {
        const int32_t value = values[i * step(index, 0)];
        TORCH_CHECK_INDEX(0 <= value && value < count, name, " must name one of ", count, " tables, 0 to ", count - 1,
                          ", got ", value, " at ", i);
    }
}

void check_attention_factors(const at::Tensor& table) {
    if (!table.is_cpu()) return;
    const auto* words = static_cast<const uint64_t*>(table.const_data_ptr());
    const int64_t tables = table.dim() == 1 ? 1 : table.size(0);
    for (int64_t i = 0; i < tables; ++i) {
        const double factor = attention_factor_of(words[i * (table.numel() / tables) + table.size(-1) - 1]);
        TORCH_CHECK_VALUE(is_attention_factor(factor),
                          "table must end with the bits of an attention factor, a positive ",
                          "finite number in float32's range, got ", factor, " in table ", i);
    }
}

int64_t step(const at::Tensor& tensor, int dim) {
    return dim < 0 || tensor.size(dim) <= 1 ? 0 : tensor.stride(dim);
}

std::vector<at::Tensor> like(at::TensorList heads) {
    std::vector<at::Tensor> out;
    for (const at::Tensor& x : heads) {
        out.push_back(at::empty_like(x));
        // It keeps the order of the strides, which need not end with the last dimension where x overlaps itself.
        if (out.back().sym_stride(-1) != 1) out.back() = at::empty_like(x, at::MemoryFormat::Contiguous);
    }
    return out;
}

at::Tensor with_contiguous_last_dimension(const at::Tensor& gradient) {
    return gradient.sym_stride(-1) == 1 ? gradient : gradient.contiguous();
}

HeadStrides strides_of(const at::Tensor& heads, const Layout& layout) {
    return {step(heads, layout.batch), step(heads, layout.token), step(heads, layout.head)};
}

int heads_of(NamedHeads heads, const Layout& layout) {
    const int64_t count = heads.tensor.size(layout.head);
    TORCH_CHECK_VALUE(count <= std::numeric_limits<int>::max(), heads.name, " must have fewer than 2^31 heads, got ",
                      count);
    return static_cast<int>(count);
}

PositionsView positions_of(const at::Tensor& positions, NamedHeads heads, const Layout& layout, const char* name) {
    const at::Tensor& x = heads.tensor;
    const int64_t tokens = x.size(layout.token);
    const int64_t batch = layout.batch_of(x);
    const bool is_row = positions.dim() == 1 && positions.size(0) == tokens;
    const bool is_matrix = layout.batch >= 0 && positions.dim() == 2 && positions.size(1) == tokens &&
                           (positions.size(0) == batch || positions.size(0) == 1);
    if (layout.batch >= 0) {
        TORCH_CHECK_VALUE(is_row || is_matrix, name, " must be [", tokens, "], [1, ", tokens, "] or [", batch, ", ",
                          tokens, "] for ", heads.name, " of ", x.sizes(), " in layout ", layout.name, ", got ",
                          positions.sizes());
    } else {
        TORCH_CHECK_VALUE(is_row, name, " must be [", tokens, "] for ", heads.name, " of ", x.sizes(), " in layout ",
                          layout.name, ", got ", positions.sizes());
    }
    return {.data = positions.const_data_ptr(),
            .is_int64 = positions.scalar_type() == at::kLong,
            .batch_stride = is_matrix ? step(positions, 0) : 0,
            .token_stride = step(positions, positions.dim() - 1)};
}

int rotary_dim_of(const at::Tensor& table, NamedHeads heads) {
    const int64_t rotary_dim = 2 * (table.size(-1) - 1);
    TORCH_CHECK_VALUE(rotary_dim <= heads.tensor.size(-1),
                      "table.rotary_dim must be at most head_dim, the last dimension of ", heads.name, " (",
                      heads.tensor.size(-1), "), got ", rotary_dim);
    return static_cast<int>(rotary_dim);
}

}  // namespace mrrope
