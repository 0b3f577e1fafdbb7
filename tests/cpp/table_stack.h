#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <random>
#include <vector>

#include "mrrope/frequency_table.h"

// Several packed tables, each with one or several head tables, in one array; any two differ in every pair and in their
// attention factor.

namespace mrrope::testing {

struct TableStackOptions {
    int rotary_dim = 16;
    int64_t count = 1;
    double attention_factor = 1.0;  // of the first table; the others have smaller ones
    int64_t position_rows = 0;  // 0: none; else the tables of all heads are followed by the position row of each pair
    int64_t padding = 0;        // words of noise after each table, and after each of several head tables
    int heads = 1;              // head tables
    int query_heads = 0;        // 0: no query factors; else those of so many heads follow in each table
};

class TableStack {
public:
    TableStack(const TableStackOptions& options, std::mt19937_64& random)
        : pairs_(options.rotary_dim / 2),
          heads_(options.heads),
          head_stride_(pairs_ + 1 + (heads_ == 1 ? 0 : options.padding)),
          first_factor_word_((options.position_rows == 0 ? 1 : 2) * heads_ * head_stride_),
          stride_(first_factor_word_ + options.query_heads + options.padding),
          words_(options.count * stride_) {
        for (uint64_t& word : words_) word = random();
        for (int64_t table = 0; table < options.count * heads_; ++table) {
            const bool is_first = table == 0;
            const int64_t first_word = word_of(table / heads_, static_cast<int>(table % heads_));
            const std::vector<uint64_t> one =
                packed(build_table({.method = is_first ? Method::mrrope_pro : Method::pi,
                                    .rotary_dim = options.rotary_dim,
                                    .base = 10000.0,
                                    .original_max_position = 4096,
                                    .scale = is_first ? 8.0 : 1.0 + static_cast<double>(table),
                                    .attention_factor = options.attention_factor / static_cast<double>(table + 1)}));
            std::copy(one.begin(), one.end(), words_.begin() + first_word);
            if (options.position_rows > 0) name_rows(first_word + first_row_word(), options.position_rows, random);
        }
        std::uniform_real_distribution<double> factors(0.5, 2.0);
        for (int64_t table = 0; table < options.count; ++table) {
            for (int head = 0; head < options.query_heads; ++head) {
                words_[table * stride_ + first_factor_word_ + head] = std::bit_cast<uint64_t>(factors(random));
            }
        }
    }

    std::vector<uint64_t>& words() { return words_; }
    int64_t stride() const { return stride_; }
    int64_t head_stride() const { return head_stride_; }

    uint64_t phase_step(int64_t table, int pair, int head = 0) const { return words_[word_of(table, head) + pair]; }
    double attention_factor(int64_t table, int head = 0) const {
        return std::bit_cast<double>(words_[word_of(table, head) + pairs_]);
    }

    // Only with query_heads > 0.
    int64_t first_factor_word() const { return first_factor_word_; }
    double query_factor(int64_t table, int head) const {
        return std::bit_cast<double>(words_[table * stride_ + first_factor_word_ + head]);
    }

    // Only with position_rows > 0.
    int64_t first_row_word() const { return heads_ * head_stride_; }
    void name_the_rows_of_the_first_table() {
        const auto first = words_.begin() + first_row_word();
        for (int64_t at = stride_; at < std::ssize(words_); at += stride_) {
            std::copy_n(first, first_row_word(), first + at);
        }
    }
    int64_t row(int64_t table, int pair, int head = 0) const {
        return static_cast<int64_t>(words_[word_of(table, head) + first_row_word() + pair] & 0xff);
    }

private:
    // A random row for every pair: a word holds those of its own pair and of seven after it, one per byte.
    void name_rows(int64_t first_word, int64_t rows, std::mt19937_64& random) {
        for (int pair = pairs_ - 1; pair >= 0; --pair) {
            const uint64_t after = pair == pairs_ - 1 ? 0 : words_[first_word + pair + 1];
            words_[first_word + pair] = after << 8 | random() % rows;
        }
    }

    int64_t word_of(int64_t table, int head) const { return table * stride_ + head * head_stride_; }

    int pairs_;
    int heads_;
    int64_t head_stride_;
    int64_t first_factor_word_;
    int64_t stride_;
    std::vector<uint64_t> words_;
};

}  // namespace mrrope::testing
