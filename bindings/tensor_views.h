#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "mrrope/rotary.h"

// Tensors as the backends see them, and the checks that all ops share on the way there. Errors name the argument.

namespace mrrope {

// Which dimension of a tensor of heads is which; -1 where there is none.
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

// A tensor of heads under the name that its caller knows it by.
struct NamedHeads {
    const char* name;
    const at::Tensor& tensor;
};

DType dtype_of(NamedHeads heads);

// The checks that need no sizes, for tensors that have none yet.
void check_rank(NamedHeads heads, const Layout& layout);
void check_positions_kind(const at::Tensor& positions, NamedHeads heads, const char* name = "positions");
void check_table_kind(const at::Tensor& table, NamedHeads heads);
void check_index_kind(const char* name, const at::Tensor& index, NamedHeads heads);

void check_last_dimension(NamedHeads heads, const Layout& layout);

// That every element has memory of its own, as writing in place needs.
void check_own_memory(NamedHeads heads);

// That two tensors, one of which is written, share no memory; as far as can be told at once. `why` ends the sentence.
void check_apart(NamedHeads a, NamedHeads b, const char* why = "");

// That an index, on the CPU, names only what is there. On a GPU that is not known before the kernel runs, which keeps
// within the tables whatever it says.
void check_range(const char* name, const at::Tensor& index, int64_t count);

// That the attention factors of one table or a stack, on the CPU, are such. On a GPU they are not known before the
// kernel runs, which multiplies by whatever they are.
void check_attention_factors(const at::Tensor& table);

// The stride of a dimension, 0 where it is never stepped along: of one element, torch leaves anything at all.
int64_t step(const at::Tensor& tensor, int dim);

// New tensors for the results, with the strides of the heads where those are dense, and a contiguous last dimension.
std::vector<at::Tensor> like(at::TensorList heads);

// Gradients come with any strides, those of a sum even with none.
at::Tensor with_contiguous_last_dimension(const at::Tensor& gradient);

HeadStrides strides_of(const at::Tensor& heads, const Layout& layout);

int heads_of(NamedHeads heads, const Layout& layout);

// positions of [tokens], [1, tokens] or [batch, tokens].
PositionsView positions_of(const at::Tensor& positions, NamedHeads heads, const Layout& layout,
                           const char* name = "positions");

// The rotary_dim that tables of these many words are for.
int rotary_dim_of(const at::Tensor& table, NamedHeads heads);

}  // namespace mrrope
