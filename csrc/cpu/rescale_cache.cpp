#include "mrrope/rescale_cache.h"

#include <bit>
#include <vector>

#include "mrrope/rotation.h"

namespace mrrope {

void rescale_cache_cpu(const RescaleCacheArgs& args, const ParallelFor& parallel_for) {
    const int half = args.rotary_dim / 2;
    const int64_t words = half + 1;
    std::vector<uint64_t> difference(words);
    RotaryArgs rotary{
        .q = {.heads = args.heads, .in_strides = args.strides, .out_strides = args.strides},
        .k = {},
        .positions = args.positions,
        .table = difference.data(),
        .choice = {},
        .batch = args.batch,
        .tokens = args.tokens,
        .head_dim = args.rotary_dim,
        .rotary_dim = args.rotary_dim,
        .dtype = args.dtype,
        .pairing = args.pairing,
    };
    for (int64_t sequence = 0; sequence < args.batch; ++sequence) {
        if (args.from[sequence] == args.to[sequence]) continue;
        const uint64_t* from = args.tables + args.from[sequence] * words;
        const uint64_t* to = args.tables + args.to[sequence] * words;
        for (int pair = 0; pair < half; ++pair) difference[pair] = to[pair] - from[pair];
        difference[half] = std::bit_cast<uint64_t>(attention_factor_of(to[half]) / attention_factor_of(from[half]));
        for (void* keys : args.keys) {
            rotary.q.in = rotary.q.out = keys;
            rotary_cpu(slice(rotary, sequence, 1, 0, args.tokens), parallel_for);
        }
    }
}

}  // namespace mrrope
