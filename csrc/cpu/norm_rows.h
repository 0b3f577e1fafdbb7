#pragma once

#include <cmath>

#include "mrrope/qk_norm_rotary.h"
#include "rotate_pairs.h"

// Rows of an RMSNorm on the CPU, widened to Real. Internal linkage: see instruction_sets.h.

namespace mrrope {
namespace {

// The elements that share a root mean square: heads [first, first + heads) of one token of q or k.
struct Row {
    int64_t batch;
    int64_t token;
    int first;
    int heads;
    int head_dim;
    int heads_per_table;
    bool is_q;

    int size() const { return heads * head_dim; }
    int64_t offset(const HeadStrides& strides, int head) const {
        return batch * strides.batch + token * strides.token + (first + head) * strides.head;
    }
};

template <class F>
void for_each_row(const RotaryArgs& args, NormOver over, const HeadsView& view, int64_t batch, int64_t token, F&& f) {
    const int heads = over == NormOver::head ? 1 : view.heads;
    const int heads_per_table = view.heads / args.choice.heads;
    for (int first = 0; first < view.heads; first += heads) {
        f(Row{batch, token, first, heads, args.head_dim, heads_per_table, &view == &args.q});
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

// The cosines and sines of one token by every head's table, rotary_dim / 2 for each table.
template <class Real>
struct TokenCosSin {
    Real* cos;
    Real* sin;
    uint64_t* phases;  // scratch memory for rotary_dim / 2 words

    void fill(const RotaryArgs& args, bool conjugate, int64_t batch, int64_t token) const {
        const int half = args.rotary_dim / 2;
        for (int table_head = 0; table_head < args.choice.heads; ++table_head) {
            const int64_t table = int64_t{table_head} * half;
            fill_cos_sin(cos + table, sin + table, phases, args, batch, token, table_head, 0, half,
                         static_cast<Real>(conjugate ? -1 : 1));
        }
    }

    void rotate(const RotaryArgs& args, const Row& row, Real* wide) const {
        const int half = args.rotary_dim / 2;
        for (int head = 0; head < row.heads; ++head, wide += row.head_dim) {
            const int64_t table = int64_t{(row.first + head) / row.heads_per_table} * half;
            if (row.is_q && args.choice.query_factors != nullptr) {
                const double factor = query_factor(args.choice, row.batch, row.token, row.first + head);
                rotate_pairs_times(static_cast<Real>(factor), wide, wide, args, 0, half, cos + table, sin + table);
            } else {
                rotate_pairs(wide, wide, args, 0, half, cos + table, sin + table);
            }
        }
    }
};

// Accumulated in double, so that the error of a float sum does not grow with the row.
template <class Real>
double sum_of_products(const Real* a, const Real* b, int size) {
    double sum = 0.0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < size; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    return sum;
}

template <class Real>
double inverse_rms(const QkNorm& norm, const Real* row, int size) {
    return 1.0 / std::sqrt(sum_of_products(row, row, size) / size + norm.eps);
}

template <class Storage, class Real>
void norm_row(const QkNorm& norm, const void* weights, Real* row, int size) {
    const auto* weight = static_cast<const Storage*>(weights);
    const auto offset = static_cast<Real>(norm.weight_offset);
    const auto scale = static_cast<Real>(inverse_rms(norm, row, size));
#pragma omp simd
    for (int i = 0; i < size; ++i) row[i] *= scale * (load(weight[i]) + offset);
}

}  // namespace
}  // namespace mrrope
