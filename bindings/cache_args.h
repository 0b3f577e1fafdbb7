#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string_view>

#include "mrrope/rotary_and_cache.h"
#include "rotary_args.h"
#include "tensor_views.h"

namespace mrrope {

// The arguments of rotary_and_cache_, which other ops that write a cache share. In place, q_out is q.
struct CacheCall {
    const at::Tensor& q;
    const at::Tensor& q_out;
    const at::Tensor& k;
    const at::Tensor& v;
    const at::Tensor& positions;
    const at::Tensor& table;
    const at::Tensor& key_cache;
    const at::Tensor& value_cache;
    const at::Tensor& slots;
    bool paged;
    std::string_view layout;
    std::string_view cache_layout;
    std::string_view pairing;
    const OptionalTensor& key_scale;
    const OptionalTensor& value_scale;
    const OptionalTensor& table_index;

    bool in_place() const { return q.is_same(q_out); }
    NamedTensor named_slots() const { return {paged ? "slots" : "cache_positions, or else positions,", slots}; }
    NamedTensor named_q_out() const { return {in_place() ? "q" : "q_out", q_out}; }
    RotaryCall rotary() const { return {q, positions, table, layout, pairing, /*conjugate=*/false, table_index}; }
    std::array<NamedTensor, 3> heads() const { return {{{"q", q}, {"k", k}, {"v", v}}}; }
    std::array<NamedTensor, 2> caches() const { return {{{"key_cache", key_cache}, {"value_cache", value_cache}}}; }
    std::array<NamedTensor, 3> written() const {
        return {{named_q_out(), {"key_cache", key_cache}, {"value_cache", value_cache}}};
    }
};

// q's dtype, or float8; raises for other dtypes and for float8 of float64.
StoredAs stored_as(NamedTensor x, NamedTensor q);

// The scale of float8 results is float32 on q's device, and comes with float8 only. `results` names them in the error.
void check_scale_kind(NamedTensor scale, StoredAs results, const char* results_name, NamedTensor q);

// Checks rank, dtype and device of all but q_out, whose dtype the op decides.
void check_kinds(const CacheCall& call);

// A scale, or one for each of the heads of `heads_name`: its stride, 0 for one.
int64_t checked_scale_stride(NamedTensor scale, int heads, const char* heads_name);

// Checks sizes, strides and values, then fills the backends' struct.
RotaryAndCacheArgs cache_args(const CacheCall& call);

}  // namespace mrrope
