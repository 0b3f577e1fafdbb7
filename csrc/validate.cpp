#include <climits>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "mrrope/learnable_rotary.h"
#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/qk_norm_rotary.h"
#include "mrrope/qk_norm_rotary_and_cache.h"
#include "mrrope/qkv_rotary.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"
#include "mrrope/rotation.h"

// What can be checked without reading memory: launchers on a GPU check the same.

namespace mrrope {
namespace {

// The name of a field from the struct that the caller filled: "rotary.q.heads".
struct Path {
    const Path* outer = nullptr;
    const char* name = "";

    Path operator/(const char* field) const { return {this, field}; }
};

std::ostream& operator<<(std::ostream& out, const Path& path) {
    if (path.outer == nullptr) return out << path.name;
    const bool is_first = path.outer->outer == nullptr && *path.outer->name == '\0';
    return (is_first ? out : out << *path.outer << ".") << path.name;
}

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw std::invalid_argument(text.str());
}

// Inline, and messages elsewhere: a valid call takes twenty to fifty comparisons.
template <class... Parts>
[[gnu::always_inline]] inline void require(bool condition, const Parts&... parts) {
    if (!condition) [[unlikely]]
        refuse(parts...);
}

constexpr Path arguments{};

void require_from(const Path& path, int64_t least, int64_t value) {
    require(value >= least, path, " must be ", least, " or more, got ", value);
}

void require_pointer(const Path& path, const void* pointer, const char* reason = "") {
    require(pointer != nullptr, path, " must not be nullptr", reason);
}

// A call without tokens or heads does nothing, whatever its pointers are.
bool is_empty(const RotaryArgs& args, int64_t cached_heads = 0) {
    return args.batch == 0 || args.tokens == 0 || int64_t{args.q.heads} + args.k.heads + cached_heads == 0;
}

void check_counts(const RotaryArgs& args, const Path& path) {
    require_from(path / "batch", 0, args.batch);
    require_from(path / "tokens", 0, args.tokens);
    require_from(path / "q.heads", 0, args.q.heads);
    require_from(path / "k.heads", 0, args.k.heads);
    require_from(path / "choice.count", 1, args.choice.count);
    require_from(path / "choice.heads", 1, args.choice.heads);
}

void check_components(const Path& path, int64_t heads, int64_t head_dim) {
    require(heads * head_dim <= INT_MAX, path, " must have fewer than 2^31 components per token, got ", heads,
            " heads of ", head_dim);
}

void check_rotary_dim(int rotary_dim, int head_dim, const Path& path) {
    require(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim, path / "rotary_dim",
            " must be even, from 2 to head_dim ", head_dim, ", got ", rotary_dim);
}

void check_dims(const RotaryArgs& args, const Path& path) {
    check_rotary_dim(args.rotary_dim, args.head_dim, path);
    check_components(path / "q and k", int64_t{args.q.heads} + args.k.heads, args.head_dim);
}

enum class Out { required, optional };

// Heads of the batch and tokens of `args`.
void check_view(const HeadsView& view, const RotaryArgs& args, const Path& path, Out out = Out::required) {
    require_from(path / "heads", 0, view.heads);
    if (view.heads == 0) return;
    require_pointer(path / "in", view.in);
    if (out == Out::required) require_pointer(path / "out", view.out, ": it receives the result");
    const auto same = [](int64_t count, int64_t in, int64_t out) { return count == 1 || in == out; };
    const bool same_strides = same(args.batch, view.in_strides.batch, view.out_strides.batch) &&
                              same(args.tokens, view.in_strides.token, view.out_strides.token) &&
                              same(view.heads, view.in_strides.head, view.out_strides.head);
    require(view.in != view.out || same_strides, path, ".out_strides must equal in_strides where out equals in");
}

void check_views(const RotaryArgs& args, const Path& path, Out out = Out::required) {
    check_view(args.q, args, path / "q", out);
    check_view(args.k, args, path / "k", out);
}

void check_positions(const PositionsView& positions, const Path& path) {
    require_pointer(path / "data", positions.data);
    require(1 <= positions.rows && positions.rows <= max_position_rows, path / "rows", " must be from 1 to ",
            max_position_rows, ", got ", positions.rows);
    require(positions.rows == 1 || positions.row_of_pair != nullptr, path / "row_of_pair",
            " must not be nullptr with several rows, got ", positions.rows);
}

void check_one_position(const PositionsView& positions, const Path& path) {
    require(positions.rows == 1 && positions.row_of_pair == nullptr, path / "rows",
            " must be 1, without row_of_pair, got ", positions.rows);
}

void check_divides(const Path& tables_path, int64_t tables, const char* heads_name, int64_t heads) {
    require(heads % tables == 0, tables_path, " must divide ", heads_name, " ", heads, ", got ", tables);
}

void check_tables(const RotaryArgs& args, const Path& path) {
    const TableChoice& choice = args.choice;
    const Path choice_path = path / "choice";
    check_divides(choice_path / "heads", choice.heads, "q.heads", args.q.heads);
    check_divides(choice_path / "heads", choice.heads, "k.heads", args.k.heads);
    require(choice.index != nullptr || choice.count == 1 || choice.count >= args.batch, choice_path / "count",
            " must be 1, or one for each of ", args.batch, " sequences, without an index, got ", choice.count);
    check_positions(args.positions, path / "positions");
    require_pointer(path / "table", args.table);
}

// Of a call that is not empty.
void check_rotary(const RotaryArgs& args, const Path& path) {
    check_dims(args, path);
    check_views(args, path);
    check_tables(args, path);
}

void check_norm(const QkNorm& norm, const Path& path) {
    require(std::isfinite(norm.eps) && norm.eps >= 0, path / "eps", " must be a finite number, 0 or more, got ",
            norm.eps);
    require(std::isfinite(norm.weight_offset), path / "weight_offset", " must be finite, got ", norm.weight_offset);
}

void check_weights(const QkNormRotaryArgs& args, const Path& path) {
    if (args.rotary.q.heads > 0) require_pointer(path / "q_weight", args.q_weight);
    if (args.rotary.k.heads > 0) require_pointer(path / "k_weight", args.k_weight);
}

void check_stored_as(StoredAs stored_as, DType dtype, const Path& path) {
    require(!is_float8(stored_as) || dtype != DType::float64, path,
            " must be heads_dtype for heads of float64, which are not stored as float8");
}

void check_slots(const CacheSlots& slots, const RotaryArgs& rotary, const Path& path) {
    require_from(path / "blocks", 0, slots.blocks);
    require_from(path / "block_size", 0, slots.block_size);
    const int64_t blocks = slots.paged ? slots.blocks : 1;  // that a slot counts
    require(slots.block_size == 0 || blocks <= INT_MAX / slots.block_size,
            path / (slots.paged ? "blocks" : "block_size"), " must make fewer than 2^31 slots, got ", blocks, " of ",
            slots.block_size);
    require(slots.paged || slots.blocks >= rotary.batch, path / "blocks", " must be one for each of ", rotary.batch,
            " sequences where slots are not paged, got ", slots.blocks);
    require_pointer(path / "of_tokens.data", slots.of_tokens.data);
}

// `out` may be nullptr where the cache has no slots.
void check_cached(const HeadsView& view, const CacheSlots& slots, const Path& path) {
    if (view.heads == 0) return;
    require_pointer(path / "in", view.in);
    if (slots.count() > 0) require_pointer(path / "out", view.out, ": it is in the cache");
}

// The part of every head that is copied, beside `heads` rotated ones.
void check_copied(const CopiedPart& part, int heads, const RotaryArgs& args, const Path& path) {
    require_from(path / "dim", 0, part.dim);
    if (part.dim == 0) return;
    require(part.view.heads == heads, path / "view.heads", " must be that of the rotated parts, ", heads, ", got ",
            part.view.heads);
    check_components(path, heads, int64_t{part.dim} + args.rotary_dim);
    check_view(part.view, args, path / "view");
}

// The rotation of latent attention.
void check_rope_parts(const RotaryArgs& args, const Path& path) {
    require(args.choice.heads == 1, path / "choice.heads", " must be 1, one table for all heads, got ",
            args.choice.heads);
    require(args.choice.query_factors == nullptr, path / "choice.query_factors", " must be nullptr: latent attention ",
            "takes one table for all heads");
    check_dims(args, path);
    require(args.head_dim == args.rotary_dim, path / "head_dim", " must be rotary_dim ", args.rotary_dim, ", got ",
            args.head_dim);
    check_tables(args, path);
    check_one_position(args.positions, path / "positions");
}

// Backward passes that visit all heads of all tokens in one launch count them in 32 bits.
void check_heads_of_all_tokens(const RotaryArgs& args, const Path& path) {
    const int64_t heads = int64_t{args.q.heads} + args.k.heads;
    const bool fits = heads <= INT_MAX && args.batch <= INT_MAX && args.tokens <= INT_MAX &&
                      args.batch * args.tokens <= INT_MAX / heads;
    require(fits, path / "q and k", " must have fewer than 2^31 heads in all tokens, got ", args.batch, " x ",
            args.tokens, " tokens of ", heads);
}

// Without tokens there are tables still, and their gradients.
void check_learnable(const LearnableRotaryArgs& args, const Path& path, Out out) {
    const Path rotary = path / "rotary";
    check_counts(args.rotary, rotary);
    check_dims(args.rotary, rotary);
    require_from(path / "tables", 1, args.tables);
    check_divides(path / "tables", args.tables, "rotary.q.heads", args.rotary.q.heads);
    check_divides(path / "tables", args.tables, "rotary.k.heads", args.rotary.k.heads);
    require(args.table_dtype == DType::float32 || args.table_dtype == DType::float64, path / "table_dtype",
            " must be float32 or float64");
    require_pointer(path / "packed_tables", args.packed_tables);
    check_one_position(args.rotary.positions, rotary / "positions");
    if (is_empty(args.rotary)) return;
    check_views(args.rotary, rotary, out);
    require_pointer(rotary / "positions.data", args.rotary.positions.data);
}

void check_gradient(const void* data, int heads, const Path& path) {
    if (heads > 0) require_pointer(path / "data", data);
}

// Without heads there are no rows of partial sums.
void check_weight_gradient(const OutputGradient& gradient, int heads, const Path& path) {
    require(gradient.weights == nullptr || heads == 0 || gradient.weight_sums != nullptr, path / "weight_sums",
            " must not be nullptr where the gradient of the weights is wanted");
}

}  // namespace

void validate(const RotaryArgs& args) {
    check_counts(args, arguments);
    if (!is_empty(args)) check_rotary(args, arguments);
}

void validate(const RotaryCosSinArgs& args) {
    const Path rotary = arguments / "rotary";
    check_counts(args.rotary, rotary);
    if (is_empty(args.rotary)) return;
    check_dims(args.rotary, rotary);
    check_views(args.rotary, rotary);
    require_pointer(arguments / "cos.data", args.cos.data);
    require_pointer(arguments / "sin.data", args.sin.data);
    require(args.columns_dtype == DType::float32 || args.columns_dtype == args.rotary.dtype,
            arguments / "columns_dtype", " must be float32 or that of the heads");
    const bool interleaved = args.rotary.pairing == Pairing::interleaved;
    require(args.columns_per_pair == 1 || (interleaved && args.columns_per_pair == 2), arguments / "columns_per_pair",
            " must be 1, or 2 in interleaved pairing, got ", args.columns_per_pair);
}

void validate(const LearnableRotaryArgs& args) {
    check_learnable(args, arguments, Out::required);
    require_pointer(arguments / "frequencies", args.frequencies);
    require_pointer(arguments / "attention_factors", args.attention_factors);
}

void validate(const LearnableRotaryGradientArgs& args) {
    check_learnable(args.call, arguments / "call", Out::optional);
    require_pointer(arguments / "frequencies", args.frequencies);
    require_pointer(arguments / "attention_factors", args.attention_factors);
    const RotaryArgs& rotary = args.call.rotary;
    if (is_empty(rotary)) return;
    check_heads_of_all_tokens(rotary, arguments / "call.rotary");
    check_gradient(args.q.data, rotary.q.heads, arguments / "q");
    check_gradient(args.k.data, rotary.k.heads, arguments / "k");
    require_pointer(arguments / "table_sums", args.table_sums);
}

void validate(const QkNormRotaryArgs& args) {
    check_counts(args.rotary, arguments / "rotary");
    if (is_empty(args.rotary)) return;
    check_rotary(args.rotary, arguments / "rotary");
    check_norm(args, arguments);
    check_weights(args, arguments);
}

void validate(const QkNormRotaryGradientArgs& args) {
    const RotaryArgs& rotary = args.call.rotary;
    const Path call = arguments / "call";
    check_counts(rotary, call / "rotary");
    if (is_empty(rotary)) return;
    check_rotary(rotary, call / "rotary");
    check_heads_of_all_tokens(rotary, call / "rotary");
    check_norm(args.call, call);
    check_weights(args.call, call);
    check_gradient(args.q.data, rotary.q.heads, arguments / "q");
    check_gradient(args.k.data, rotary.k.heads, arguments / "k");
    check_weight_gradient(args.q, rotary.q.heads, arguments / "q");
    check_weight_gradient(args.k, rotary.k.heads, arguments / "k");
}

void validate(const RotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const Path path = arguments / "rotary";
    const int k_heads = args.k.view.heads;
    check_counts(rotary, path);
    require(rotary.k.heads == 0, path / "k.heads", " must be 0, since k is the cached heads, got ", rotary.k.heads);
    require_from(arguments / "k.view.heads", 0, k_heads);
    require(args.v.view.heads == k_heads, arguments / "v.view.heads", " must be that of k, ", k_heads, ", got ",
            args.v.view.heads);
    require(!rotary.conjugate, path / "conjugate", " must be false where a cache is written, got true");
    check_stored_as(args.cached_as, rotary.dtype, arguments / "cached_as");
    if (is_empty(rotary, k_heads)) return;
    check_rotary(rotary, path);
    check_divides(path / "choice.heads", rotary.choice.heads, "k.view.heads", k_heads);
    check_components(arguments / "q, k and v", rotary.q.heads + 2 * int64_t{k_heads}, rotary.head_dim);
    check_slots(args.slots, rotary, arguments / "slots");
    check_cached(args.k.view, args.slots, arguments / "k.view");
    check_cached(args.v.view, args.slots, arguments / "v.view");
}

void validate(const QkNormRotaryAndCacheArgs& args) {
    validate(static_cast<const RotaryAndCacheArgs&>(args));
    const RotaryArgs& rotary = args.rotary;
    check_norm(args, arguments);
    check_stored_as(args.q_stored_as, rotary.dtype, arguments / "q_stored_as");
    require_from(arguments / "gate.heads", 0, args.gate.heads);
    if (rotary.batch == 0 || rotary.tokens == 0) return;
    check_view(args.gate, rotary, arguments / "gate");
    require(args.gate.heads == 0 || args.gate.in == args.gate.out, arguments / "gate.out",
            " must be gate.in: the sigmoid replaces the gate");
    const int64_t heads = int64_t{rotary.q.heads} + 2 * int64_t{args.k.view.heads} + args.gate.heads;
    check_components(arguments / "q, k, v and gate", heads, rotary.head_dim);
}

void validate(const MlaRotaryArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const Path path = arguments / "rotary";
    check_counts(rotary, path);
    if (is_empty(rotary)) return;
    check_rope_parts(rotary, path);
    check_views(rotary, path);
    check_copied(args.q_nope, rotary.q.heads, rotary, arguments / "q_nope");
    check_copied(args.k_nope, rotary.k.heads, rotary, arguments / "k_nope");
}

void validate(const MlaRotaryGradientArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const Path path = arguments / "rotary";
    check_counts(rotary, path);
    if (is_empty(rotary)) return;
    check_rope_parts(rotary, path);
    check_views(rotary, path);
    check_copied(args.q_nope, rotary.q.heads, rotary, arguments / "q_nope");
}

void validate(const MlaRotaryAndCacheArgs& args) {
    const RotaryArgs& rotary = args.rotary;
    const Path path = arguments / "rotary";
    check_counts(rotary, path);
    require(rotary.k.heads == 1, path / "k.heads", " must be 1, the rope part of all heads, got ", rotary.k.heads);
    check_stored_as(args.cached_as, rotary.dtype, arguments / "cached_as");
    require_from(arguments / "latent.dim", 0, args.latent.dim);
    if (is_empty(rotary)) return;
    check_rope_parts(rotary, path);
    check_view(rotary.q, rotary, path / "q");
    const int64_t components = (rotary.q.heads + int64_t{1}) * rotary.rotary_dim + args.latent.dim;
    check_components(arguments / "q, k and the latent", 1, components);
    check_slots(args.slots, rotary, arguments / "slots");
    check_cached(rotary.k, args.slots, path / "k");
    if (args.latent.dim == 0) return;
    require(args.latent.view.heads == 1, arguments / "latent.view.heads", " must be 1, got ", args.latent.view.heads);
    check_cached(args.latent.view, args.slots, arguments / "latent.view");
}

void validate(const QkvRotaryArgs& args) {
    require_from(arguments / "batch", 0, args.batch);
    require_from(arguments / "tokens", 0, args.tokens);
    require_from(arguments / "inputs", 1, args.inputs);
    require_from(arguments / "q_heads", 0, args.q_heads);
    require_from(arguments / "kv_heads", 0, args.kv_heads);
    check_rotary_dim(args.rotary_dim, args.head_dim, arguments);
    check_components(arguments / "q, k and v", args.q_heads + 2 * int64_t{args.kv_heads}, args.head_dim);
    if (args.rows() == 0 || args.outputs() == 0) return;
    require_pointer(arguments / "x", args.x);
    require_pointer(arguments / "weight", args.weight);
    require_pointer(arguments / "out", args.out);
    require_pointer(arguments / "positions.data", args.positions.data);
    check_one_position(args.positions, arguments / "positions");
    require_pointer(arguments / "table", args.table);
}

void validate(const RescaleCacheArgs& args) {
    require_from(arguments / "batch", 0, args.batch);
    require_from(arguments / "tokens", 0, args.tokens);
    require_from(arguments / "heads", 0, args.heads);
    require(args.rotary_dim >= 2 && args.rotary_dim % 2 == 0, arguments / "rotary_dim",
            " must be even, 2 or more, got ", args.rotary_dim);
    check_components(arguments / "keys", args.heads, args.rotary_dim);
    require_from(arguments / "table_count", 1, args.table_count);
    require_from(arguments / "table_layers", 1, args.table_layers);
    require(args.table_rows == 1 || args.table_rows == 2, arguments / "table_rows", " must be 1 or 2, got ",
            args.table_rows);
    require_from(arguments / "table_heads", 1, args.table_heads);
    check_divides(arguments / "table_heads", args.table_heads, "heads", args.heads);
    const std::span<const int32_t> layers = args.layer_of_keys;
    require(layers.empty() || layers.size() >= args.keys.size(), arguments / "layer_of_keys",
            " must be empty, or one for each of ", args.keys.size(), " keys, got ", layers.size());
    for (size_t i = 0; i < layers.size() && i < args.keys.size(); ++i) {
        require(0 <= layers[i] && layers[i] < args.table_layers, arguments / "layer_of_keys", "[", i,
                "] must be from 0 to ", args.table_layers - 1, ", got ", layers[i]);
    }
    if (args.keys.empty() || args.batch == 0 || args.tokens == 0 || args.heads == 0) return;
    for (size_t i = 0; i < args.keys.size(); ++i) {
        require(args.keys[i] != nullptr, arguments / "keys", "[", i, "] must not be nullptr");
    }
    require_pointer(arguments / "tables", args.tables);
    require_pointer(arguments / "from", args.from);
    require_pointer(arguments / "to", args.to);
    check_positions(args.positions, arguments / "positions");
}

}  // namespace mrrope
