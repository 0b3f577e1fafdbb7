#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cache_options.h"
#include "mrrope/rotary_and_cache.h"

namespace mrrope::testing {

// Of a sequence's tokens in a static cache, of all tokens in a paged one.
inline int64_t slot_count(const StorageOptions& o) {
    return o.paged ? o.blocks * o.block_size : o.block_size;
}

inline std::vector<int64_t> three_slots_among_five_out_of_range(const StorageOptions& o) {
    const bool wide = o.slots_are_int64;
    const int64_t count = slot_count(o);
    const int64_t huge = wide ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int32_t>::max();
    const int64_t wrapping = wide ? (int64_t{1} << 32) + 1 : -2;  // truncated to 32 bits, a slot that exists
    return {-1, count, 0, count - 1, huge, -huge - 1, wrapping, 2};
}

// The slots of a call's tokens. Tokens are numbered across the batch.
class TokenSlots {
public:
    // The words of a sequence's slots start row_length words after those of the sequence before it.
    TokenSlots(const StorageOptions& options, int64_t batch, int64_t tokens, int64_t row_length)
        : options_(options), batch_(batch), tokens_(tokens), row_length_(row_length) {}

    // No two tokens share a slot.
    void choose(std::mt19937_64& random) {
        std::vector<int64_t> free;
        for (int64_t i = 0; i < batch_ * tokens_; ++i) {
            if (i == 0 || (!options_.paged && i % tokens_ == 0)) {
                free.resize(count());
                std::iota(free.begin(), free.end(), 0);
                std::shuffle(free.begin(), free.end(), random);
            }
            const bool left_out = free.empty() || (options_.leaves_some_out && random() % 4 == 0);
            if (left_out) {
                const int64_t nowhere[] = {-1, -7, count(), std::numeric_limits<int32_t>::min(),
                                           std::numeric_limits<int32_t>::max()};
                of_tokens_.push_back(nowhere[random() % 5]);
            } else {
                of_tokens_.push_back(free.back());
                free.pop_back();
            }
        }
    }

    std::vector<int64_t>& of_tokens() { return of_tokens_; }
    int64_t blocks() const { return options_.paged ? options_.blocks : batch_; }
    int64_t count() const { return slot_count(options_); }

    bool is_kept(int64_t token) const { return of_tokens_[token] >= 0 && of_tokens_[token] < count(); }
    int64_t block_of(int64_t token) const {
        return options_.paged ? of_tokens_[token] / options_.block_size : token / tokens_;
    }
    int64_t slot_in_block(int64_t token) const { return of_tokens_[token] % options_.block_size; }

    const std::vector<std::byte>& words() {
        words_.assign((batch_ * row_length_ + 1) * 8, std::byte{0x55});
        for (int64_t i = 0; i < static_cast<int64_t>(of_tokens_.size()); ++i) {
            const int64_t at = i / tokens_ * row_length_ + i % tokens_;
            const auto narrow = static_cast<int32_t>(of_tokens_[i]);
            if (options_.slots_are_int64) {
                std::memcpy(words_.data() + 8 * at, &of_tokens_[i], 8);
            } else {
                std::memcpy(words_.data() + 4 * at, &narrow, 4);
            }
        }
        return words_;
    }

    // Valid during the lifetime of the slots.
    CacheSlots view() {
        return {.of_tokens = {.data = words().data(),
                              .is_int64 = options_.slots_are_int64,
                              .batch_stride = row_length_,
                              .token_stride = 1},
                .paged = options_.paged,
                .blocks = blocks(),
                .block_size = options_.block_size};
    }

private:
    StorageOptions options_;
    int64_t batch_, tokens_, row_length_;
    std::vector<int64_t> of_tokens_;
    std::vector<std::byte> words_;
};

}  // namespace mrrope::testing
