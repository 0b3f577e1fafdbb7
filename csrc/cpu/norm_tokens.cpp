#include "norm_tokens.h"

#include "norm_rows.h"

// Compiled once per instruction set: see instruction_sets.h.

namespace mrrope {
namespace {

// One row and its gradient, widened to Real, the phases of its token, and its cosines and sines by every head's table.
template <class Real>
struct Scratch {
    Real* row;
    Real* gradient;
    TokenCosSin<Real> by;

    Scratch(double* memory, const QkNormRotaryArgs& args) {
        const int64_t half = args.rotary.rotary_dim / 2;
        const int64_t all_tables = args.rotary.choice.heads * half;
        by.phases = reinterpret_cast<uint64_t*>(memory);
        by.cos = reinterpret_cast<Real*>(memory + half);
        by.sin = reinterpret_cast<Real*>(memory + half + all_tables);
        row = reinterpret_cast<Real*>(memory + half + 2 * all_tables);
        gradient = row + (norm_scratch_size(args) - half - 2 * all_tables) / 2;
    }
};

template <class Storage, class Real>
void norm_view(const QkNormRotaryArgs& args, const HeadsView& view, const void* weights, int64_t batch, int64_t token,
               const Scratch<Real>& scratch) {
    for_each_row(args.rotary, args.over, view, batch, token, [&](const Row& row) {
        read<Storage>(row, view.in, view.in_strides, scratch.row);
        norm_row<Storage>(args, weights, scratch.row, row.size());
        scratch.by.rotate(args.rotary, row, scratch.row);
        write<Storage>(row, scratch.row, view.out, view.out_strides);
    });
}

// With r the inverse root mean square of x, w the weights plus their offset, and v the gradient rotated back:
//     dx = r * (v * w) - x * r^3 * mean(v * w * x)    and    dw = x * r * v.
template <class Storage, class Real>
void norm_view_gradient(const QkNormRotaryArgs& args, const HeadsView& view, const void* weights,
                        const OutputGradient& gradient, int64_t sum_row, int64_t batch, int64_t token,
                        const Scratch<Real>& scratch) {
    const auto* weight = static_cast<const Storage*>(weights);
    const auto offset = static_cast<Real>(args.weight_offset);
    for_each_row(args.rotary, args.over, view, batch, token, [&](const Row& row) {
        const int size = row.size();
        Real* x = scratch.row;
        Real* v = scratch.gradient;
        read<Storage>(row, view.in, view.in_strides, x);
        read<Storage>(row, gradient.data, gradient.strides, v);
        scratch.by.rotate(args.rotary, row, v);
        const double inverse = inverse_rms(args, x, size);
        const auto scale = static_cast<Real>(inverse);
        if (gradient.weight_sums != nullptr) {
            Real* sums = static_cast<Real*>(gradient.weight_sums) + sum_row * size;
#pragma omp simd
            for (int i = 0; i < size; ++i) sums[i] += scale * x[i] * v[i];
        }
#pragma omp simd
        for (int i = 0; i < size; ++i) v[i] *= load(weight[i]) + offset;
        const double mean = sum_of_products(v, x, size) / size;
        const auto along_x = static_cast<Real>(inverse * inverse * inverse * mean);
#pragma omp simd
        for (int i = 0; i < size; ++i) v[i] = scale * v[i] - along_x * x[i];
        write<Storage>(row, v, view.out, view.out_strides);
    });
}

// Calls f(batch, token) with the token's cosines and sines in `scratch`.
template <class Real, class F>
void for_each_token(const RotaryArgs& args, bool conjugate, int64_t begin, int64_t end, const Scratch<Real>& scratch,
                    F&& f) {
    for (int64_t at = begin; at < end; ++at) {
        const int64_t batch = at / args.tokens;
        const int64_t token = at % args.tokens;
        scratch.by.fill(args, conjugate, batch, token);
        f(batch, token);
    }
}

}  // namespace

void MRROPE_INSTRUCTION_SET::norm_tokens(const QkNormRotaryArgs& args, double* memory, int64_t begin, int64_t end) {
    with_storage(args.rotary.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        const Scratch<decltype(load(storage))> scratch(memory, args);
        const RotaryArgs& rotary = args.rotary;
        for_each_token(rotary, rotary.conjugate, begin, end, scratch, [&](int64_t batch, int64_t token) {
            norm_view<Storage>(args, rotary.q, args.q_weight, batch, token, scratch);
            norm_view<Storage>(args, rotary.k, args.k_weight, batch, token, scratch);
        });
    });
}

void MRROPE_INSTRUCTION_SET::norm_gradient_tokens(const QkNormRotaryGradientArgs& args, double* memory, int64_t sum_row,
                                                  int64_t begin, int64_t end) {
    const QkNormRotaryArgs& call = args.call;
    with_storage(call.rotary.dtype, [&](auto storage) {
        using Storage = decltype(storage);
        const Scratch<decltype(load(storage))> scratch(memory, call);
        const RotaryArgs& rotary = call.rotary;
        for_each_token(rotary, !rotary.conjugate, begin, end, scratch, [&](int64_t batch, int64_t token) {
            norm_view_gradient<Storage>(call, rotary.q, call.q_weight, args.q, sum_row, batch, token, scratch);
            norm_view_gradient<Storage>(call, rotary.k, call.k_weight, args.k, sum_row, batch, token, scratch);
        });
    });
}

}  // namespace mrrope
