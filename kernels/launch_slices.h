#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "mrrope/mla_rotary.h"
#include "mrrope/mla_rotary_and_cache.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_and_cache.h"
#include "mrrope/rotary_cos_sin.h"

// Large calls are split into launches whose thread and token indices fit in 32 bits.

namespace mrrope {

// All tokens of the batch if they fit in one launch, else at most those of one sequence.
inline int64_t tokens_per_launch(int64_t batch, int64_t tokens, int64_t threads_per_token, int block_threads) {
    // Thread indices of the last block may exceed the last thread's.
    const int64_t max_threads = std::numeric_limits<int32_t>::max() - block_threads;
    const int64_t max_tokens = std::max<int64_t>(1, max_threads / std::max<int64_t>(1, threads_per_token));
    const int64_t all_tokens = batch * tokens;
    return all_tokens <= max_tokens ? all_tokens : std::min(max_tokens, tokens);
}

// Calls f(first_batch, batch, first_token, tokens) for every launch.
template <class F>
void for_each_slice(int64_t batch, int64_t tokens, int64_t tokens_per_launch, F&& f) {
    if (tokens_per_launch >= batch * tokens) return f(0, batch, 0, tokens);
    for (int64_t sequence = 0; sequence < batch; ++sequence) {
        for (int64_t token = 0; token < tokens; token += tokens_per_launch) {
            f(sequence, 1, token, std::min(tokens_per_launch, tokens - token));
        }
    }
}

// Calls f with the arguments of every launch.
template <class F>
void for_each_launch(const RotaryArgs& args, int64_t tokens_per_launch, F&& f) {
    for_each_slice(args.batch, args.tokens, tokens_per_launch, [&](auto... part) { f(slice(args, part...)); });
}

template <class Args, class F>
void for_each_launch(const Args& args, int64_t tokens_per_launch, F&& f) {
    for_each_slice(args.rotary.batch, args.rotary.tokens, tokens_per_launch,
                   [&](auto... part) { f(slice(args, part...)); });
}

}  // namespace mrrope
