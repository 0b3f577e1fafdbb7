#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <ostream>
#include <string_view>
#include <vector>

#include "mrrope/rotary.h"

// Tensors as the views that backends take, and the checks that ops share. Every error names the argument.

namespace mrrope {

using OptionalTensor = std::optional<at::Tensor>;

// An argument in an error message: `text`, or `text[index]` for an element of a list.
struct ArgumentName {
    ArgumentName(const char* text, int64_t index = -1) : text(text), index(index) {}

    const char* text;
    int64_t index;
};

std::ostream& operator<<(std::ostream& stream, ArgumentName name);

struct NamedTensor {
    ArgumentName name;
    const at::Tensor& tensor;
};

// Indices of the dimensions of a tensor of heads; batch is -1 in packed layouts.
struct Layout {
    const char* name;
    const char* shape;
    int batch;
    int token;
    int head;

    int rank() const { return batch < 0 ? 3 : 4; }
    int64_t batch_of(const at::Tensor& heads) const { return batch < 0 ? 1 : heads.size(batch); }
};

Layout layout_named(std::string_view name);

Pairing pairing_named(std::string_view name);

DType dtype_of(NamedTensor heads);

// --- checks of rank, dtype and device, which also hold for tensors with symbolic sizes ---

void check_rank(NamedTensor heads, const Layout& layout);
void check_device(NamedTensor x, NamedTensor reference);
// dtype and device.
void check_like(NamedTensor x, NamedTensor reference);
void check_positions_kind(NamedTensor positions, NamedTensor reference);
void check_table_kind(const at::Tensor& table, NamedTensor reference);
void check_index_kind(NamedTensor index, NamedTensor reference);

// --- checks of sizes, strides and values ---

void check_last_dimension(NamedTensor heads, const Layout& layout);

// k has q's sequences, tokens and head_dim.
void check_k_matches_q(const at::Tensor& q, const at::Tensor& k, const Layout& layout);

// No two elements share memory, as writing requires.
void check_no_internal_overlap(NamedTensor heads);

// Two tensors, one of them written, share no memory. Where torch's overlap check does not decide (views with gaps),
// only their first contiguous runs are compared. `purpose` follows "must not share memory" in the message.
void check_no_overlap(NamedTensor a, NamedTensor b, const char* purpose = "");

// CPU tensors only: reading CUDA tensors here would synchronize, so kernels clamp their indices instead.
void check_range(NamedTensor index, int64_t count);

// Rows of head tables, [tables, rows, heads, words], before those that hold factors of query heads: the tables, and the
// rows of positions that they name.
inline constexpr int64_t head_table_rows = 2;

// Holds for tensors with symbolic sizes, too.
bool has_query_factors(const at::Tensor& table);

// The word of the first query head's factor in the first table.
const uint64_t* query_factors_of(const at::Tensor& table);

// The attention factors of CPU tables only, in any of the forms that ops take: CUDA kernels multiply by whatever the
// word holds. Second rows, which name rows of positions, have no factor.
void check_factors(const at::Tensor& table);

// Tables with query factors have one for every head of q. The words themselves are read on the CPU only.
void check_query_factors(NamedTensor q, const Layout& layout, const at::Tensor& table);

// Head tables, [tables, rows, heads, words], divide the heads evenly.
void check_heads_have_tables(NamedTensor heads, const Layout& layout, const at::Tensor& table);

// --- views ---

// 0 for an absent dimension, -1, and for dimensions of size 1, whose stride torch leaves unspecified.
int64_t stride_or_zero(const at::Tensor& tensor, int dim);

// Uninitialized results: with the heads' strides where those are dense, and always with a contiguous last dimension.
std::vector<at::Tensor> empty_like_heads(at::TensorList heads);

// Autograd passes gradients of any strides: that of a sum is an expanded tensor.
at::Tensor with_contiguous_last_dimension(const at::Tensor& gradient);

HeadStrides head_strides(const at::Tensor& heads, const Layout& layout);

HeadsView heads_view(NamedTensor in, const at::Tensor& out, const Layout& in_layout, const Layout& out_layout);

// Positions of [tokens], [1, tokens] or [batch, tokens].
PositionsView positions_view(NamedTensor positions, NamedTensor heads, const Layout& layout);

// As above, or [rows, batch, tokens] and [rows, 1, tokens] with tables of two rows, [tables, 2, words], or more,
// [tables, rows, heads, words]: the second names the row of positions of each pair.
PositionsView positions_view(NamedTensor positions, NamedTensor heads, const Layout& layout, const at::Tensor& table);

int head_count(NamedTensor heads, const Layout& layout);

// The last dimension of heads.
int head_dim_of(NamedTensor heads);

int rotary_dim_of(const at::Tensor& table, NamedTensor heads);

}  // namespace mrrope
