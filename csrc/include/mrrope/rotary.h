#pragma once

#include <cstdint>
#include <functional>

// Rotary position embedding on plain pointers, for the torch ops and for programs without torch.

struct CUstream_st;  // cudaStream_t, without CUDA's headers

namespace mrrope {

enum class DType { float64, float32, float16, bfloat16 };

int size_of(DType);

// What a result is stored as: the heads' dtype, or float8, rounded once from the float32 result, saturating.
enum class StoredAs { heads_dtype, float8_e4m3, float8_e5m2 };

constexpr bool is_float8(StoredAs stored_as) {
    return stored_as != StoredAs::heads_dtype;
}

int size_of(StoredAs, DType heads_dtype);

// Pair i is components (i, i + rotary_dim / 2), or (2i, 2i + 1).
enum class Pairing { halves, interleaved };

// In elements. head_dim is contiguous.
struct HeadStrides {
    int64_t batch = 0;
    int64_t token = 0;
    int64_t head = 0;

    bool operator==(const HeadStrides&) const = default;
};

// q or k, [batch, tokens, heads, head_dim]. In place if `out` equals `in`, with equal strides.
struct HeadsView {
    const void* in = nullptr;
    void* out = nullptr;
    int heads = 0;
    HeadStrides in_strides;
    HeadStrides out_strides;
};

// int32 or int64 positions, [batch, tokens]; stride 0 broadcasts. Tokens with several positions, such as time, height
// and width, have [rows, batch, tokens], at most max_position_rows, and row_of_pair names the row for each pair.
struct PositionsView {
    const void* data = nullptr;
    bool is_int64 = true;
    int64_t batch_stride = 0;
    int64_t token_stride = 1;
    int64_t rows = 1;
    int64_t row_stride = 0;
    // Byte i of a pair's word is the row of the pair i pairs after it, of the same table, so that one load gives a GPU
    // thread the rows of all its pairs. Rows that do not exist are clamped to the last. In the tables' memory space;
    // each table has its own words, as far apart as the tables: TableChoice::stride and TableChoice::head_stride.
    const uint64_t* row_of_pair = nullptr;
};

// Selects each token's table among `count` tables, `stride` words apart: by `index`, or by the token's sequence if
// `index` is nullptr. A batch_stride or token_stride of 0 broadcasts the index. 32-bit members, because every GPU
// thread multiplies by them.
//
// Every table of the choice is one table, or `heads` tables, head_stride words apart, for as many groups of
// neighbouring heads: head h of n uses table h / (n / heads). `heads` divides the heads of q and those of k.
struct TableChoice {
    int32_t count = 1;
    int32_t stride = 0;
    int32_t heads = 1;
    int32_t head_stride = 0;
    const int32_t* index = nullptr;  // in the tables' memory space; below `count`
    int32_t batch_stride = 0;
    int32_t token_stride = 0;
    // The bits of a factor for every head of q, beside the attention factor; those of table t begin t * stride words
    // on. In the tables' memory space. nullptr: no factors.
    const uint64_t* query_factors = nullptr;

    // Whether heads of one token may be rotated differently.
    bool is_per_head() const { return heads > 1 || query_factors != nullptr; }
};

struct RotaryArgs {
    HeadsView q;
    HeadsView k;  // 0 heads: q only
    PositionsView positions;
    // packed(FrequencyTable), in the heads' memory space. A table negated word by word rotates backwards with the same
    // row_of_pair and attention factor.
    const uint64_t* table = nullptr;
    TableChoice choice;
    int64_t batch = 0;
    int64_t tokens = 0;
    int head_dim = 0;
    int rotary_dim = 0;  // leading components of a head; the rest is copied
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
    bool conjugate = false;  // negate the angle, keep the attention factor: the backward pass
};

// Throws std::invalid_argument, which names the field, for arguments that are no valid call. Reads none of the memory
// that they point to. Every launcher calls it.
void validate(const RotaryArgs& args);

// `args` restricted to these sequences and tokens.
RotaryArgs slice(const RotaryArgs& args, int64_t first_batch, int64_t batch, int64_t first_token, int64_t tokens);

// Calls body(begin, end) on a partition of [0, count), in any order, with at least about `grain` items per range.
using RangeBody = std::function<void(int64_t begin, int64_t end)>;
using ParallelFor = std::function<void(int64_t count, int64_t grain, const RangeBody& body)>;

void on_all_cores(int64_t count, int64_t grain, const RangeBody& body);

void rotary_cpu(const RotaryArgs& args, const ParallelFor& parallel_for = on_all_cores);

// In the CMake target mrrope::cuda. Asynchronous on `stream` of the current device. Throws std::runtime_error if the
// launch fails.
void rotary_cuda(const RotaryArgs& args, CUstream_st* stream);

}  // namespace mrrope
