#pragma once

#include <cstdint>
#include <functional>

// Rotary position embedding on plain pointers: what torch's ops call, and what a program without torch can call.

struct CUstream_st;  // cudaStream_t, without CUDA's headers

namespace mrrope {

enum class DType { float64, float32, float16, bfloat16 };

int size_of(DType);

// Which two components are rotated together: (i, i + rotary_dim / 2), or (2i, 2i + 1).
enum class Pairing { halves, interleaved };

// In elements. The last dimension is contiguous.
struct HeadStrides {
    int64_t batch = 0;
    int64_t token = 0;
    int64_t head = 0;
};

// q or k: `heads` heads of every token of every sequence. In place where out is in, with the same strides.
struct HeadsView {
    const void* in = nullptr;
    void* out = nullptr;
    int heads = 0;
    HeadStrides in_strides;
    HeadStrides out_strides;
};

// int32 or int64 positions of [batch, tokens]; stride 0 broadcasts. Where a token has several positions (time, height
// and width, say), of [rows, batch, tokens], and row_of_pair tells which of them turns each pair; a number past the
// last row is the last.
struct PositionsView {
    const void* data = nullptr;
    bool is_int64 = true;
    int64_t batch_stride = 0;
    int64_t token_stride = 1;
    int64_t rows = 1;
    int64_t row_stride = 0;
    const uint64_t* row_of_pair = nullptr;  // where the table is; of several tables, the first one's
};

// Which of `count` tables, `stride` words apart, a token is rotated by: the one that its int32 index names, or, without
// an index, the one of its sequence; of one table there is no choice. Stride 0 broadcasts an index. All are
// of 32 bits: every thread of a GPU multiplies by them.
struct TableChoice {
    int32_t count = 1;
    int32_t stride = 0;
    const int32_t* index = nullptr;  // where the tables are
    int32_t batch_stride = 0;
    int32_t token_stride = 0;
};

struct RotaryArgs {
    HeadsView q;
    HeadsView k;  // no heads: q alone
    PositionsView positions;
    // packed(FrequencyTable), where the heads are: host or device memory. Negated, word by word, it rotates backwards,
    // by the same row_of_pair and attention factor.
    const uint64_t* table = nullptr;
    TableChoice choice;
    int64_t batch = 0;
    int64_t tokens = 0;
    int head_dim = 0;
    int rotary_dim = 0;  // the first components of a head; the rest is copied
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
    bool conjugate = false;  // rotates by the negated angle, with the same attention factor: the backward pass
};

// The part of `args` that holds these sequences and tokens.
RotaryArgs slice(const RotaryArgs& args, int64_t first_batch, int64_t batch, int64_t first_token, int64_t tokens);

// Calls body(begin, end) for ranges that make up [0, count), none needlessly smaller than `grain`, in any order.
using RangeBody = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t count, int64_t grain, const RangeBody& body)>;

void on_all_cores(int64_t count, int64_t grain, const RangeBody& body);

void rotary_cpu(const RotaryArgs& args, const ParallelFor& parallel_for = on_all_cores);

// Asynchronous on `stream` of the current device. Throws std::runtime_error where the launch fails. In mrrope::cuda.
void rotary_cuda(const RotaryArgs& args, CUstream_st* stream);

}  // namespace mrrope
