#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "mrrope/frequency_table.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/rotary.h"

// C++ interface of the ops torch.ops.mrrope.*. Linking mrrope::torch registers them.
//
// Arguments that several ops share:
//   heads        {q} or {q, k}.
//   positions    int32 or int64, [tokens], [1, tokens] or [batch, tokens]; or [rows, batch, tokens] with a table of
//                two rows.
//   table        int64 packed table, see packed_tensor, or a stack of them.
//   table_index  int32 index of each sequence's table in the stack, [batch]; in layout thd of each token's, [tokens].
//                Without it, a stack holds one table, or one per sequence.

namespace mrrope {

// bhsd: [batch, heads, tokens, head_dim]; bshd: [batch, tokens, heads, head_dim]; thd: [tokens, heads, head_dim].
enum class HeadsLayout { bhsd, bshd, thd };

// nhd: [blocks, block_size, heads, head_dim]; hnd: [blocks, heads, block_size, head_dim].
enum class CacheLayout { nhd, hnd };

// Packs a table into an int64 tensor: rotary_dim / 2 phase steps, then the bits of the attention factor.
//
// A table negated word by word rotates by the negated angle with the same factor: factors are positive, so the sign of
// the last word tells whether the table is negated. On a CPU the ops reject a factor that is not a positive finite
// float32; on a GPU they multiply by it unchecked. Tables stack to [count, words]. For positions of [rows, batch,
// tokens], each table has a second row, [count, 2, words], with the row of positions of each pair; negating a table
// negates both rows. Head tables, [count, rows, tables, words], hold a table for each group of neighbouring heads: head
// h of n uses table h / (n / tables). Their third row and those after it, if there are any, hold the bits of a factor
// for every head of q, flattened and followed by zeros; k alone is rotated by the first two rows.
at::Tensor packed_tensor(const FrequencyTable& table, at::Device device);

//   conjugate  rotate by the negated angle, with the same attention factor
struct RotaryOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::halves;
    bool conjugate = false;
    std::optional<at::Tensor> table_index = std::nullopt;
};

// Rotates q, or q and k. Differentiable.
std::vector<at::Tensor> rotary(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
                               const RotaryOptions& options = {});

// rotary in place.
void rotary_(at::TensorList heads, const at::Tensor& positions, const at::Tensor& table,
             const RotaryOptions& options = {});

//   rotary_dim  cos.size(-1) by default; twice that: one column per pair
//   conjugate   with the sines negated
struct RotaryCosSinOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::halves;
    std::optional<int64_t> rotary_dim = std::nullopt;
    bool conjugate = false;
};

// Rotates q, or q and k, by cosines and sines. Differentiable in heads.
//   cos, sin  float32, or of heads' dtype: [tokens, columns], [1, tokens, columns] or [batch, tokens, columns]. One
//             column per component, of which those of a pair are equal and the first is read; or one per pair.
std::vector<at::Tensor> rotary_cos_sin(at::TensorList heads, const at::Tensor& cos, const at::Tensor& sin,
                                       const RotaryCosSinOptions& options = {});

struct LearnableRotaryOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::halves;
    bool conjugate = false;
};

// Rotates q, or q and k, by a table in floating point, float32 or float64. Differentiable; the gradient of the table is
// not differentiable again. Head i of n uses table i / (n / tables); a part with one row is shared by all tables.
//   frequencies       [tables or 1, rotary_dim / 2], in radians per position
//   attention_factor  [tables or 1]
std::vector<at::Tensor> learnable_rotary(at::TensorList heads, const at::Tensor& positions,
                                         const at::Tensor& frequencies, const at::Tensor& attention_factor,
                                         const LearnableRotaryOptions& options = {});

//   weight_offset  added to every weight
//   over           head: one mean square per head; all_heads: one per token
struct QkNormRotaryOptions {
    double weight_offset = 0.0;
    NormOver over = NormOver::head;
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::halves;
    std::optional<at::Tensor> table_index = std::nullopt;
};

// RMSNorm of q, or of q and k, then rotation, rounded once. Differentiable once.
//   weights  one tensor per tensor of heads
std::vector<at::Tensor> qk_norm_rotary(at::TensorList heads, at::TensorList weights, const at::Tensor& positions,
                                       const at::Tensor& table, double eps, const QkNormRotaryOptions& options = {});

// qk_norm_rotary in place, without gradients.
void qk_norm_rotary_(at::TensorList heads, at::TensorList weights, const at::Tensor& positions, const at::Tensor& table,
                     double eps, const QkNormRotaryOptions& options = {});

struct QkvRotaryOptions {
    Pairing pairing = Pairing::halves;
};

// x weight^T + bias with the heads of q and k rotated. Differentiable. x is [batch, tokens, inputs] or [tokens,
// inputs]; a row of the result holds the heads of q, k and v. On sm_90 one fused GEMM, where it is faster than
// at::linear and rotary_.
at::Tensor qkv_rotary(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      const at::Tensor& positions, const at::Tensor& table, int64_t num_q_heads, int64_t num_kv_heads,
                      const QkvRotaryOptions& options = {});

struct RescaleCacheOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::halves;
};

// Re-rotates cached keys in place from one table of a stack to another: those of sequence i from tables[from[i]] to
// tables[to[i]]. keys holds one tensor per layer; from and to are int32, [batch]. tables is [count, words], or [count,
// 1 or layers, head tables, words]. With positions of [rows, batch, tokens] it is [count, 2, words] or [count, 1 or
// layers, 2, head tables, words], and all second rows name the same row of positions for a pair.
void rescale_cache_(at::TensorList keys, const at::Tensor& positions, const at::Tensor& tables, const at::Tensor& from,
                    const at::Tensor& to, const RescaleCacheOptions& options = {});

// Scales are for caches of float8_e4m3fn or float8_e5m2: float32, one element or one per head of k.
struct RotaryAndCacheOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    CacheLayout cache_layout = CacheLayout::nhd;
    Pairing pairing = Pairing::halves;
    std::optional<at::Tensor> key_scale = std::nullopt;
    std::optional<at::Tensor> value_scale = std::nullopt;
    std::optional<at::Tensor> table_index = std::nullopt;
};

// Rotates q in place, or into q_out, and writes rotated k and v to the slots of their caches. paged: slots count
// through all blocks of the cache; otherwise each sequence owns one block, and slots count from its start. Tokens with
// a negative slot are not written.
void rotary_and_cache_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& positions,
                       const at::Tensor& table, const at::Tensor& key_cache, const at::Tensor& value_cache,
                       const at::Tensor& slots, bool paged, const RotaryAndCacheOptions& options = {},
                       const std::optional<at::Tensor>& q_out = std::nullopt);

// Beside the options of rotary_and_cache_ and of qk_norm_rotary:
//   gate         of q's shape and dtype, replaced by its sigmoid
//   q_scale      of a q_out of float8: float32, one element or one per head of q
//   q_scale_out  instead of q_scale: the computed scale of each token and head, float32, of q's shape without head_dim
struct QkNormRotaryAndCacheOptions : RotaryAndCacheOptions {
    double weight_offset = 0.0;
    NormOver over = NormOver::head;
    std::optional<at::Tensor> gate = std::nullopt;
    std::optional<at::Tensor> q_scale = std::nullopt;
    std::optional<at::Tensor> q_scale_out = std::nullopt;
};

// rotary_and_cache_ with RMSNorm of q and k before the rotation, where their weights are given. q_out may be float8.
void qk_norm_rotary_and_cache_(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const std::optional<at::Tensor>& q_weight, const std::optional<at::Tensor>& k_weight,
                               const at::Tensor& positions, const at::Tensor& table, const at::Tensor& key_cache,
                               const at::Tensor& value_cache, const at::Tensor& slots, bool paged, double eps,
                               const QkNormRotaryAndCacheOptions& options = {},
                               const std::optional<at::Tensor>& q_out = std::nullopt);

struct MlaRotaryOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::interleaved;
    std::optional<at::Tensor> table_index = std::nullopt;
};

// MLA: rotates the rope part of q, the last table.rotary_dim components of its heads, and assembles the key, the heads
// of k_nope with the rotated k_rope behind each. Returns both. Differentiable.
//   k_rope  one head, shared by all: [batch, tokens, rotary_dim], or with a dimension of one head
std::tuple<at::Tensor, at::Tensor> mla_rotary(const at::Tensor& q, const at::Tensor& k_nope, const at::Tensor& k_rope,
                                              const at::Tensor& positions, const at::Tensor& table,
                                              const MlaRotaryOptions& options = {});

// The scale is for a cache of float8_e4m3fn or float8_e5m2: float32, one element.
struct MlaRotaryAndCacheOptions {
    HeadsLayout layout = HeadsLayout::bhsd;
    Pairing pairing = Pairing::interleaved;
    std::optional<at::Tensor> scale = std::nullopt;
    std::optional<at::Tensor> table_index = std::nullopt;
};

// MLA: rotates q_rope in place, or into q_out, and writes rows [latent | rotated k_rope] to the slots of the cache,
// [blocks, block_size, components]. Slots as in rotary_and_cache_.
void mla_rotary_and_cache_(const at::Tensor& q_rope, const at::Tensor& k_rope, const at::Tensor& latent,
                           const at::Tensor& positions, const at::Tensor& table, const at::Tensor& cache,
                           const at::Tensor& slots, bool paged, const MlaRotaryAndCacheOptions& options = {},
                           const std::optional<at::Tensor>& q_out = std::nullopt);

}  // namespace mrrope
