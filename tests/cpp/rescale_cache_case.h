#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "head_buffer.h"
#include "mrrope/rescale_cache.h"
#include "position_words.h"
#include "reference_rotation.h"
#include "table_stack.h"

// A rescale_cache call with all its buffers, generated from a seed and checked against the difference of two tables.

namespace mrrope::testing {

struct RescaleCacheOptions {
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
    int layers = 2;
    int64_t batch = 3;
    int64_t tokens = 5;
    int heads = 3;
    int head_dim = 16;
    int rotary_dim = 16;
    int64_t tables = 3;
    int table_layers = 1;       // or more than `layers`
    int table_heads = 1;        // divides `heads`
    int64_t position_rows = 0;  // 0: one position per token; else every pair selects one of this many
    double attention_factor = 1.2772588722239782;
    Placement placement = {};
    bool only_last_layer_misaligned = false;
    PositionOptions positions = {};
    uint64_t seed = 1;
};

inline std::string describe(const RescaleCacheOptions& o) {
    return std::string(name_of(o.dtype)) + (o.pairing == Pairing::halves ? " halves" : " interleaved") + " layers " +
           std::to_string(o.layers) + " batch " + std::to_string(o.batch) + " tokens " + std::to_string(o.tokens) +
           " heads " + std::to_string(o.heads) + " head_dim " + std::to_string(o.head_dim) + " rotary_dim " +
           std::to_string(o.rotary_dim) + " tables " + std::to_string(o.tables) + " of " +
           std::to_string(o.table_layers) + " layers and " + std::to_string(o.table_heads) + " heads, keys {" +
           describe(o.placement) + (o.only_last_layer_misaligned ? ", the last layer alone" : "") + "} positions " +
           describe(o.positions) + " rows " + std::to_string(o.position_rows) + " seed " + std::to_string(o.seed);
}

class RescaleCacheCase {
public:
    explicit RescaleCacheCase(const RescaleCacheOptions& options)
        : options_(options),
          random_(options.seed),
          tables_({.rotary_dim = options.rotary_dim,
                   .count = options.tables * options.table_layers,
                   .attention_factor = options.attention_factor,
                   .position_rows = options.position_rows,
                   .heads = options.table_heads},
                  random_),
          positions_(options.positions, std::max<int64_t>(1, options.position_rows), options.batch, options.tokens,
                     random_) {
        if (options.position_rows > 0) tables_.name_the_rows_of_the_first_table();
        for (int layer = 0; layer < options.layers; ++layer) {
            const HeadsShape shape{.dtype = options.dtype,
                                   .batch = options.batch,
                                   .tokens = options.tokens,
                                   .heads = options.heads,
                                   .head_dim = options.head_dim};
            Placement placement = options.placement;
            if (options.only_last_layer_misaligned && layer + 1 < options.layers) placement.misalignment = 0;
            layers_.push_back(make_heads(shape, placement, random_));
        }
        for (int layer = 0; options.table_layers > 1 && layer < options.layers; ++layer) {
            layer_of_keys_.push_back(static_cast<int32_t>(random_() % options.table_layers));
        }
        for (std::vector<int32_t>* index : {&from_, &to_}) {
            index->resize(options.batch);
            for (int32_t& table : *index) table = static_cast<int32_t>(random_() % options.tables);
        }
    }

    const RescaleCacheOptions& options() const { return options_; }
    std::vector<HeadBuffer>& layers() { return layers_; }
    TableStack& tables() { return tables_; }
    const PositionWords& positions() const { return positions_; }
    std::vector<int32_t>& from() { return from_; }
    std::vector<int32_t>& to() { return to_; }

    // Distinguishes a rotation by the angle 0 from no rotation.
    void poison_sequences_that_stay() {
        for (int64_t sequence = 0; sequence < options_.batch; ++sequence) {
            if (from_[sequence] != to_[sequence]) continue;
            for (HeadBuffer& layer : layers_) layer.fill_with_infinity(sequence);
        }
    }

    // Valid during the lifetime of the case.
    RescaleCacheArgs args() {
        keys_.clear();
        for (HeadBuffer& layer : layers_) keys_.push_back(layer.first_head());
        PositionsView positions = positions_.view();
        const bool with_rows = options_.position_rows > 0;
        if (with_rows) positions.row_of_pair = tables_.words().data() + tables_.first_row_word();
        return {.keys = keys_,
                .strides = layers_.empty() ? HeadStrides{} : layers_[0].strides,
                .positions = positions,
                .tables = tables_.words().data(),
                .table_count = options_.tables,
                .table_layers = options_.table_layers,
                .layer_of_keys = layer_of_keys_,
                .table_rows = with_rows ? 2 : 1,
                .table_heads = options_.table_heads,
                .from = from_.data(),
                .to = to_.data(),
                .batch = options_.batch,
                .tokens = options_.tokens,
                .heads = options_.heads,
                .rotary_dim = options_.rotary_dim,
                .dtype = options_.dtype,
                .pairing = options_.pairing};
    }

    // Expects sequences that change tables within one rounding of the reference, and every other byte unchanged.
    void expect_rescaled() const {
        SCOPED_TRACE(describe(options_));
        for (size_t layer = 0; layer < layers_.size(); ++layer) {
            SCOPED_TRACE("layer " + std::to_string(layer));
            expect_rescaled(layers_[layer], layer_of_keys_.empty() ? 0 : layer_of_keys_[layer]);
            if (::testing::Test::HasFatalFailure()) return;
        }
    }

private:
    std::vector<ReferenceCosSin> reference_cos_sins(int64_t batch, int64_t token, int table_layer,
                                                    int table_head) const {
        const int64_t from = int64_t{from_[batch]} * options_.table_layers + table_layer;
        const int64_t to = int64_t{to_[batch]} * options_.table_layers + table_layer;
        const long double gain = static_cast<long double>(tables_.attention_factor(to, table_head)) /
                                 tables_.attention_factor(from, table_head);
        std::vector<ReferenceCosSin> cos_sins;
        for (int pair = 0; pair < options_.rotary_dim / 2; ++pair) {
            const int64_t row = options_.position_rows == 0 ? 0 : tables_.row(0, pair, table_head);
            const int64_t position = positions_.at(row, batch, token);
            cos_sins.push_back(
                reference_cos_sin(reference_angle(position, tables_.phase_step(to, pair, table_head)) -
                                      reference_angle(position, tables_.phase_step(from, pair, table_head)),
                                  gain));
        }
        return cos_sins;
    }

    void expect_rescaled(const HeadBuffer& keys, int table_layer) const {
        const int heads_per_table = options_.heads / options_.table_heads;
        std::vector<ReferenceCosSin> cos_sins;
        keys.for_each_head([&](int64_t batch, int64_t token, int head) {
            const std::byte* before = keys.head_before(batch, token, head);
            const std::byte* after = keys.head(batch, token, head);
            if (from_[batch] == to_[batch]) {
                ASSERT_EQ(std::memcmp(after, before, keys.head_bytes()), 0) << "sequence " << batch << " was touched";
                return;
            }
            if (head % heads_per_table == 0) {
                cos_sins = reference_cos_sins(batch, token, table_layer, head / heads_per_table);
            }
            expect_rotated_head(keys.shape, options_.pairing, before, after, cos_sins);
            if (::testing::Test::HasFatalFailure()) {
                ADD_FAILURE() << "batch " << batch << " token " << token << " head " << head << " from " << from_[batch]
                              << " to " << to_[batch] << " position " << positions_.at(0, batch, token);
            }
        });
        keys.expect_untouched_outside_heads();
    }

    RescaleCacheOptions options_;
    std::mt19937_64 random_;
    TableStack tables_;
    PositionWords positions_;
    std::vector<HeadBuffer> layers_;
    std::vector<void*> keys_;
    std::vector<int32_t> layer_of_keys_;
    std::vector<int32_t> from_;
    std::vector<int32_t> to_;
};

inline RescaleCacheOptions random_rescale_options(uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    RescaleCacheOptions o;
    o.seed = seed;
    o.dtype = all_dtypes[upto(0, 3)];
    o.pairing = both_pairings[upto(0, 1)];
    o.layers = static_cast<int>(upto(1, 3));
    o.batch = upto(1, 4);
    o.tokens = upto(1, 9);
    o.heads = static_cast<int>(upto(1, 7));
    const int usual_dims[] = {16, 32, 64, 80, 96, 128};
    o.head_dim = coin() ? usual_dims[upto(0, 5)] : static_cast<int>(upto(2, 160));
    o.rotary_dim = upto(0, 2) == 0 ? static_cast<int>(2 * upto(1, o.head_dim / 2)) : o.head_dim / 2 * 2;
    o.tables = upto(1, 4);
    o.attention_factor = coin() ? 1.0 : 1.2772588722239782;
    o.placement = random_placement(o.dtype, random);
    o.only_last_layer_misaligned = coin();
    o.positions = random_position_options(random);
    o.position_rows = coin() ? 0 : upto(1, 6);
    o.table_layers = coin() ? 1 : static_cast<int>(upto(2, 4));
    if (coin()) return o;
    o.table_heads = static_cast<int>(upto(2, 4));
    o.heads = o.table_heads * static_cast<int>(upto(1, 6));
    return o;
}

}  // namespace mrrope::testing
