#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

// The memory of one call, in one piece, so that its bytes are copied, compared and mirrored on a device at once.

namespace mrrope::testing {

// What a region holds after a call, which tells how two results of it are compared.
enum class Holds {
    input,          // unchanged
    q,              // heads, or float8 where q is stored as such
    heads,          // numbers of the heads' dtype
    head_sums,      // the same, summed over all tokens
    cache,          // numbers of the cache's dtype
    scales,         // float32
    table_numbers,  // numbers of the table's dtype, summed over all tokens
    words,          // packed tables
    scratch,        // whatever a backend leaves there
};

struct Region {
    std::string name;
    Holds holds;
    size_t first_byte;
    size_t size;
};

// Every region is filled with numbers that are valid wherever a changed field makes a call read them.
class ContractMemory {
public:
    ContractMemory() : bytes_(capacity) { fill_with_numbers(bytes_.data(), capacity, true); }
    ContractMemory(const ContractMemory&) = delete;
    ContractMemory& operator=(const ContractMemory&) = delete;

    // Of either sign, between 2^-7 and 2 in magnitude, in every dtype of heads.
    std::byte* add_numbers(const std::string& name, Holds holds, size_t count) {
        return add(name, holds, count * sizeof(double));
    }

    std::byte* add_positive_numbers(const std::string& name, size_t count) {
        std::byte* first = add(name, Holds::input, count * sizeof(double));
        fill_with_numbers(first, count * sizeof(double), false);
        return first;
    }

    // Every word is a phase step as well as an attention factor between 0.5 and 2, so that tables may start anywhere.
    uint64_t* add_tables(const std::string& name, Holds holds, size_t words) {
        return add_words<uint64_t>(name, holds, words, [&](size_t) {
            return std::bit_cast<uint64_t>(0.5 + 1.5 * static_cast<double>(random_()) * 0x1p-64);
        });
    }

    // Words of PositionsView::row_of_pair that may start anywhere: each has the rows of its pair and of the seven
    // after.
    const uint64_t* add_row_words(const std::string& name, size_t words, uint64_t rows) {
        std::vector<uint64_t> row_of(words + 8);
        for (uint64_t& row : row_of) row = random_() % rows;
        return add_words<uint64_t>(name, Holds::input, words, [&](size_t i) {
            uint64_t word = 0;
            for (int ahead = 7; ahead >= 0; --ahead) word = word << 8 | row_of[i + ahead];
            return word;
        });
    }

    // From 0 to `end`.
    const int32_t* add_random_integers(const std::string& name, size_t count, int32_t end) {
        return add_words<int32_t>(name, Holds::input, count,
                                  [&](size_t) { return static_cast<int32_t>(random_() % end); });
    }

    const int32_t* add_integers(const std::string& name, const std::vector<int32_t>& values) {
        return add_words<int32_t>(name, Holds::input, values.size(), [&](size_t i) { return values[i]; });
    }

    // No two are equal, so that no two tokens write to one slot; those from `end` on are padding.
    const int32_t* add_slots(const std::string& name, size_t count, int32_t end) {
        std::vector<int32_t> slots(count);
        for (size_t i = 0; i < count; ++i) {
            const auto slot = static_cast<int32_t>(i);
            slots[i] = slot < end ? slot : end - slot - 1;
        }
        std::shuffle(slots.begin(), slots.begin() + end + end / 8, random_);
        return add_integers(name, slots);
    }

    static constexpr size_t capacity = size_t{1} << 20;

    std::span<std::byte> bytes() { return {bytes_.data(), used_}; }
    const std::vector<Region>& regions() const { return regions_; }

private:
    static constexpr size_t guard = 1024;  // also the alignment

    std::byte* add(const std::string& name, Holds holds, size_t size) {
        const size_t first = used_;
        used_ += (size + guard - 1) / guard * guard + guard;
        if (used_ > capacity) throw std::logic_error("the memory of a contract is full");
        regions_.push_back({name, holds, first, size});
        return bytes_.data() + first;
    }

    template <class Word, class Value>
    Word* add_words(const std::string& name, Holds holds, size_t count, const Value& value) {
        std::byte* first = add(name, holds, count * sizeof(Word));
        for (size_t i = 0; i < count; ++i) {
            const Word word = value(i);
            std::memcpy(first + i * sizeof word, &word, sizeof word);
        }
        return reinterpret_cast<Word*>(first);
    }

    // 0x3f80 to 0x3fff are the leading bits of a number of any dtype that is near 1.
    void fill_with_numbers(std::byte* first, size_t size, bool either_sign) {
        constexpr uint64_t near_one = 0x3f803f803f803f80;
        const uint64_t rest = either_sign ? 0x807f807f807f807f : 0x007f007f007f007f;
        for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
            const uint64_t words = near_one | (random_() & rest);
            std::memcpy(first + at, &words, sizeof words);
        }
    }

    std::mt19937_64 random_{42};
    std::vector<std::byte> bytes_;
    std::vector<Region> regions_;
    size_t used_ = guard;
};

}  // namespace mrrope::testing
