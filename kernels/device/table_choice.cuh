#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "mrrope/rotary.h"
#include "mrrope/rotation.h"

// Finding a token's table among several, and the factors of its query heads.

namespace mrrope {

// Where a token's index lies; meaningless where TableChoice has no indices.
__device__ inline const int32_t* index_address(const TableChoice& choice, int batch, int token) {
    return choice.index + int64_t{batch} * choice.batch_stride + int64_t{token} * choice.token_stride;
}

// Without indices, every sequence has its own table.
__device__ inline uint32_t load_index(const TableChoice& choice, const int32_t* address, int batch) {
    return choice.index == nullptr ? batch : *address;
}

// load_index before griddepcontrol.wait: speculative, to be verified by load_index after it. The preceding kernel may
// be about to write the index.
__device__ inline uint32_t load_index_speculatively(const TableChoice& choice, const int32_t* address, int batch,
                                                    bool exists) {
    uint32_t index = batch;
    if (choice.index != nullptr && exists) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(index) : "l"(address));  // volatile: not sunk to its first use
    }
    return index;
}

// Offset of a table, in words. Clamped as unsigned, so that no index, negative ones included, leads out of the tables.
__device__ inline int64_t table_offset(const TableChoice& choice, uint32_t index) {
    const uint32_t number = min(index, static_cast<uint32_t>(choice.count - 1));
    return static_cast<int64_t>(uint64_t{number} * static_cast<uint32_t>(choice.stride));
}

// Offset of a head table from the first of its table. All head tables of one table are fewer than 2^31 words.
__device__ inline int head_table_offset(const TableChoice& choice, int table_head) {
    return table_head * choice.head_stride;
}

// Offset of the table of a token, for kernels that do not speculate.
__device__ inline int64_t table_offset(const TableChoice& choice, int batch, int token) {
    return table_offset(choice, load_index(choice, index_address(choice, batch, token), batch));
}

__device__ inline int64_t table_offset(const TableChoice& choice, int batch, int token, int table_head) {
    return table_offset(choice, batch, token) + head_table_offset(choice, table_head);
}

// The factor of a head of q by the table at an offset. 1 for heads of k, and where there are no factors.
template <class Real>
__device__ Real query_factor(const TableChoice& choice, int64_t offset_of_table, bool is_q, int head) {
    if (choice.query_factors == nullptr || !is_q) return 1;
    return static_cast<Real>(factor_of(choice.query_factors[offset_of_table + head]));
}

// The factors of a thread's heads, loaded together and without a branch, so that neither waits for the other or for
// what is loaded beside them.
template <class Real, int HeadsPerThread>
struct QueryFactors {
    Real of_head[HeadsPerThread];

    // head_of_q(j): the number of the thread's head j among the heads of q, or a negative one if it is none.
    template <class HeadOfQ>
    __device__ void load(const TableChoice& choice, int64_t offset_of_table, HeadOfQ&& head_of_q) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < HeadsPerThread; ++j) {
            const int head = head_of_q(j);
            of_head[j] = query_factor<Real>(choice, offset_of_table, /*is_q=*/head >= 0, head);
        }
    }
};

}  // namespace mrrope
