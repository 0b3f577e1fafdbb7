#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "float8_elements.h"
#include "mrrope/rotary.h"
#include "rotary_case.h"

// Options that all ops with a cache have.

namespace mrrope::testing {

struct StorageOptions {
    StoredAs cached_as = StoredAs::heads_dtype;
    bool paged = true;
    int64_t padding = 0;       // elements of padding in the cache after each step of each dimension
    int64_t misalignment = 0;  // of the cache, in elements
    int64_t blocks = 5;        // of a paged cache
    int64_t block_size = 4;
    bool slots_are_int64 = true;
    bool leaves_some_out = true;
};

inline std::string describe_storage(const StorageOptions& o) {
    return name_of(o.cached_as) + (o.paged ? " paged" : " static") + " padding " + std::to_string(o.padding) +
           " misalignment " + std::to_string(o.misalignment) + " blocks " + std::to_string(o.blocks) + " of " +
           std::to_string(o.block_size) + (o.slots_are_int64 ? " int64" : " int32") + " slots" +
           (o.leaves_some_out ? ", some left out" : "");
}

// Half of the caches keep heads of this dtype 16-byte aligned, if their dimensions allow.
inline void randomize_blocks_and_slots(StorageOptions& o, DType dtype, std::mt19937_64& random) {
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    const int64_t unit = coin() ? 16 / size_of(dtype) : 1;
    o.padding = coin() ? 0 : unit * upto(1, 3);
    o.misalignment = coin() ? 0 : unit * upto(1, 5);
    o.blocks = upto(1, 7);
    o.block_size = upto(1, 20);
    o.slots_are_int64 = coin();
    o.leaves_some_out = coin();
}

template <class Options>
std::vector<Options> of_both_pairings_in_place_and_not(const std::vector<Options>& all) {
    std::vector<Options> varied;
    for (Options o : all) {
        for (const Pairing pairing : both_pairings) {
            for (const bool in_place : {false, true}) {
                o.rotary.pairing = pairing;
                o.rotary.in_place = in_place;
                varied.push_back(o);
            }
        }
    }
    return varied;
}

template <class Options>
std::vector<Options> with_tables_by_sequence_and_by_index(const std::vector<Options>& all) {
    std::vector<Options> varied;
    for (Options o : all) {
        for (const TableFor table_for : {TableFor::each_sequence, TableFor::each_index}) {
            o.rotary.batch = 3;
            o.rotary.tables = {.table_for = table_for, .count = 4};
            varied.push_back(o);
        }
    }
    return varied;
}

}  // namespace mrrope::testing
