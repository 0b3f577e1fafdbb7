#pragma once

#include <cstdint>

#include "mrrope/rotary.h"

// How a head is split into vectors, two per lane.

namespace mrrope {

inline constexpr int access_bytes = 16;

// Threads with vectors hold all positions of a token: time, height and width, and text. With more rows they take single
// components.
inline constexpr int max_rows_with_vectors = 4;

// Components of a whole vector. Of float64, which serves gradient checks, it is one.
constexpr int full_vector(int element_size) {
    return element_size > 4 ? 1 : access_bytes / element_size;
}

// `lanes` threads per head, each with `vector` components from each half of the rotated part.
struct HeadSplit {
    int vector = 1;
    int lanes = 1;
};

// Whole vectors if heads are aligned and each half of the rotated part and the unrotated tail are whole vectors; else
// single components.
constexpr HeadSplit split_head(int head_dim, int rotary_dim, int element_size, bool aligned) {
    const int half = rotary_dim / 2;
    const int full = full_vector(element_size);
    const bool fits = half % full == 0 && (head_dim - rotary_dim) % full == 0;
    const int vector = aligned && fits ? full : 1;
    return {vector, half / vector};
}

// Whether every head starts at a multiple of `alignment` bytes.
inline bool starts_aligned(const void* heads, const HeadStrides& strides, int element_size,
                           int alignment = access_bytes) {
    const auto misaligned = [&](int64_t bytes) { return bytes % alignment != 0; };
    return !misaligned(reinterpret_cast<int64_t>(heads)) && !misaligned(strides.batch * element_size) &&
           !misaligned(strides.token * element_size) && !misaligned(strides.head * element_size);
}

// The largest power of two, up to access_bytes, that the address and the strides of heads are multiples of in bytes.
inline int alignment_of(const void* heads, const HeadStrides& strides, int element_size) {
    const int64_t bits =
        reinterpret_cast<int64_t>(heads) | access_bytes | (strides.batch | strides.token | strides.head) * element_size;
    return static_cast<int>(bits & -bits);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// Groups of up to heads_per_thread heads; with head tables, all of one table.
constexpr int groups_of(int heads, int heads_per_thread, int table_heads = 1) {
    return static_cast<int>(table_heads * ceil_div(heads / table_heads, heads_per_thread));
}

}  // namespace mrrope
