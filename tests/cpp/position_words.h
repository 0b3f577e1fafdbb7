#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "mrrope/rotary.h"

// Random int32 or int64 positions, broadcast or not, with one row or several.

namespace mrrope::testing {

struct PositionOptions {
    bool is_int64 = true;
    bool same_for_all_sequences = false;
    bool same_for_all_tokens = false;
    int64_t smallest = 0;
    int64_t largest = 100000;
};

inline std::string describe(const PositionOptions& o) {
    return std::string(o.is_int64 ? "int64" : "int32") + (o.same_for_all_sequences ? " of one sequence" : "") +
           (o.same_for_all_tokens ? " of one token" : "") + " from " + std::to_string(o.smallest) + " to " +
           std::to_string(o.largest);
}

// Half of the options span the full range of the integer type.
inline PositionOptions random_position_options(std::mt19937_64& random) {
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    PositionOptions o;
    o.is_int64 = upto(0, 1) == 1;
    o.same_for_all_sequences = upto(0, 1) == 1;
    o.same_for_all_tokens = upto(0, 5) == 0;
    if (upto(0, 1) == 1) {
        o.smallest = -5;
        o.largest = 200000;
    } else if (o.is_int64) {
        o.smallest = std::numeric_limits<int64_t>::min();
        o.largest = std::numeric_limits<int64_t>::max();
    } else {
        o.smallest = std::numeric_limits<int32_t>::min();
        o.largest = std::numeric_limits<int32_t>::max();
    }
    return o;
}

class PositionWords {
public:
    PositionWords(const PositionOptions& options, int64_t rows, int64_t batch, int64_t tokens, std::mt19937_64& random)
        : is_int64_(options.is_int64),
          batch_stride_(options.same_for_all_sequences ? 0 : tokens + 1),
          token_stride_(options.same_for_all_tokens ? 0 : 1),
          rows_(rows),
          row_stride_((batch + 1) * (tokens + 1)) {
        std::uniform_int_distribution<int64_t> any(options.smallest, options.largest);
        words_.resize(rows_ * row_stride_);
        auto* bytes = reinterpret_cast<std::byte*>(words_.data());
        for (int64_t i = 0; i < rows_ * row_stride_; ++i) {
            const int64_t position = any(random);
            const auto narrow = static_cast<int32_t>(position);
            if (is_int64_) {
                std::memcpy(bytes + 8 * i, &position, 8);
            } else {
                std::memcpy(bytes + 4 * i, &narrow, 4);
            }
        }
    }

    const std::vector<int64_t>& words() const { return words_; }

    PositionsView view() const {
        return {.data = words_.data(),
                .is_int64 = is_int64_,
                .batch_stride = batch_stride_,
                .token_stride = token_stride_,
                .rows = rows_,
                .row_stride = row_stride_};
    }

    int64_t at(int64_t row, int64_t batch, int64_t token) const {
        const int64_t index = row * row_stride_ + batch * batch_stride_ + token * token_stride_;
        const auto* bytes = reinterpret_cast<const std::byte*>(words_.data());
        return is_int64_ ? read_as<int64_t>(bytes + 8 * index) : read_as<int32_t>(bytes + 4 * index);
    }

private:
    bool is_int64_;
    int64_t batch_stride_;
    int64_t token_stride_;
    int64_t rows_;
    int64_t row_stride_;
    std::vector<int64_t> words_;
};

}  // namespace mrrope::testing
