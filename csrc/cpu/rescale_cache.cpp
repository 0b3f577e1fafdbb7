#include "mrrope/rescale_cache.h"

#include <bit>
#include <vector>

#include "mrrope/rotation.h"

namespace mrrope {

void rescale_cache_cpu(const RescaleCacheArgs& args, const ParallelFor& parallel_for) {
    const int half = args.rotary_dim / 2;
    const int64_t words = half + 1;
    std::vector<uint64_t> table(words);
    for (int64_t sequence = 0; sequence < args.batch; ++sequence) {
        if (args.from[sequence] == args.to[sequence]) continue;
        const uint64_t* from = args.tables + args.from[sequence] * words;
        const uint64_t* to = args.tables + args.to[sequence] * words;
        for (int pair = 0; pair < half; ++pair) table[pair] = to[pair] - from[pair];
        table[half] = std::bit_cast<uint64_t>(attention_factor_of(to[half]) / attention_factor_of(from[half]));
        for (void* layer : args.keys) {
            void* keys = static_cast<char*>(layer) + sequence * args.strides.batch * size_of(args.dtype);
            const HeadsView view{
                .in = keys, .out = keys, .heads = args.heads, .in_strides = args.strides, .out_strides = args.strides};
            RotaryArgs rotary{.q = view,
                              .k = {},
                              .positions = args.positions,
                              .table = table.data(),
                              .choice = {},
                              .batch = 1,
                              .tokens = args.tokens,
                              .head_dim = args.rotary_dim,
                              .rotary_dim = args.rotary_dim,
                              .dtype = args.dtype,
                              .pairing = args.pairing};
            rotary.positions.data = static_cast<const char*>(args.positions.data) +
                                    sequence * args.positions.batch_stride * (args.positions.is_int64 ? 8 : 4);
            rotary_cpu(rotary, parallel_for);
        }
    }
}

}  // namespace mrrope
