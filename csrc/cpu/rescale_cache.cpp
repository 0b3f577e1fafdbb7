#include "mrrope/rescale_cache.h"

#include <bit>
#include <vector>

#include "mrrope/rotation.h"

namespace mrrope {
namespace {

// Tables, `words` words each, that rotate from `from` to `to`.
void subtract_tables(std::span<uint64_t> difference, const uint64_t* to, const uint64_t* from, int64_t words) {
    for (size_t i = 0; i < difference.size(); ++i) difference[i] = to[i] - from[i];
    for (size_t factor = words - 1; factor < difference.size(); factor += words) {
        difference[factor] = std::bit_cast<uint64_t>(factor_of(to[factor]) / factor_of(from[factor]));
    }
}

}  // namespace

void rescale_cache_cpu(const RescaleCacheArgs& args, const ParallelFor& parallel_for) {
    validate(args);
    const int half = args.rotary_dim / 2;
    const int64_t words = half + 1;
    std::vector<uint64_t> difference(args.table_heads * words);
    RotaryArgs rotary{
        .q = {.heads = args.heads, .in_strides = args.strides, .out_strides = args.strides},
        .k = {},
        .positions = args.positions,
        .table = difference.data(),
        .choice = {.heads = args.table_heads, .head_stride = static_cast<int32_t>(words)},
        .batch = args.batch,
        .tokens = args.tokens,
        .head_dim = args.rotary_dim,
        .rotary_dim = args.rotary_dim,
        .dtype = args.dtype,
        .pairing = args.pairing,
    };
    for (int64_t sequence = 0; sequence < args.batch; ++sequence) {
        if (args.from[sequence] == args.to[sequence]) continue;
        for (size_t layer = 0; layer < args.keys.size(); ++layer) {
            const int64_t table_layer = args.layer_of_keys.empty() ? 0 : args.layer_of_keys[layer];
            const auto tables_of = [&](int64_t index) {
                const int64_t layer_of_table = index * args.table_layers + table_layer;
                return args.tables + layer_of_table * args.table_rows * args.table_heads * words;
            };
            subtract_tables(difference, tables_of(args.to[sequence]), tables_of(args.from[sequence]), words);
            rotary.q.in = rotary.q.out = args.keys[layer];
            rotary_cpu(slice(rotary, sequence, 1, 0, args.tokens), parallel_for);
        }
    }
}

}  // namespace mrrope
