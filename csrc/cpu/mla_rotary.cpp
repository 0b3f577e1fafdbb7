#include "mrrope/mla_rotary.h"

#include <cstring>
#include <vector>

#include "parallel_items.h"
#include "rotate_tokens.h"
#include "storage.h"

namespace mrrope {
namespace {

void on_this_thread(int64_t count, int64_t, const RangeBody& body) {
    body(0, count);
}

void copy_part(const CopiedPart& part, const RotaryArgs& rotary, const ParallelFor& parallel_for) {
    const HeadsView& view = part.view;
    const int size = size_of(rotary.dtype);
    const auto byte_of = [&](const HeadStrides& strides, int64_t at, int64_t head) {
        return (at / rotary.tokens * strides.batch + at % rotary.tokens * strides.token + head * strides.head) * size;
    };
    parallel_for_items(parallel_for, rotary.batch * rotary.tokens, int64_t{view.heads} * part.dim,
                       components_per_thread, [&](int64_t begin, int64_t end) {
                           for (int64_t at = begin; at < end; ++at) {
                               for (int64_t head = 0; head < view.heads; ++head) {
                                   std::memcpy(static_cast<char*>(view.out) + byte_of(view.out_strides, at, head),
                                               static_cast<const char*>(view.in) + byte_of(view.in_strides, at, head),
                                               int64_t{part.dim} * size);
                               }
                           }
                       });
}

// The rope parts of the only token of `keys` are added up, rotated and stored to k.out.
template <class Storage>
void rotate_sum_of_heads(const RotaryArgs& keys) {
    using Real = decltype(load(Storage{}));
    const HeadsView& k = keys.k;
    std::vector<Real> sum(keys.rotary_dim);
    for (int64_t head = 0; head < k.heads; ++head) {
        const auto* in = static_cast<const Storage*>(k.in) + head * k.in_strides.head;
        for (int at = 0; at < keys.rotary_dim; ++at) sum[at] += load(in[at]);
    }
    RotaryArgs rotation = keys;
    rotation.k = {};
    rotation.q = {.in = sum.data(), .out = sum.data(), .heads = 1, .in_strides = {}, .out_strides = {}};
    rotation.dtype = sizeof(Real) == sizeof(double) ? DType::float64 : DType::float32;
    rotary_cpu(rotation, on_this_thread);
    auto* out = static_cast<Storage*>(k.out);
    for (int at = 0; at < keys.rotary_dim; ++at) store(out[at], sum[at]);
}

}  // namespace

void mla_rotary_cpu(const MlaRotaryArgs& args, const ParallelFor& parallel_for) {
    validate(args);
    rotary_cpu(args.rotary, parallel_for);
    copy_part(args.q_nope, args.rotary, parallel_for);
    copy_part(args.k_nope, args.rotary, parallel_for);
}

void mla_rotary_gradient_cpu(const MlaRotaryGradientArgs& args, const ParallelFor& parallel_for) {
    validate(args);
    const RotaryArgs& rotary = args.rotary;
    RotaryArgs queries = rotary;
    queries.k = {};
    rotary_cpu(queries, parallel_for);
    copy_part(args.q_nope, rotary, parallel_for);
    const int64_t per_token = int64_t{rotary.k.heads} * rotary.rotary_dim;
    parallel_for_items(
        parallel_for, rotary.batch * rotary.tokens, per_token, components_per_thread, [&](int64_t begin, int64_t end) {
            with_storage(rotary.dtype, [&](auto storage) {
                for (int64_t at = begin; at < end; ++at) {
                    rotate_sum_of_heads<decltype(storage)>(slice(rotary, at / rotary.tokens, 1, at % rotary.tokens, 1));
                }
            });
        });
}

}  // namespace mrrope
