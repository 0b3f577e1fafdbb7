#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

#include "mrrope/frequency_table.h"

// Several packed tables in one array; any two differ in every pair and in their attention factor.

namespace mrrope::testing {

struct TableStackOptions {
    int rotary_dim = 16;
    int64_t count = 1;
    double attention_factor = 1.0;  // of the first table; the others have smaller ones
    int64_t position_rows = 0;      // 0: none; else each table is followed by the position row of each pair
    int64_t padding = 0;            // words of noise after each table
};

class TableStack {
public:
    TableStack(const TableStackOptions& options, std::mt19937_64& random)
        : pairs_(options.rotary_dim / 2),
          stride_((options.position_rows == 0 ? 1 : 2) * (pairs_ + 1) + options.padding),
          words_(options.count * stride_) {
        for (uint64_t& word : words_) word = random();
        for (int64_t table = 0; table < options.count; ++table) {
            const bool is_first = table == 0;
            const std::vector<uint64_t> one =
                packed(build_table({.method = is_first ? Method::mrrope_pro : Method::pi,
                                    .rotary_dim = options.rotary_dim,
                                    .base = 10000.0,
                                    .original_max_position = 4096,
                                    .scale = is_first ? 8.0 : 1.0 + static_cast<double>(table),
                                    .attention_factor = options.attention_factor / static_cast<double>(table + 1)}));
            std::copy(one.begin(), one.end(), words_.begin() + table * stride_);
            for (int pair = 0; options.position_rows > 0 && pair < pairs_; ++pair) {
                words_[table * stride_ + pairs_ + 1 + pair] = random() % options.position_rows;
            }
        }
    }

    std::vector<uint64_t>& words() { return words_; }
    int64_t stride() const { return stride_; }

    uint64_t phase_step(int64_t table, int pair) const { return words_[table * stride_ + pair]; }
    double attention_factor(int64_t table) const { return std::bit_cast<double>(words_[table * stride_ + pairs_]); }

    // Only with position_rows > 0.
    int64_t first_row_word() const { return pairs_ + 1; }
    int64_t row(int64_t table, int pair) const {
        return static_cast<int64_t>(words_[table * stride_ + first_row_word() + pair]);
    }

private:
    int pairs_;
    int64_t stride_;
    std::vector<uint64_t> words_;
};

}  // namespace mrrope::testing
