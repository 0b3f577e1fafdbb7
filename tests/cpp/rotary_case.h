#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "elements.h"
#include "head_buffer.h"
#include "mrrope/rotary.h"
#include "position_words.h"
#include "reference_rotation.h"
#include "table_stack.h"

// A rotary call with all its buffers, generated from a seed and checked against the reference.

namespace mrrope::testing {

enum class TableFor { all, each_sequence, each_index };

struct TableOptions {
    TableFor table_for = TableFor::all;
    int64_t count = 1;    // for each_index; each_sequence has one per sequence
    int64_t padding = 0;  // words of noise after each table, and after each of several head tables
    int heads = 1;        // head tables: as many divide the heads of q and of k
    bool has_query_factors = false;
    bool same_index_for_all_sequences = false;
    bool same_index_for_all_tokens = false;
};

inline std::string describe(const TableOptions& o) {
    const std::string heads = (o.heads == 1 ? "" : std::to_string(o.heads) + " head tables, ") +
                              (o.has_query_factors ? "query factors, " : "");
    switch (o.table_for) {
        case TableFor::all: return heads + "one table";
        case TableFor::each_sequence: return heads + "a table a sequence, padding " + std::to_string(o.padding);
        case TableFor::each_index:
            return heads + std::to_string(o.count) + " tables by index" +
                   (o.same_index_for_all_sequences ? " of one sequence" : "") +
                   (o.same_index_for_all_tokens ? " of one token" : "") + ", padding " + std::to_string(o.padding);
    }
    return "unknown";
}

struct CaseOptions {
    DType dtype = DType::float32;
    Pairing pairing = Pairing::halves;
    int64_t batch = 1;
    int64_t tokens = 3;
    int q_heads = 2;
    int k_heads = 1;
    int head_dim = 16;
    int rotary_dim = 16;
    bool in_place = false;
    bool conjugate = false;
    double attention_factor = 1.0;  // with several tables, the largest
    Placement in = {};
    Placement out = {};
    PositionOptions positions = {};
    int64_t position_rows = 0;  // 0: one position per token; else every pair selects one of this many
    TableOptions tables = {};
    uint64_t seed = 1;
};

inline std::string describe(const CaseOptions& o) {
    return std::string(name_of(o.dtype)) + (o.pairing == Pairing::halves ? " halves" : " interleaved") + " batch " +
           std::to_string(o.batch) + " tokens " + std::to_string(o.tokens) + " heads " + std::to_string(o.q_heads) +
           "+" + std::to_string(o.k_heads) + " head_dim " + std::to_string(o.head_dim) + " rotary_dim " +
           std::to_string(o.rotary_dim) + (o.in_place ? " in place" : "") + (o.conjugate ? " conjugate" : "") +
           " gain " + std::to_string(o.attention_factor) + " in {" + describe(o.in) + "} out {" + describe(o.out) +
           "} positions " + describe(o.positions) + " rows " + std::to_string(o.position_rows) + " " +
           describe(o.tables) + " seed " + std::to_string(o.seed);
}

// q or k.
struct Heads {
    HeadBuffer in;
    HeadBuffer out;  // unused in place

    int count() const { return in.shape.heads; }
};

// The table index of every token.
class TableIndices {
public:
    TableIndices(const TableOptions& options, int64_t batch, int64_t tokens, std::mt19937_64& random)
        : batch_stride_(options.same_index_for_all_sequences ? 0 : tokens + 1),
          token_stride_(options.same_index_for_all_tokens ? 0 : 1),
          words_((batch + 1) * (tokens + 1)) {
        for (int32_t& word : words_) word = static_cast<int32_t>(random() % options.count);
    }

    std::vector<int32_t>& words() { return words_; }
    int64_t batch_stride() const { return batch_stride_; }
    int64_t token_stride() const { return token_stride_; }
    int64_t at(int64_t batch, int64_t token) const { return words_[batch * batch_stride_ + token * token_stride_]; }

private:
    int64_t batch_stride_;
    int64_t token_stride_;
    std::vector<int32_t> words_;
};

class RotaryCase {
public:
    explicit RotaryCase(const CaseOptions& options)
        : options_(options),
          random_(options.seed),
          table_count_(count_tables(options)),
          tables_({.rotary_dim = options.rotary_dim,
                   .count = table_count_,
                   .attention_factor = options.attention_factor,
                   .position_rows = options.position_rows,
                   .padding = options.tables.padding,
                   .heads = options.tables.heads,
                   .query_heads = options.tables.has_query_factors ? options.q_heads : 0},
                  random_),
          indices_(options.tables, options.batch, options.tokens, random_),
          positions_(options.positions, std::max<int64_t>(1, options.position_rows), options.batch, options.tokens,
                     random_),
          q_(make_in_and_out(options.q_heads)),
          k_(make_in_and_out(options.k_heads)) {}

    const CaseOptions& options() const { return options_; }
    Heads& q() { return q_; }
    Heads& k() { return k_; }
    TableStack& tables() { return tables_; }
    TableIndices& indices() { return indices_; }
    const PositionWords& positions() const { return positions_; }

    RotaryArgs args() {
        RotaryArgs args;
        args.q = view(q_);
        args.k = view(k_);
        args.table = tables_.words().data();
        args.positions = positions_.view();
        if (options_.position_rows > 0) args.positions.row_of_pair = args.table + tables_.first_row_word();
        if (options_.tables.table_for != TableFor::all) {
            args.choice = {.count = static_cast<int32_t>(table_count_),
                           .stride = static_cast<int32_t>(tables_.stride())};
        }
        args.choice.heads = options_.tables.heads;
        args.choice.head_stride = static_cast<int32_t>(tables_.head_stride());
        if (options_.tables.has_query_factors) args.choice.query_factors = args.table + tables_.first_factor_word();
        if (options_.tables.table_for == TableFor::each_index) {
            args.choice.index = indices_.words().data();
            args.choice.batch_stride = static_cast<int32_t>(indices_.batch_stride());
            args.choice.token_stride = static_cast<int32_t>(indices_.token_stride());
        }
        args.batch = options_.batch;
        args.tokens = options_.tokens;
        args.head_dim = options_.head_dim;
        args.rotary_dim = options_.rotary_dim;
        args.dtype = options_.dtype;
        args.pairing = options_.pairing;
        args.conjugate = options_.conjugate;
        return args;
    }

    const HeadBuffer& output(const Heads& heads) const { return options_.in_place ? heads.in : heads.out; }
    HeadBuffer& output(Heads& heads) { return options_.in_place ? heads.in : heads.out; }

    int64_t table_of(int64_t batch, int64_t token) const {
        switch (options_.tables.table_for) {
            case TableFor::all: return 0;
            case TableFor::each_sequence: return batch;
            case TableFor::each_index: return indices_.at(batch, token);
        }
        return 0;
    }

    // Those of a head of q or of k, which has `count` heads, with the factors of the head.
    std::vector<ReferenceCosSin> reference_cos_sins(bool is_q, int64_t batch, int64_t token, int head,
                                                    int count) const {
        std::vector<ReferenceCosSin> cos_sins =
            reference_cos_sins(batch, token, head / (count / options_.tables.heads));
        if (!is_q || !options_.tables.has_query_factors) return cos_sins;
        const double factor = tables_.query_factor(table_of(batch, token), head);
        for (auto& [cos, sin] : cos_sins) {
            cos *= factor;
            sin *= factor;
        }
        return cos_sins;
    }

    // Those of a head table.
    std::vector<ReferenceCosSin> reference_cos_sins(int64_t batch, int64_t token, int table_head) const {
        std::vector<ReferenceCosSin> cos_sins(options_.rotary_dim / 2);
        const int64_t table = table_of(batch, token);
        for (int pair = 0; pair < options_.rotary_dim / 2; ++pair) {
            const int64_t row = options_.position_rows == 0 ? 0 : tables_.row(table, pair, table_head);
            const long double angle =
                reference_angle(positions_.at(row, batch, token), tables_.phase_step(table, pair, table_head));
            cos_sins[pair] =
                reference_cos_sin(options_.conjugate ? -angle : angle, tables_.attention_factor(table, table_head));
        }
        return cos_sins;
    }

    // Expects every component within one rounding of the long double reference, and every other byte unchanged.
    void expect_rotated() const {
        SCOPED_TRACE(describe(options_));
        expect_rotated(q_, "q");
        expect_rotated(k_, "k");
    }

private:
    static int64_t count_tables(const CaseOptions& options) {
        switch (options.tables.table_for) {
            case TableFor::all: return 1;
            case TableFor::each_sequence: return std::max<int64_t>(1, options.batch);
            case TableFor::each_index: return options.tables.count;
        }
        return 0;
    }

    Heads make_in_and_out(int count) {
        const HeadsShape shape{.dtype = options_.dtype,
                               .batch = options_.batch,
                               .tokens = options_.tokens,
                               .heads = count,
                               .head_dim = options_.head_dim};
        Heads heads;
        heads.in = make_heads(shape, options_.in, random_);
        if (!options_.in_place) heads.out = make_heads(shape, options_.out, random_);
        return heads;
    }

    HeadsView view(Heads& heads) {
        if (heads.count() == 0) return {};
        HeadBuffer& out = output(heads);
        return {.in = heads.in.first_head(),
                .out = out.first_head(),
                .heads = heads.count(),
                .in_strides = heads.in.strides,
                .out_strides = out.strides};
    }

    void expect_rotated(const Heads& heads, const char* name) const {
        SCOPED_TRACE(name);
        const HeadBuffer& out = output(heads);
        std::vector<ReferenceCosSin> cos_sins;
        heads.in.for_each_head([&](int64_t batch, int64_t token, int head) {
            const int heads_per_table = heads.count() / options_.tables.heads;
            if (head % heads_per_table == 0 || options_.tables.has_query_factors) {
                cos_sins = reference_cos_sins(&heads == &q_, batch, token, head, heads.count());
            }
            expect_rotated_head(heads.in.shape, options_.pairing, heads.in.head_before(batch, token, head),
                                out.head(batch, token, head), cos_sins);
            if (::testing::Test::HasFatalFailure()) {
                ADD_FAILURE() << "batch " << batch << " token " << token << " head " << head << " table "
                              << table_of(batch, token) << " position " << positions_.at(0, batch, token);
            }
        });
        out.expect_untouched_outside_heads();
        if (!options_.in_place) {
            SCOPED_TRACE("the input");
            heads.in.expect_untouched();
        }
    }

    CaseOptions options_;
    std::mt19937_64 random_;
    int64_t table_count_;
    TableStack tables_;
    TableIndices indices_;
    PositionWords positions_;
    Heads q_;
    Heads k_;
};

// For ops that write keys elsewhere than to rotary's k.
inline RotaryCase case_without_keys(CaseOptions options) {
    options.k_heads = 0;
    return RotaryCase(options);
}

struct RandomLimits {
    int64_t tokens = 9;
    int head_dim = 160;
};

inline TableOptions random_table_options(std::mt19937_64& random) {
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const TableFor kinds[] = {TableFor::all, TableFor::each_sequence, TableFor::each_index};
    TableOptions o;
    o.table_for = kinds[upto(0, 2)];
    o.count = upto(1, 4);
    o.padding = upto(0, 2);
    o.same_index_for_all_sequences = upto(0, 2) == 0;
    o.same_index_for_all_tokens = upto(0, 1) == 1;
    return o;
}

inline CaseOptions random_options(uint64_t seed, RandomLimits limits = {}) {
    std::mt19937_64 random(seed);
    const auto upto = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    const auto coin = [&] { return upto(0, 1) == 1; };
    CaseOptions o;
    o.seed = seed;
    o.dtype = all_dtypes[upto(0, 3)];
    o.pairing = both_pairings[upto(0, 1)];
    o.batch = upto(1, 3);
    o.tokens = upto(1, limits.tokens);
    o.q_heads = static_cast<int>(upto(1, 7));
    o.k_heads = static_cast<int>(upto(0, 3));
    const int usual_dims[] = {16, 32, 64, 80, 96, 128};
    o.head_dim = coin() ? usual_dims[upto(0, 5)] : static_cast<int>(upto(2, limits.head_dim));
    o.rotary_dim = o.head_dim / 2 * 2;
    if (upto(0, 2) == 0) o.rotary_dim = static_cast<int>(2 * upto(1, o.head_dim / 2));
    if (upto(0, 3) == 0 && o.head_dim % 64 == 0) o.rotary_dim = o.head_dim / 2;
    o.in_place = coin();
    o.conjugate = coin();
    o.attention_factor = coin() ? 1.0 : 1.2772588722239782;
    o.in = random_placement(o.dtype, random);
    o.out = random_placement(o.dtype, random);
    o.positions = random_position_options(random);
    o.position_rows = coin() ? 0 : upto(1, 6);
    o.tables = random_table_options(random);
    o.tables.has_query_factors = upto(0, 3) == 0;
    if (coin()) return o;
    o.tables.heads = static_cast<int>(upto(2, 4));
    o.q_heads = o.tables.heads * static_cast<int>(upto(1, 4));
    o.k_heads = o.tables.heads * static_cast<int>(upto(0, 2));
    return o;
}

}  // namespace mrrope::testing
