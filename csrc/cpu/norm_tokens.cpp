#include "norm_tokens.h"

#include <cmath>

#include "rotate_pairs.h"

// Compiled once per instruction set: see instruction_sets.h.

namespace mrrope {
namespace {

// One row and its gradient, widened to Real, the phases of its token, and its cosines and sines by every head's table.
template <class Real>
struct Scratch {
    Real* row;
    Real* gradient;
    Real* cos;
    Real* sin;
    uint64_t* phases;

    Scratch(double* memory, const QkNormRotaryArgs& args) {
        const int64_t half = args.rotary.rotary_dim / 2;
        const int64_t all_tables = args.rotary.choice.heads * half;
        phases = reinterpret_cast<uint64_t*>(memory);
        cos = reinterpret_cast<Real*>(memory + half);
        sin = reinterpret_cast<Real*>(memory + half + all_tables);
        row = reinterpret_cast<Real*>(memory + half + 2 * all_tables);
        gradient = row + (norm_scratch_size(args) - half - 2 * all_tables) / 2;
    }
};

// The elements that share a root mean square: heads [first, first + heads) of one token of q or k.
struct Row {
    int64_t batch;
    int64_t token;
    int first;
    int heads;
    int head_dim;
    int heads_per_table;

    int size() const { return heads * head_dim; }
    int64_t offset(const HeadStrides& strides, int head) const {
        return batch * strides.batch + token * strides.token + (first + head) * strides.head;
    }
};

template <class F>
void for_each_row(const QkNormRotaryArgs& args, const HeadsView& view, int64_t batch, int64_t token, F&& f) {
    const int heads = args.over == NormOver::head ? 1 : view.heads;
    const int heads_per_table = view.heads / args.rotary.choice.heads;
    for (int first = 0; first < view.heads; first += heads) {
        f(Row{batch, token, first, heads, args.rotary.head_dim, heads_per_table});
    }
}

template <class Storage, class Real>
void read(const Row& row, const void* heads, const HeadStrides& strides, Real* to) {
    for (int head = 0; head < row.heads; ++head) {
        const Storage* from = static_cast<const Storage*>(heads) + row.offset(strides, head);
        Real* wide = to + head * row.head_dim;
#pragma omp simd
        for (int i = 0; i < row.head_dim; ++i) wide[i] = load(from[i]);
    }
}

template <class Storage, class Real>
void write(const Row& row, const Real* from, void* heads, const HeadStrides& strides) {
    for (int head = 0; head < row.heads; ++head) {
        Storage* to = static_cast<Storage*>(heads) + row.offset(strides, head);
        const Real* wide = from + head * row.head_dim;
#pragma omp simd
        for (int i = 0; i < row.head_dim; ++i) store(to[i], wide[i]);
    }
}

template <class Real>
void rotate_row(const RotaryArgs& args, const Row& row, Real* wide, const Scratch<Real>& scratch) {
    const int half = args.rotary_dim / 2;
    for (int head = 0; head < row.heads; ++head, wide += row.head_dim) {
        const int64_t table = int64_t{(row.first + head) / row.heads_per_table} * half;
        rotate_pairs(wide, wide, args, 0, half, scratch.cos + table, scratch.sin + table);
    }
}

// Accumulated in double, so that the error of a float sum does not grow with the row.
template <class Real>
double sum_of_products(const Real* a, const Real* b, int size) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
}

template <class Real>
double inverse_rms(const QkNormRotaryArgs& args, const Real* row, int size) {
    return 1.0 / std::sqrt(sum_of_products(row, row, size) / size + args.eps);
}

template <class Storage, class Real>
void norm_view(const QkNormRotaryArgs& args, const HeadsView& view, const void* weights, int64_t batch, int64_t token,
               const Scratch<Real>& scratch) {
    const auto* weight = static_cast<const Storage*>(weights);
    const auto offset = static_cast<Real>(args.weight_offset);
    for_each_row(args, view, batch, token, [&](const Row& row) {
        read<Storage>(row, view.in, view.in_strides, scratch.row);
        const auto scale = static_cast<Real>(inverse_rms(args, scratch.row, row.size()));
#pragma omp simd
        for (int i = 0; i < row.size(); ++i) scratch.row[i] *= scale * (load(weight[i]) + offset);
        rotate_row(args.rotary, row, scratch.row, scratch);
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
    for_each_row(args, view, batch, token, [&](const Row& row) {
        const int size = row.size();
        Real* x = scratch.row;
        Real* v = scratch.gradient;
        read<Storage>(row, view.in, view.in_strides, x);
        read<Storage>(row, gradient.data, gradient.strides, v);
        rotate_row(args.rotary, row, v, scratch);
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
    const int half = args.rotary_dim / 2;
    for (int64_t at = begin; at < end; ++at) {
        const int64_t batch = at / args.tokens;
        const int64_t token = at % args.tokens;
        for (int table_head = 0; table_head < args.choice.heads; ++table_head) {
            const int64_t table = int64_t{table_head} * half;
            fill_cos_sin(scratch.cos + table, scratch.sin + table, scratch.phases, args, batch, token, table_head, 0,
                         half, static_cast<Real>(conjugate ? -1 : 1));
        }
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
