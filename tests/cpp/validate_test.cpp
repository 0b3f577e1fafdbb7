#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu_backend.h"
#include "every_contract.h"
#include "mrrope/qkv_rotary.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

// The message of validate, or an empty string.
template <class Args>
std::string refusal(const Args& args) {
    try {
        validate(args);
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "";
}

template <class Args>
struct BadCall {
    std::function<void(Args&)> spoil;
    std::string start;  // of the message: the field
    std::string got;    // and its end: the value, or what was expected
};

// Expects that validate accepts `call`, and that it and the launcher refuse each spoiled call in the same words.
template <class Args>
void expect_refusals(const Args& call, const std::vector<BadCall<Args>>& bad_calls) {
    EXPECT_EQ(refusal(call), "");
    for (const BadCall<Args>& bad : bad_calls) {
        Args args = call;
        bad.spoil(args);
        const std::string message = refusal(args);
        EXPECT_EQ(message.rfind(bad.start + " must ", 0), 0u) << bad.start << ": '" << message << "'";
        EXPECT_TRUE(message.ends_with(bad.got)) << bad.got << ": '" << message << "'";
        if constexpr (requires { call_on_cpu(args); }) {
            try {
                call_on_cpu(args);
                ADD_FAILURE() << "called with bad " << bad.start;
            } catch (const std::invalid_argument& error) {
                EXPECT_EQ(error.what(), message);
            }
        }
    }
}

constexpr ContractOptions one_of_all{.has_choice = false, .has_rows = false, .rounds_to_float8 = false};

TEST(Validate, AcceptsEveryContract) {
    for (const bool has_choice : {false, true}) {
        for (const bool has_rows : {false, true}) {
            for (const DType dtype : {DType::bfloat16, DType::float32}) {
                for_each_contract({.dtype = dtype, .has_choice = has_choice, .has_rows = has_rows},
                                  [](const auto& contract) { EXPECT_EQ(refusal(contract.call), "") << contract.name; });
            }
        }
    }
}

TEST(Validate, AcceptsCallsWithoutTokens) {
    for_each_contract(every_field_matters, [](const auto& contract) {
        auto args = contract.call;
        if constexpr (requires { args.call; }) {
            args.call.rotary.tokens = 0;
        } else if constexpr (requires { args.rotary; }) {
            args.rotary.tokens = 0;
        } else {
            args.tokens = 0;
        }
        EXPECT_EQ(refusal(args), "") << contract.name;
    });
}

TEST(Validate, AcceptsGradientsOfAViewWithoutHeads) {
    const auto norm_contract = qk_norm_rotary_gradient_contract(one_of_all);
    QkNormRotaryGradientArgs norms = norm_contract.call;
    norms.call.rotary.k.heads = 0;
    norms.k.weight_sums = nullptr;  // no rows of sums; the gradient of its weights is 0
    EXPECT_EQ(weight_sum_rows_cpu(norms).k, 0);
    EXPECT_EQ(refusal(norms), "");
    call_on_cpu(norms);
    const auto* k_weights = static_cast<const uint16_t*>(norms.k.weights);
    for (int i = 0; i < norms.call.rotary.head_dim; ++i) EXPECT_EQ(k_weights[i], 0) << i;

    const auto learnable_contract = learnable_rotary_gradient_contract(one_of_all);
    LearnableRotaryGradientArgs learnable = learnable_contract.call;
    learnable.call.rotary.q.heads = learnable.call.rotary.k.heads = 0;
    learnable.table_sums = nullptr;
    EXPECT_EQ(table_sum_rows_cpu(learnable), 0);
    EXPECT_EQ(refusal(learnable), "");
    call_on_cpu(learnable);
}

TEST(Validate, AcceptsOtherStridesOfOneItemInPlace) {
    RotaryArgs args = rotary_contract(one_of_all).call;
    args.batch = args.tokens = args.q.heads = args.k.heads = 1;
    args.q.in = args.q.out;
    ++args.q.in_strides.batch;
    ++args.q.in_strides.token;
    ++args.q.in_strides.head;
    EXPECT_EQ(refusal(args), "");
    args.tokens = 2;
    EXPECT_EQ(refusal(args), "q.out_strides must equal in_strides where out equals in");
}

// A slot of a cache that is not paged counts in its block.
TEST(Validate, AcceptsManyBlocksThatAreNotPaged) {
    RotaryAndCacheArgs args = rotary_and_cache_contract(one_of_all).call;
    args.slots.paged = false;
    args.slots.blocks = int64_t{1} << 31;
    EXPECT_EQ(refusal(args), "");
    args.slots.block_size = int64_t{1} << 31;
    EXPECT_EQ(refusal(args), "slots.block_size must make fewer than 2^31 slots, got 1 of 2147483648");
}

TEST(Validate, NamesFieldsOfRotary) {
    using A = RotaryArgs;
    expect_refusals<A>(rotary_contract(one_of_all).call,
                       {{[](A& a) { a.batch = -1; }, "batch", "got -1"},
                        {[](A& a) { a.tokens = -2; }, "tokens", "got -2"},
                        {[](A& a) { a.q.heads = -3; }, "q.heads", "got -3"},
                        {[](A& a) { a.k.heads = -1; }, "k.heads", "got -1"},
                        {[](A& a) { a.q.in = nullptr; }, "q.in", "nullptr"},
                        {[](A& a) { a.k.out = nullptr; }, "k.out", "not be nullptr: it receives the result"},
                        {[](A& a) {
                             a.q.in = a.q.out;
                             ++a.q.in_strides.token;
                         },
                         "q.out_strides", "where out equals in"},
                        {[](A& a) { a.rotary_dim = 15; }, "rotary_dim", "got 15"},
                        {[](A& a) { a.rotary_dim = 0; }, "rotary_dim", "got 0"},
                        {[](A& a) { a.rotary_dim = a.head_dim + 2; }, "rotary_dim", "from 2 to head_dim 64, got 66"},
                        {[](A& a) { a.head_dim = 1 << 30; }, "q and k", "12 heads of 1073741824"},
                        {[](A& a) { a.positions.data = nullptr; }, "positions.data", "nullptr"},
                        {[](A& a) { a.positions.rows = 0; }, "positions.rows", "from 1 to 128, got 0"},
                        {[](A& a) { a.positions.rows = 129; }, "positions.rows", "got 129"},
                        {[](A& a) { a.positions.rows = 3; }, "positions.row_of_pair", "with several rows, got 3"},
                        {[](A& a) { a.table = nullptr; }, "table", "nullptr"},
                        {[](A& a) { a.choice.count = 0; }, "choice.count", "got 0"},
                        {[](A& a) {
                             a.batch = 3;
                             a.choice.count = 2;
                         },
                         "choice.count", "each of 3 sequences, without an index, got 2"},
                        {[](A& a) { a.choice.heads = 0; }, "choice.heads", "got 0"},
                        {[](A& a) { a.choice.heads = 3; }, "choice.heads", "divide q.heads 8, got 3"},
                        {[](A& a) { a.choice.heads = 8; }, "choice.heads", "divide k.heads 4, got 8"}});
}

TEST(Validate, NamesFieldsOfRotaryCosSin) {
    using A = RotaryCosSinArgs;
    expect_refusals<A>(rotary_cos_sin_contract({.dtype = DType::bfloat16, .has_choice = false, .has_rows = false}).call,
                       {{[](A& a) { a.rotary.rotary_dim = 7; }, "rotary.rotary_dim", "got 7"},
                        {[](A& a) { a.rotary.q.out = nullptr; }, "rotary.q.out", "it receives the result"},
                        {[](A& a) { a.cos.data = nullptr; }, "cos.data", "nullptr"},
                        {[](A& a) { a.sin.data = nullptr; }, "sin.data", "nullptr"},
                        {[](A& a) { a.columns_dtype = DType::float16; }, "columns_dtype", "that of the heads"},
                        {[](A& a) { a.columns_per_pair = 2; }, "columns_per_pair", "in interleaved pairing, got 2"}});
}

TEST(Validate, NamesFieldsOfLearnableRotary) {
    using A = LearnableRotaryArgs;
    expect_refusals<A>(learnable_rotary_contract(one_of_all).call,
                       {{[](A& a) { a.rotary.q.out = nullptr; }, "rotary.q.out", "it receives the result"},
                        {[](A& a) { a.rotary.positions.rows = 2; }, "rotary.positions.rows", "got 2"},
                        {[](A& a) { a.rotary.positions.data = nullptr; }, "rotary.positions.data", "nullptr"},
                        {[](A& a) { a.frequencies = nullptr; }, "frequencies", "nullptr"},
                        {[](A& a) { a.attention_factors = nullptr; }, "attention_factors", "nullptr"},
                        {[](A& a) { a.table_dtype = DType::bfloat16; }, "table_dtype", "float32 or float64"},
                        {[](A& a) { a.tables = 0; }, "tables", "got 0"},
                        {[](A& a) { a.tables = 3; }, "tables", "divide rotary.q.heads 8, got 3"},
                        {[](A& a) { a.packed_tables = nullptr; }, "packed_tables", "nullptr"}});
}

TEST(Validate, NamesFieldsOfTheGradientOfLearnableRotary) {
    using A = LearnableRotaryGradientArgs;
    A call = learnable_rotary_gradient_contract(one_of_all).call;
    call.call.rotary.q.out = nullptr;  // not wanted
    call.call.frequencies = nullptr;   // not read
    expect_refusals<A>(call, {{[](A& a) { a.call.tables = 3; }, "call.tables", "got 3"},
                              {[](A& a) { a.q.data = nullptr; }, "q.data", "nullptr"},
                              {[](A& a) { a.k.data = nullptr; }, "k.data", "nullptr"},
                              {[](A& a) { a.call.rotary.tokens = 1 << 30; }, "call.rotary.q and k", "tokens of 12"},
                              {[](A& a) { a.frequencies = nullptr; }, "frequencies", "nullptr"},
                              {[](A& a) { a.attention_factors = nullptr; }, "attention_factors", "nullptr"},
                              {[](A& a) { a.table_sums = nullptr; }, "table_sums", "nullptr"}});
}

TEST(Validate, NamesFieldsOfQkNormRotary) {
    using A = QkNormRotaryArgs;
    expect_refusals<A>(qk_norm_rotary_contract(one_of_all).call,
                       {{[](A& a) { a.rotary.table = nullptr; }, "rotary.table", "nullptr"},
                        {[](A& a) { a.q_weight = nullptr; }, "q_weight", "nullptr"},
                        {[](A& a) { a.k_weight = nullptr; }, "k_weight", "nullptr"},
                        {[](A& a) { a.eps = -1e-6; }, "eps", "got -1e-06"},
                        {[](A& a) { a.eps = NAN; }, "eps", "got nan"},
                        {[](A& a) { a.weight_offset = INFINITY; }, "weight_offset", "got inf"}});
}

TEST(Validate, NamesFieldsOfTheGradientOfQkNormRotary) {
    using A = QkNormRotaryGradientArgs;
    expect_refusals<A>(qk_norm_rotary_gradient_contract(one_of_all).call,
                       {{[](A& a) { a.call.rotary.q.out = nullptr; }, "call.rotary.q.out", "it receives the result"},
                        {[](A& a) { a.call.k_weight = nullptr; }, "call.k_weight", "nullptr"},
                        {[](A& a) { a.call.eps = -1; }, "call.eps", "got -1"},
                        {[](A& a) { a.q.data = nullptr; }, "q.data", "nullptr"},
                        {[](A& a) { a.k.data = nullptr; }, "k.data", "nullptr"},
                        {[](A& a) { a.q.weight_sums = nullptr; }, "q.weight_sums", "is wanted"},
                        {[](A& a) { a.k.weight_sums = nullptr; }, "k.weight_sums", "is wanted"}});
}

template <class A>
std::vector<BadCall<A>> bad_cache_calls() {
    return {{[](A& a) { a.rotary.conjugate = true; }, "rotary.conjugate", "got true"},
            {[](A& a) { a.rotary.k.heads = 4; }, "rotary.k.heads", "got 4"},
            {[](A& a) { a.rotary.q.in = nullptr; }, "rotary.q.in", "nullptr"},
            {[](A& a) { a.k.view.in = nullptr; }, "k.view.in", "nullptr"},
            {[](A& a) { a.v.view.out = nullptr; }, "v.view.out", "nullptr: it is in the cache"},
            {[](A& a) { a.k.view.heads = -1; }, "k.view.heads", "got -1"},
            {[](A& a) { a.v.view.heads = 2; }, "v.view.heads", "that of k, 4, got 2"},
            {[](A& a) { a.rotary.choice.heads = 8; }, "rotary.choice.heads", "divide k.view.heads 4, got 8"},
            {[](A& a) { a.slots.blocks = -1; }, "slots.blocks", "got -1"},
            {[](A& a) { a.slots.block_size = -16; }, "slots.block_size", "got -16"},
            {[](A& a) { a.slots.blocks = int64_t{1} << 40; }, "slots.blocks",
             "fewer than 2^31 slots, got 1099511627776 of 8"},
            {[](A& a) {
                 a.slots.paged = false;
                 a.slots.blocks = 1;
             },
             "slots.blocks", "each of 2 sequences where slots are not paged, got 1"},
            {[](A& a) { a.slots.of_tokens.data = nullptr; }, "slots.of_tokens.data", "nullptr"},
            {[](A& a) {
                 a.rotary.dtype = DType::float64;
                 a.cached_as = StoredAs::float8_e4m3;
             },
             "cached_as", "not stored as float8"}};
}

TEST(Validate, NamesFieldsOfRotaryAndCache) {
    using A = RotaryAndCacheArgs;
    expect_refusals<A>(rotary_and_cache_contract(one_of_all).call, bad_cache_calls<A>());
}

TEST(Validate, NamesFieldsOfQkNormRotaryAndCache) {
    using A = QkNormRotaryAndCacheArgs;
    auto bad_calls = bad_cache_calls<A>();
    bad_calls.insert(bad_calls.end(), {{[](A& a) { a.eps = -1; }, "eps", "got -1"},
                                       {[](A& a) { a.gate.heads = -1; }, "gate.heads", "got -1"},
                                       {[](A& a) { a.gate.in = nullptr; }, "gate.in", "nullptr"},
                                       {[](A& a) { a.gate.in = &a; }, "gate.out", "replaces the gate"},
                                       {[](A& a) {
                                            a.rotary.dtype = DType::float64;
                                            a.q_stored_as = StoredAs::float8_e5m2;
                                        },
                                        "q_stored_as", "not stored as float8"}});
    A call = qk_norm_rotary_and_cache_contract(one_of_all).call;
    call.q_weight = call.k_weight = nullptr;  // no norms
    expect_refusals<A>(call, bad_calls);
}

template <class A>
std::vector<BadCall<A>> bad_rope_parts() {
    return {{[](A& a) { a.rotary.head_dim += 2; }, "rotary.head_dim", "got 34"},
            {[](A& a) { a.rotary.positions.rows = 3; }, "rotary.positions.row_of_pair", "got 3"},
            {[](A& a) { a.rotary.choice.heads = 2; }, "rotary.choice.heads", "all heads, got 2"},
            {[](A& a) { a.rotary.choice.query_factors = a.rotary.table; }, "rotary.choice.query_factors",
             "one table for all heads"},
            {[](A& a) { a.rotary.q.in = nullptr; }, "rotary.q.in", "nullptr"},
            {[](A& a) { a.rotary.table = nullptr; }, "rotary.table", "nullptr"}};
}

TEST(Validate, NamesFieldsOfMlaRotary) {
    using A = MlaRotaryArgs;
    auto bad_calls = bad_rope_parts<A>();
    bad_calls.insert(bad_calls.end(), {{[](A& a) { a.rotary.k.out = nullptr; }, "rotary.k.out", "receives the result"},
                                       {[](A& a) { a.q_nope.dim = -1; }, "q_nope.dim", "got -1"},
                                       {[](A& a) { a.q_nope.view.heads = 4; }, "q_nope.view.heads", "8, got 4"},
                                       {[](A& a) { a.k_nope.view.out = nullptr; }, "k_nope.view.out", "the result"}});
    expect_refusals<A>(mla_rotary_contract(one_of_all).call, bad_calls);
}

TEST(Validate, NamesFieldsOfTheGradientOfMlaRotary) {
    using A = MlaRotaryGradientArgs;
    auto bad_calls = bad_rope_parts<A>();
    bad_calls.push_back({[](A& a) { a.q_nope.view.in = nullptr; }, "q_nope.view.in", "nullptr"});
    expect_refusals<A>(mla_rotary_gradient_contract(one_of_all).call, bad_calls);
}

TEST(Validate, NamesFieldsOfMlaRotaryAndCache) {
    using A = MlaRotaryAndCacheArgs;
    auto bad_calls = bad_rope_parts<A>();
    bad_calls.insert(bad_calls.end(),
                     {{[](A& a) { a.rotary.k.heads = 2; }, "rotary.k.heads", "all heads, got 2"},
                      {[](A& a) { a.rotary.k.out = nullptr; }, "rotary.k.out", "nullptr: it is in the cache"},
                      {[](A& a) { a.latent.dim = -16; }, "latent.dim", "got -16"},
                      {[](A& a) { a.latent.view.in = nullptr; }, "latent.view.in", "nullptr"},
                      {[](A& a) { a.latent.view.heads = 0; }, "latent.view.heads", "got 0"},
                      {[](A& a) { a.slots.blocks = int64_t{1} << 31; }, "slots.blocks", "got 2147483648 of 8"},
                      {[](A& a) { a.slots.of_tokens.data = nullptr; }, "slots.of_tokens.data", "nullptr"},
                      {[](A& a) {
                           a.rotary.dtype = DType::float64;
                           a.cached_as = StoredAs::float8_e4m3;
                       },
                       "cached_as", "not stored as float8"}});
    expect_refusals<A>(mla_rotary_and_cache_contract(one_of_all).call, bad_calls);
}

TEST(Validate, NamesFieldsOfRescaleCache) {
    using A = RescaleCacheArgs;
    static constexpr int32_t one_layer[] = {0};
    static void* const one_null[] = {nullptr};
    const A call = rescale_cache_contract(one_of_all).call;
    const std::vector<int32_t> past_the_last(call.keys.size(), call.table_layers);
    expect_refusals<A>(call, {{[](A& a) { a.batch = -1; }, "batch", "got -1"},
                              {[](A& a) { a.tokens = -1; }, "tokens", "got -1"},
                              {[](A& a) { a.heads = -1; }, "heads", "got -1"},
                              {[](A& a) { a.rotary_dim = 3; }, "rotary_dim", "got 3"},
                              {[](A& a) { a.table_count = 0; }, "table_count", "got 0"},
                              {[](A& a) { a.table_layers = 0; }, "table_layers", "got 0"},
                              {[](A& a) { a.table_rows = 3; }, "table_rows", "got 3"},
                              {[](A& a) { a.table_heads = 3; }, "table_heads", "got 3"},
                              {[](A& a) { a.layer_of_keys = one_layer; }, "layer_of_keys", "got 1"},
                              {[&](A& a) { a.layer_of_keys = past_the_last; }, "layer_of_keys[0]",
                               "got " + std::to_string(call.table_layers)},
                              {[](A& a) {
                                   a.layer_of_keys = {};
                                   a.keys = one_null;
                               },
                               "keys[0]", "nullptr"},
                              {[](A& a) { a.tables = nullptr; }, "tables", "nullptr"},
                              {[](A& a) { a.from = nullptr; }, "from", "nullptr"},
                              {[](A& a) { a.to = nullptr; }, "to", "nullptr"},
                              {[](A& a) { a.positions.data = nullptr; }, "positions.data", "nullptr"}});
}

TEST(Validate, NamesFieldsOfQkvRotary) {
    using A = QkvRotaryArgs;
    static const uint64_t memory[64] = {};
    static uint64_t out[64];
    const A call{.x = memory,
                 .weight = memory,
                 .out = out,
                 .positions = {.data = memory},
                 .table = memory,
                 .batch = 1,
                 .tokens = 2,
                 .inputs = 8,
                 .q_heads = 2,
                 .kv_heads = 1,
                 .head_dim = 4,
                 .rotary_dim = 4};
    expect_refusals<A>(call, {{[](A& a) { a.tokens = -1; }, "tokens", "got -1"},
                              {[](A& a) { a.inputs = 0; }, "inputs", "got 0"},
                              {[](A& a) { a.kv_heads = -1; }, "kv_heads", "got -1"},
                              {[](A& a) { a.rotary_dim = 6; }, "rotary_dim", "from 2 to head_dim 4, got 6"},
                              {[](A& a) { a.head_dim = 1 << 30; }, "q, k and v", "4 heads of 1073741824"},
                              {[](A& a) { a.x = nullptr; }, "x", "nullptr"},
                              {[](A& a) { a.weight = nullptr; }, "weight", "nullptr"},
                              {[](A& a) { a.out = nullptr; }, "out", "nullptr"},
                              {[](A& a) { a.positions.data = nullptr; }, "positions.data", "nullptr"},
                              {[](A& a) { a.positions.rows = 2; }, "positions.rows", "got 2"},
                              {[](A& a) { a.table = nullptr; }, "table", "nullptr"}});
}

}  // namespace
}  // namespace mrrope
