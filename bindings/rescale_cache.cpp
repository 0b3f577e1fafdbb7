#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/autograd.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "backends.h"
#include "mrrope/torch_ops.h"
#include "tensor_views.h"

namespace mrrope {
namespace {

using at::Tensor;
using at::TensorList;

using RescaleCacheSignature = void(TensorList, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                   c10::string_view, c10::string_view);

const auto& rescale_op() {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("mrrope::rescale_cache_", "").typed<RescaleCacheSignature>();
    return op;
}

std::string layer_name(size_t layer) {
    return "keys[" + std::to_string(layer) + "]";
}

void check_kinds(TensorList keys, const Tensor& positions, const Tensor& tables, const Tensor& from, const Tensor& to,
                 c10::string_view layout, c10::string_view pairing) {
    TORCH_CHECK_VALUE(!keys.empty(), "keys must hold a tensor for every layer, got none");
    pairing_named(pairing);
    const NamedHeads first{"keys[0]", keys[0]};
    dtype_of(first);
    for (size_t i = 0; i < keys.size(); ++i) {
        check_rank({layer_name(i).c_str(), keys[i]}, layout_named(layout));
        TORCH_CHECK_TYPE(keys[i].scalar_type() == keys[0].scalar_type(), layer_name(i), " must have the dtype of ",
                         "keys[0], ", keys[0].scalar_type(), ", got ", keys[i].scalar_type());
        TORCH_CHECK(keys[i].device() == keys[0].device(), layer_name(i), " must be on the device of keys[0], ",
                    keys[0].device(), ", got ", keys[i].device());
    }
    check_positions_kind(positions, first);
    check_table_kind(tables, first);
    check_index_kind("old", from, first);
    check_index_kind("new", to, first);
}

// Layers that one call of a backend can take: they lie in memory alike.
bool are_alike(const Tensor& a, const Tensor& b) {
    return a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Layers that start where the one before ends are apart; others may share memory.
void check_layers_apart(TensorList keys) {
    std::vector<size_t> order(keys.size());
    std::iota(order.begin(), order.end(), 0);
    const auto start = [&](size_t layer) { return static_cast<const char*>(keys[layer].const_data_ptr()); };
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return start(a) < start(b); });
    for (size_t i = 1; i < order.size(); ++i) {
        const size_t a = std::min(order[i - 1], order[i]);
        const size_t b = std::max(order[i - 1], order[i]);
        const std::string names[] = {layer_name(a), layer_name(b)};
        check_apart({names[0].c_str(), keys[a]}, {names[1].c_str(), keys[b]}, " to be turned in place");
    }
}

template <class Backend>
void rescale_on(TensorList keys, const Tensor& positions, const Tensor& tables, const Tensor& from, const Tensor& to,
                c10::string_view layout_name, c10::string_view pairing) {
    check_kinds(keys, positions, tables, from, to, layout_name, pairing);
    const Layout layout = layout_named(layout_name);
    const NamedHeads first{"keys[0]", keys[0]};
    const int64_t batch = layout.batch_of(keys[0]);
    TORCH_CHECK_VALUE(tables.dim() == 2 && tables.size(0) >= 1 && tables.size(1) >= 2 && tables.is_contiguous(),
                      "tables must be a contiguous stack of packed tables, got ", tables.sizes(), " with strides ",
                      tables.strides());
    check_attention_factors(tables);
    for (const auto& [name, index] : {std::pair("old", from), std::pair("new", to)}) {
        TORCH_CHECK_VALUE(index.dim() == 1 && index.size(0) == batch, name, " must be [", batch,
                          "], one a sequence of keys of ", keys[0].sizes(), ", got ", index.sizes());
        check_range(name, index, tables.size(0));
    }
    for (size_t i = 0; i < keys.size(); ++i) {
        const std::string name = layer_name(i);
        check_last_dimension({name.c_str(), keys[i]}, layout);
        check_own_memory({name.c_str(), keys[i]});
        TORCH_CHECK_VALUE(keys[i].size(layout.token) == keys[0].size(layout.token) && layout.batch_of(keys[i]) == batch,
                          name, " must have the sequences and tokens of keys[0], ", keys[0].sizes(), ", got ",
                          keys[i].sizes());
        rotary_dim_of(tables, {name.c_str(), keys[i]});
    }
    check_layers_apart(keys);
    const PositionsView positions_view = positions_of(positions, first, layout);
    const Tensor from_each = from.contiguous();
    const Tensor to_each = to.contiguous();

    std::vector<bool> done(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
        if (done[i]) continue;
        std::vector<void*> alike;
        for (size_t j = i; j < keys.size(); ++j) {
            if (done[j] || !are_alike(keys[i], keys[j])) continue;
            alike.push_back(keys[j].data_ptr());
            done[j] = true;
        }
        Backend::run(RescaleCacheArgs{.keys = alike,
                                      .strides = strides_of(keys[i], layout),
                                      .positions = positions_view,
                                      .tables = static_cast<const uint64_t*>(tables.const_data_ptr()),
                                      .table_count = tables.size(0),
                                      .from = static_cast<const int32_t*>(from_each.const_data_ptr()),
                                      .to = static_cast<const int32_t*>(to_each.const_data_ptr()),
                                      .batch = batch,
                                      .tokens = keys[i].size(layout.token),
                                      .heads = heads_of({layer_name(i).c_str(), keys[i]}, layout),
                                      .rotary_dim = rotary_dim_of(tables, first),
                                      .dtype = dtype_of(first),
                                      .pairing = pairing_named(pairing)},
                     keys[0]);
    }
}

void rescale_versioned(TensorList keys, const Tensor& positions, const Tensor& tables, const Tensor& from,
                       const Tensor& to, c10::string_view layout, c10::string_view pairing) {
    for (size_t i = 0; i < keys.size(); ++i) {
        TORCH_CHECK(!keys[i].is_inference() || c10::InferenceMode::is_enabled(), layer_name(i),
                    " was made in inference mode and cannot be turned in place outside it: clone it first");
    }
    {
        const at::AutoDispatchBelowADInplaceOrView below_autograd;
        rescale_op().call(keys, positions, tables, from, to, layout, pairing);
    }
    for (const Tensor& x : keys) torch::autograd::impl::bump_version(x);
}

// A cache is for reading on without gradients: to turn keys that carry any would lose them.
void rescale_autograd(TensorList keys, const Tensor& positions, const Tensor& tables, const Tensor& from,
                      const Tensor& to, c10::string_view layout, c10::string_view pairing) {
    for (size_t i = 0; i < keys.size(); ++i) {
        TORCH_CHECK(!(at::GradMode::is_enabled() && keys[i].requires_grad()), layer_name(i),
                    " requires grad, and cached keys are turned without gradients: use torch.no_grad()");
    }
    const at::AutoDispatchBelowAutograd below_autograd;
    rescale_op().call(keys, positions, tables, from, to, layout, pairing);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(mrrope, m) {
    m.def(
        "rescale_cache_(Tensor(a!)[] keys, Tensor positions, Tensor tables, Tensor old, Tensor new, "
        "str layout='bhsd', str pairing='halves') -> ()",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(mrrope, CPU, m) {
    m.impl("rescale_cache_", rescale_on<Cpu>);
}

TORCH_LIBRARY_IMPL(mrrope, CUDA, m) {
    m.impl("rescale_cache_", rescale_on<Cuda>);
}

TORCH_LIBRARY_IMPL(mrrope, Meta, m) {
    m.impl("rescale_cache_", check_kinds);
}

TORCH_LIBRARY_IMPL(mrrope, Autograd, m) {
    m.impl("rescale_cache_", rescale_autograd);
}

TORCH_LIBRARY_IMPL(mrrope, ADInplaceOrView, m) {
    m.impl("rescale_cache_", rescale_versioned);
}

void rescale_cache_(TensorList keys, const Tensor& positions, const Tensor& tables, const Tensor& from,
                    const Tensor& to, std::string_view layout, std::string_view pairing) {
    rescale_op().call(keys, positions, tables, from, to, layout, pairing);
}

}  // namespace mrrope
