#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "args_contract.h"
#include "contract_memory.h"
#include "elements.h"
#include "field_changes.h"
#include "mrrope/learnable_rotary.h"
#include "mrrope/rotary.h"
#include "mrrope/rotary_cos_sin.h"

// The contracts of the ops that rotate q and k, and the parts of calls that all ops share.

namespace mrrope::testing {

// By default, a call in which every field matters. The others run other kernels.
struct ContractOptions {
    DType dtype = DType::float32;
    bool has_choice = true;  // of tables, by index, each of them for several groups of heads, with query factors
    bool has_rows = true;    // of positions
    bool rotates_whole_heads = false;
    bool aligned = true;
    bool rounds_to_float8 = true;  // what is cached, and q where it can be; no float64
    bool norms_all_heads = false;
};

inline std::string describe(const ContractOptions& o) {
    return std::string(name_of(o.dtype)) + (o.has_choice ? ", choice" : "") + (o.has_rows ? ", rows" : "") +
           (o.rotates_whole_heads ? ", whole heads" : "") + (o.aligned ? "" : ", unaligned") +
           (o.rounds_to_float8 ? ", float8" : "") + (o.norms_all_heads ? ", over all heads" : "");
}

// --- changes of the structs that are nested in arguments

inline FieldChanges<HeadStrides> stride_changes() {
    return FieldChanges<HeadStrides>()
        .add("batch", [](HeadStrides& s) { s.batch += 16; })
        .add("token", [](HeadStrides& s) { s.token += 16; })
        .add("head", [](HeadStrides& s) { s.head += 16; });
}

inline FieldChanges<HeadsView> view_changes() {
    return FieldChanges<HeadsView>()
        .add("in", [](HeadsView& v) { advance_by_vectors(v.in); })
        .add("out", [](HeadsView& v) { advance_by_vectors(v.out); })
        .add("heads", [](HeadsView& v) { v.heads /= 2; })
        .add_struct("in_strides", &HeadsView::in_strides, stride_changes())
        .add_struct("out_strides", &HeadsView::out_strides, stride_changes());
}

inline FieldChanges<PositionsView> position_changes() {
    return FieldChanges<PositionsView>()
        .add("data", [](PositionsView& p) { p.data = static_cast<const int64_t*>(p.data) + 1; })
        .add("is_int64", [](PositionsView& p) { p.is_int64 = !p.is_int64; })
        .add("batch_stride", [](PositionsView& p) { ++p.batch_stride; })
        .add("batch_stride", [](PositionsView& p) { p.batch_stride = 0; })
        .add("token_stride", [](PositionsView& p) { ++p.token_stride; })
        .add("token_stride", [](PositionsView& p) { p.token_stride = 0; })
        .add("rows", [](PositionsView& p) { p.rows = p.rows > 1 ? p.rows - 1 : 1; })
        .add("row_stride", [](PositionsView& p) { ++p.row_stride; })
        .add("row_of_pair", [](PositionsView& p) { advance(p.row_of_pair); });
}

inline FieldChanges<PositionsView> slot_changes() {
    return position_changes()
        .drop("batch_stride")
        .drop("token_stride")
        // Not to 0: no two tokens share a slot.
        .add("batch_stride", [](PositionsView& p) { ++p.batch_stride; })
        .add("token_stride", [](PositionsView& p) { ++p.token_stride; })
        .keep("rows", "a token has one slot")
        .keep("row_stride", "a token has one slot")
        .keep("row_of_pair", "a token has one slot");
}

inline FieldChanges<TableChoice> choice_changes() {
    return FieldChanges<TableChoice>()
        .add("count", [](TableChoice& c) { c.count = c.count == 1 ? 2 : 1; })
        .add("stride", [](TableChoice& c) { ++c.stride; })
        .add("heads", [](TableChoice& c) { c.heads = c.heads == 1 ? 2 : 1; })
        .add("head_stride", [](TableChoice& c) { ++c.head_stride; })
        .add("index", [](TableChoice& c) { advance(c.index); })
        .add("index", [](TableChoice& c) { c.index = nullptr; })
        .add("batch_stride", [](TableChoice& c) { ++c.batch_stride; })
        .add("token_stride", [](TableChoice& c) { ++c.token_stride; })
        .add("query_factors", [](TableChoice& c) { advance(c.query_factors); })
        .add("query_factors", [](TableChoice& c) { c.query_factors = nullptr; });
}

inline DType other_dtype(DType dtype) {
    return dtype == DType::bfloat16 ? DType::float16 : DType::bfloat16;
}

inline void flip(Pairing& pairing) {
    pairing = pairing == Pairing::halves ? Pairing::interleaved : Pairing::halves;
}

inline FieldChanges<RotaryArgs> rotary_changes() {
    return FieldChanges<RotaryArgs>()
        .add_struct("q", &RotaryArgs::q, view_changes())
        .add_struct("k", &RotaryArgs::k, view_changes())
        .add("k.heads", [](RotaryArgs& a) { a.k.heads = 0; })
        .add_struct("positions", &RotaryArgs::positions, position_changes())
        .add("table", [](RotaryArgs& a) { advance(a.table); })
        .add_struct("choice", &RotaryArgs::choice, choice_changes())
        .add("batch", [](RotaryArgs& a) { --a.batch; })
        .add("tokens", [](RotaryArgs& a) { --a.tokens; })
        .add("head_dim", [](RotaryArgs& a) { a.head_dim += 16; })
        .add("rotary_dim", [](RotaryArgs& a) { a.rotary_dim -= 16; })
        .add("dtype", [](RotaryArgs& a) { a.dtype = other_dtype(a.dtype); })
        .add("pairing", [](RotaryArgs& a) { flip(a.pairing); })
        .add("conjugate", [](RotaryArgs& a) { a.conjugate = !a.conjugate; });
}

// --- parts of calls

// Adds the memory of a call's parts. Strides leave room for every change of a stride or a dimension.
class CallParts {
public:
    static constexpr int64_t batch = 2;
    static constexpr int64_t tokens = 3;
    static constexpr int q_heads = 8;
    static constexpr int k_heads = 4;
    static constexpr int head_dim = 64;
    static constexpr int table_heads = 2;

    explicit CallParts(const ContractOptions& options)
        : options_(options), memory_(std::make_shared<ContractMemory>()) {}

    const ContractOptions& options() const { return options_; }
    std::shared_ptr<ContractMemory> memory() const { return memory_; }
    int rotary_dim() const { return options_.rotates_whole_heads ? head_dim : head_dim / 2; }

    HeadStrides strides(int heads, int64_t inner_size = tokens) const {
        HeadStrides strides;
        strides.head = head_dim + 32 + (options_.aligned ? 0 : 1);
        strides.token = heads * (strides.head + 16) + 16;
        strides.batch = inner_size * (strides.token + 16) + 16;
        return strides;
    }

    std::byte* add_heads(const std::string& name, Holds holds, int heads) {
        return memory_->add_numbers(name, holds, batch * (strides(heads).batch + 16) + 64);
    }

    HeadsView add_view(const std::string& name, int heads, Holds out = Holds::heads) {
        return {.in = add_heads(name + ".in", Holds::input, heads),
                .out = add_heads(name + ".out", out, heads),
                .heads = heads,
                .in_strides = strides(heads),
                .out_strides = strides(heads)};
    }

    PositionsView add_positions() {
        PositionsView positions{.data = memory_->add_random_integers("positions", 512, 1000000),
                                .is_int64 = false,
                                .batch_stride = 16,
                                .token_stride = 1};
        if (!options_.has_rows) return positions;
        positions.rows = 3;
        positions.row_stride = 64;
        positions.row_of_pair = memory_->add_row_words("row_of_pair", table_words, positions.rows);
        return positions;
    }

    TableChoice add_choice() {
        if (!options_.has_choice) return {};
        const int head_stride = head_dim / 2 + 4;
        return {.count = 3,
                .stride = table_heads * head_stride + 5,
                .heads = table_heads,
                .head_stride = head_stride,
                .index = memory_->add_random_integers("choice.index", 64, 3),
                .batch_stride = 16,
                .token_stride = 1};
    }

    const uint64_t* add_table() { return memory_->add_tables("table", Holds::input, table_words); }

    RotaryArgs add_rotation() {
        RotaryArgs args{.q = {},
                        .k = {},
                        .positions = add_positions(),
                        .table = add_table(),
                        .choice = add_choice(),
                        .batch = batch,
                        .tokens = tokens,
                        .head_dim = head_dim,
                        .rotary_dim = rotary_dim(),
                        .dtype = options_.dtype};
        if (options_.has_choice) args.choice.query_factors = args.table + table_words / 2;
        return args;
    }

    RotaryArgs add_rotary() {
        RotaryArgs args = add_rotation();
        args.q = add_view("q", q_heads, Holds::q);
        args.k = add_view("k", k_heads);
        return args;
    }

private:
    static constexpr size_t table_words = 1024;

    ContractOptions options_;
    std::shared_ptr<ContractMemory> memory_;
};

template <class Args>
Contract<Args> make_contract(const std::string& op, const CallParts& parts, const Args& call,
                             FieldChanges<Args> fields) {
    return {op + " of " + describe(parts.options()), call, std::move(fields), parts.memory()};
}

// --- rotary, rotary_cos_sin, learnable_rotary

inline Contract<RotaryArgs> rotary_contract(const ContractOptions& options) {
    CallParts parts(options);
    return make_contract("rotary", parts, parts.add_rotary(), rotary_changes());
}

inline FieldChanges<ColumnsView> column_changes() {
    return FieldChanges<ColumnsView>()
        .add("data", [](ColumnsView& c) { advance_by_vectors(c.data); })
        .add("batch_stride", [](ColumnsView& c) { c.batch_stride += 16; })
        .add("token_stride", [](ColumnsView& c) { c.token_stride += 16; });
}

// Heads are not of float32: columns have that dtype, or the heads'.
inline Contract<RotaryCosSinArgs> rotary_cos_sin_contract(const ContractOptions& options) {
    CallParts parts(options);
    RotaryCosSinArgs call{.rotary = parts.add_rotary(), .cos = {}, .sin = {}};
    call.rotary.positions = {};
    call.rotary.table = nullptr;
    call.rotary.choice = {};
    const int64_t stride = 2 * CallParts::head_dim + (options.aligned ? 0 : 1);
    for (ColumnsView* columns : {&call.cos, &call.sin}) {
        columns->data = parts.memory()->add_numbers(columns == &call.cos ? "cos" : "sin", Holds::input, 4096);
        columns->token_stride = stride;
        columns->batch_stride = CallParts::tokens * stride;
    }
    const std::string why = "without positions and table";
    return make_contract("rotary_cos_sin", parts, call,
                         FieldChanges<RotaryCosSinArgs>()
                             .add_struct("rotary", &RotaryCosSinArgs::rotary, rotary_changes())
                             .keep("rotary.positions", why)
                             .keep("rotary.table", why)
                             .keep("rotary.choice", why)
                             .add_struct("cos", &RotaryCosSinArgs::cos, column_changes())
                             .add_struct("sin", &RotaryCosSinArgs::sin, column_changes())
                             .add("columns_dtype", [](RotaryCosSinArgs& a) { a.columns_dtype = a.rotary.dtype; })
                             .add_together({"columns_per_pair", "rotary.pairing"}, [](RotaryCosSinArgs& a) {
                                 a.rotary.pairing = Pairing::interleaved;
                                 a.columns_per_pair = 2;
                             }));
}

inline FieldChanges<LearnableRotaryArgs> learnable_rotary_changes() {
    const std::string one_row = "positions have one row";
    return FieldChanges<LearnableRotaryArgs>()
        .add_struct("rotary", &LearnableRotaryArgs::rotary, rotary_changes())
        .keep("rotary.positions.rows", one_row)
        .keep("rotary.positions.row_stride", one_row)
        .keep("rotary.positions.row_of_pair", one_row)
        .unused("rotary.table")
        .unused("rotary.choice")
        .add("frequencies", [](LearnableRotaryArgs& a) { advance_by_vectors(a.frequencies); })
        .add("attention_factors", [](LearnableRotaryArgs& a) { advance_by_vectors(a.attention_factors); })
        .add("table_dtype",
             [](LearnableRotaryArgs& a) {
                 a.table_dtype = a.table_dtype == DType::float32 ? DType::float64 : DType::float32;
             })
        .add("tables", [](LearnableRotaryArgs& a) { a.tables = 1; })
        .add("packed_tables", [](LearnableRotaryArgs& a) { advance(a.packed_tables); });
}

inline LearnableRotaryArgs add_learnable_rotary(CallParts& parts, Holds packed_tables) {
    ContractMemory& memory = *parts.memory();
    return {.rotary = parts.add_rotary(),
            .frequencies = memory.add_numbers("frequencies", Holds::input, 256),
            .attention_factors = memory.add_positive_numbers("attention_factors", 64),
            .tables = CallParts::table_heads,
            .packed_tables = memory.add_tables("packed_tables", packed_tables, 256)};
}

inline Contract<LearnableRotaryArgs> learnable_rotary_contract(ContractOptions options) {
    options.has_rows = false;
    CallParts parts(options);
    const LearnableRotaryArgs call = add_learnable_rotary(parts, Holds::words);
    return make_contract("learnable_rotary", parts, call, learnable_rotary_changes());
}

inline FieldChanges<RotatedGradient> rotated_gradient_changes() {
    return FieldChanges<RotatedGradient>()
        .add("data", [](RotatedGradient& g) { advance_by_vectors(g.data); })
        .add_struct("strides", &RotatedGradient::strides, stride_changes());
}

inline constexpr int64_t table_sums = 2048;  // most that there is memory for

inline Contract<LearnableRotaryGradientArgs> learnable_rotary_gradient_contract(ContractOptions options) {
    using Args = LearnableRotaryGradientArgs;
    options.has_rows = false;
    CallParts parts(options);
    ContractMemory& memory = *parts.memory();
    Args call{.call = add_learnable_rotary(parts, Holds::input), .q = {}, .k = {}};
    call.q = {.data = parts.add_heads("q", Holds::input, CallParts::q_heads),
              .strides = parts.strides(CallParts::q_heads)};
    call.k = {.data = parts.add_heads("k", Holds::input, CallParts::k_heads),
              .strides = parts.strides(CallParts::k_heads)};
    call.frequencies = memory.add_numbers("gradient of frequencies", Holds::table_numbers, 256);
    call.attention_factors = memory.add_numbers("gradient of attention_factors", Holds::table_numbers, 64);
    call.table_sums = reinterpret_cast<double*>(memory.add_numbers("table_sums", Holds::scratch, table_sums + 8));
    return make_contract("learnable_rotary_gradient", parts, call,
                         FieldChanges<Args>()
                             .add_struct("call", &Args::call, learnable_rotary_changes())
                             .unused("call.frequencies")
                             .unused("call.attention_factors")
                             .add("call.rotary.q.out", [](Args& a) { a.call.rotary.q.out = nullptr; })
                             .add("call.rotary.k.out", [](Args& a) { a.call.rotary.k.out = nullptr; })
                             .add_together({"call.rotary.q.out", "call.rotary.k.out"},
                                           [](Args& a) { a.call.rotary.q.out = a.call.rotary.k.out = nullptr; })
                             .add_struct("q", &Args::q, rotated_gradient_changes())
                             .add_struct("k", &Args::k, rotated_gradient_changes())
                             .add("frequencies", [](Args& a) { advance_by_vectors(a.frequencies); })
                             .add("attention_factors", [](Args& a) { advance_by_vectors(a.attention_factors); })
                             .add("table_sums", [](Args& a) { advance_by_vectors(a.table_sums); }));
}

}  // namespace mrrope::testing
