#include <algorithm>
#include <numeric>
#include <vector>

#include "mrrope/rotation.h"
#include "mrrope/torch_ops.h"
#include "option_names.h"
#include "registration.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

struct RescaleCacheCall {
    TensorList keys;
    const Tensor& positions;
    const Tensor& tables;
    const Tensor& from;  // `old` and `new` in the schema
    const Tensor& to;
    std::string_view layout;
    std::string_view pairing;

    NamedTensor layer(size_t index) const { return {{"keys", static_cast<int64_t>(index)}, keys[index]}; }

    void each_layer(const auto& visit) const {
        for (size_t i = 0; i < keys.size(); ++i) visit(layer(i));
    }
};

// [tables, words], [tables, layers, heads, words], and each with two rows: [tables, 2, words] and
// [tables, layers, 2, heads, words]. The number of dimensions tells them apart, since layers may be two.
struct RescaleTables {
    int64_t count;
    int64_t layers;
    int64_t rows;
    int64_t heads;
    Tensor of_layers;  // [tables * layers, rows, heads, words], as rotary takes them
};

// The second rows are those of the first table: one row of positions rotates a pair from one table to another.
void check_same_rows(const RescaleTables& stack) {
    if (stack.rows == 1 || !stack.of_layers.is_cpu()) return;
    const int64_t words = stack.of_layers.size(-1);
    const int64_t words_of_row = stack.heads * words;
    const auto* rows = static_cast<const uint64_t*>(stack.of_layers.const_data_ptr()) + words_of_row;
    for (int64_t table = 1; table < stack.count * stack.layers; ++table) {
        for (int64_t i = 0; i < words_of_row; ++i) {
            if (i % words == words - 1) continue;
            const int expected = named_row(rows[i], 0);
            const int row = named_row(rows[table * 2 * words_of_row + i], 0);
            TORCH_CHECK_VALUE(row == expected, "tables must all name the same row of positions for a pair, ", expected,
                              " for pair ", i % words, ", got ", row, " in table ", table / stack.layers);
        }
    }
}

RescaleTables rescale_tables(const Tensor& tables) {
    const int64_t rank = tables.dim();
    const bool has_layers = rank >= 4;
    const bool has_rows = rank == 3 || rank == 5;
    const bool has_form = 2 <= rank && rank <= 5 && (!has_rows || tables.size(has_layers ? 2 : 1) == 2);
    TORCH_CHECK_VALUE(has_form && tables.numel() > 0 && tables.size(-1) >= 2 && tables.is_contiguous(),
                      "tables must be a contiguous stack of packed tables, of two rows of them, or of [layers, heads] "
                      "or [layers, 2, heads] of them, got ",
                      tables.sizes(), " with strides ", tables.strides());
    RescaleTables stack{.count = tables.size(0),
                        .layers = has_layers ? tables.size(1) : 1,
                        .rows = has_rows ? 2 : 1,
                        .heads = has_layers ? tables.size(-2) : 1,
                        .of_layers = {}};
    stack.of_layers = tables.view({stack.count * stack.layers, stack.rows, stack.heads, tables.size(-1)});
    return stack;
}

void check_sizes(const RescaleCacheCall& call, const RescaleTables& stack, const Layout& layout) {
    const Tensor& tables = call.tables;
    const Tensor& first = call.keys[0];
    const int64_t batch = layout.batch_of(first);
    const auto layers = static_cast<int64_t>(call.keys.size());
    TORCH_CHECK_VALUE(stack.layers == 1 || stack.layers == layers, "tables must be for one layer or for each of the ",
                      layers, " layers of keys, got ", tables.sizes());
    check_factors(stack.of_layers);
    check_same_rows(stack);
    for (const NamedTensor& index : {NamedTensor{"old", call.from}, {"new", call.to}}) {
        TORCH_CHECK_VALUE(index.tensor.dim() == 1 && index.tensor.size(0) == batch, index.name, " must be [", batch,
                          "], one a sequence of keys of ", first.sizes(), ", got ", index.tensor.sizes());
        check_range(index, stack.count);
    }
    call.each_layer([&](NamedTensor layer) {
        check_last_dimension(layer, layout);
        check_no_internal_overlap(layer);
        TORCH_CHECK_VALUE(
            layer.tensor.size(layout.token) == first.size(layout.token) && layout.batch_of(layer.tensor) == batch,
            layer.name, " must have the sequences and tokens of keys[0], ", first.sizes(), ", got ",
            layer.tensor.sizes());
        rotary_dim_of(tables, layer);
        check_heads_have_tables(layer, layout, stack.of_layers);
    });
}

// Compares neighbours in address order only: of 64 layers, 63 pairs instead of 2016.
void check_no_overlap_of_layers(const RescaleCacheCall& call) {
    std::vector<size_t> order(call.keys.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
        return static_cast<const char*>(call.keys[a].const_data_ptr()) <
               static_cast<const char*>(call.keys[b].const_data_ptr());
    });
    for (size_t i = 1; i < order.size(); ++i) {
        const auto [a, b] = std::minmax(order[i - 1], order[i]);
        check_no_overlap(call.layer(a), call.layer(b), " to be turned in place");
    }
}

struct RescaleCache {
    static constexpr const char* name = "rescale_cache_";
    static constexpr const char* written = "turned in place";
    static constexpr const char* no_gradient = "cached keys are turned without gradients: use torch.no_grad()";
    using Call = RescaleCacheCall;
    using Signature = void(TensorList, const Tensor&, const Tensor&, const Tensor&, const Tensor&, std::string_view,
                           std::string_view);

    static void each_input(const Call& call, const auto& visit) { call.each_layer(visit); }
    static void each_written(const Call& call, const auto& visit) { call.each_layer(visit); }

    static void check(const Call& call) {
        TORCH_CHECK_VALUE(!call.keys.empty(), "keys must hold a tensor for every layer, got none");
        pairing_named(call.pairing);
        const NamedTensor first = call.layer(0);
        dtype_of(first);
        call.each_layer([&](NamedTensor layer) {
            check_rank(layer, layout_named(call.layout));
            check_like(layer, first);
        });
        check_positions_kind({"positions", call.positions}, first);
        check_table_kind(call.tables, first);
        check_index_kind({"old", call.from}, first);
        check_index_kind({"new", call.to}, first);
    }

    // One backend call for all layers of the same shape and strides.
    template <class Backend>
    static void run(const Call& call) {
        const Layout layout = layout_named(call.layout);
        const NamedTensor first = call.layer(0);
        const RescaleTables stack = rescale_tables(call.tables);
        check_sizes(call, stack, layout);
        check_no_overlap_of_layers(call);
        const PositionsView positions = positions_view({"positions", call.positions}, first, layout, stack.of_layers);
        const Tensor from = call.from.contiguous();
        const Tensor to = call.to.contiguous();
        std::vector<bool> done(call.keys.size());
        for (size_t i = 0; i < call.keys.size(); ++i) {
            if (done[i]) continue;
            const Tensor& keys = call.keys[i];
            std::vector<void*> group;
            std::vector<int32_t> layer_of_keys;
            for (size_t j = i; j < call.keys.size(); ++j) {
                const Tensor& other = call.keys[j];
                if (done[j] || other.sizes() != keys.sizes() || other.strides() != keys.strides()) continue;
                group.push_back(other.data_ptr());
                layer_of_keys.push_back(stack.layers == 1 ? 0 : static_cast<int32_t>(j));
                done[j] = true;
            }
            Backend::run(RescaleCacheArgs{.keys = group,
                                          .strides = head_strides(keys, layout),
                                          .positions = positions,
                                          .tables = static_cast<const uint64_t*>(call.tables.const_data_ptr()),
                                          .table_count = stack.count,
                                          .table_layers = static_cast<int32_t>(stack.layers),
                                          .layer_of_keys = layer_of_keys,
                                          .table_rows = static_cast<int32_t>(stack.rows),
                                          .table_heads = static_cast<int32_t>(stack.heads),
                                          .from = static_cast<const int32_t*>(from.const_data_ptr()),
                                          .to = static_cast<const int32_t*>(to.const_data_ptr()),
                                          .batch = layout.batch_of(keys),
                                          .tokens = keys.size(layout.token),
                                          .heads = head_count(call.layer(i), layout),
                                          .rotary_dim = rotary_dim_of(call.tables, first),
                                          .dtype = dtype_of(first),
                                          .pairing = pairing_named(call.pairing)},
                         keys);
        }
    }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    register_op<RescaleCache>(library,
                              "(Tensor(a!)[] keys, Tensor positions, Tensor tables, Tensor old, Tensor new, "
                              "str layout='bhsd', str pairing='halves') -> ()");
}

void rescale_cache_(TensorList keys, const Tensor& positions, const Tensor& tables, const Tensor& from,
                    const Tensor& to, const RescaleCacheOptions& options) {
    dispatched<RescaleCache>().call(keys, positions, tables, from, to, name_of(options.layout),
                                    name_of(options.pairing));
}

}  // namespace mrrope
