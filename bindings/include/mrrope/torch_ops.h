#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <optional>
#include <string_view>
#include <vector>

#include "mrrope/frequency_table.h"

// The ops torch.ops.mrrope.*, callable from C++. Linking mrrope::torch registers them.

namespace mrrope {

// A table as the ops take it: an int64 tensor of rotary_dim / 2 turns and the attention factor's bits. Negated, it
// rotates backwards, by the same factor; the sign of the last word is therefore the table's, never the factor's, which
// is positive and in float32's range. Words on a CPU that say otherwise are refused; a GPU multiplies by them. A stack
// of such tables, [count, ...], holds one for each sequence, or those that table_index picks from: int32, [batch], or
// [tokens] in layout thd. Positions of [rows, batch, tokens] take a stack [count, 2, ...] whose second rows name the
// row of positions that turns each pair, negated with the first.
at::Tensor packed_tensor(const FrequencyTable& table, at::Device device);

// Rotates q, or q and k, given as `heads`; differentiable. layout: bhsd, bshd or thd; pairing: halves or interleaved;
// conjugate: by the negated angle, with the same attention factor.
std::vector<at::Tensor> rotary(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
                               std::string_view layout = "bhsd", std::string_view pairing = "halves",
                               bool conjugate = false, const std::optional<at::Tensor>& table_index = std::nullopt);

// The same, in place.
void rotary_(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
             std::string_view layout = "bhsd", std::string_view pairing = "halves", bool conjugate = false,
             const std::optional<at::Tensor>& table_index = std::nullopt);

// RMSNorm of q, or of q and k, by a tensor of weights for each, then their rotation, rounded once; differentiable.
// over: head, or all_heads; weight_offset: what is added to every weight.
std::vector<at::Tensor> qk_norm_rotary(at::TensorList heads, at::TensorList weights, const at::Tensor& positions,
                                       const at::Tensor& table, double eps, double weight_offset = 0.0,
                                       std::string_view over = "head", std::string_view layout = "bhsd",
                                       std::string_view pairing = "halves",
                                       const std::optional<at::Tensor>& table_index = std::nullopt);

// The same, in place, without gradients.
void qk_norm_rotary_(at::TensorList heads, at::TensorList weights, const at::Tensor& positions, const at::Tensor& table,
                     double eps, double weight_offset = 0.0, std::string_view over = "head",
                     std::string_view layout = "bhsd", std::string_view pairing = "halves",
                     const std::optional<at::Tensor>& table_index = std::nullopt);

// x weight^T + bias for x of [batch, tokens, inputs] or [tokens, inputs], whose rows hold the heads of q, of k and of
// v, with those of q and k rotated; differentiable. On GPUs of sm_90 one matrix product, where that is faster.
at::Tensor qkv_rotary(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const at::Tensor& positions, const at::Tensor& table, int64_t num_q_heads, int64_t num_kv_heads,
                      std::string_view pairing = "halves");

// Turns cached keys, a tensor of every layer, from one table of a stack to another, in place: those of sequence i from
// tables[from[i]] to tables[to[i]].
void rescale_cache_(at::TensorList keys, const at::Tensor& positions, const at::Tensor& tables, const at::Tensor& from,
                    const at::Tensor& to, std::string_view layout = "bhsd", std::string_view pairing = "halves");

// What a call of rotary_and_cache_ may say besides. cache_layout: nhd or hnd.
struct CacheOptions {
    std::string_view layout = "bhsd";
    std::string_view cache_layout = "nhd";
    std::string_view pairing = "halves";
    std::optional<at::Tensor> key_scale = std::nullopt;    // float32, of one element or one a head of k,
    std::optional<at::Tensor> value_scale = std::nullopt;  // for caches of float8_e4m3fn
    std::optional<at::Tensor> table_index = std::nullopt;
};

// Rotates q in place, or into q_out, and writes k, rotated, and v to the slots of their caches. Paged, slots count
// through all blocks of the caches; else each sequence has a block of its own, and they count from its start.
void rotary_and_cache_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& positions,
                       const at::Tensor& table, const at::Tensor& key_cache, const at::Tensor& value_cache,
                       const at::Tensor& slots, bool paged, const CacheOptions& options = {},
                       const std::optional<at::Tensor>& q_out = std::nullopt);

}  // namespace mrrope
