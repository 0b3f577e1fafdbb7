#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mrrope {

// Every RoPE extension is a table: how fast each pair of components turns, and one attention factor.
enum class Method {
    rope,
    pi,
    ntk,
    yarn,        // ramp over the pair index, as deployed by HF, vLLM and llama.cpp
    yarn_ratio,  // ramp over training length / wavelength, as printed in the papers
    mrrope_uni,
    mrrope_pro,
    mrrope_pow,
    radix,     // explicit radix factors
    longrope,  // explicit cumulative scales
    llama3,
    relative,  // what one table has to add to another; made by relative(), not by build_table()
};

const char* method_name(Method);
Method method_from_name(std::string_view);  // throws std::invalid_argument listing the known names

// The pairs up to the first are left alone, the pairs from the second on are slowed by the whole scale.
using Bounds = std::pair<int, int>;

struct TableRequest {
    Method method = Method::rope;
    int rotary_dim = 0;
    double base = 10000.0;
    double original_max_position = 0.0;
    double scale = 1.0;
    double alpha = 1.0;  // slow and fast bound, in rotations over original_max_position
    double beta = 32.0;
    std::optional<Bounds> bounds = std::nullopt;  // overrides alpha and beta
    std::optional<double> power = std::nullopt;   // mrrope_pow only
    std::vector<double> factors = {};             // radix: the lambdas; longrope: the cumulative scales
    std::optional<double> attention_factor = std::nullopt;
    // What the model does already, which the method extends: its frequencies are base^(-2i / rotary_dim) /
    // native_scale[i], in any order (empty: plain RoPE), and its rotated q and k are multiplied by the factor.
    std::vector<double> native_scale = {};
    double native_attention_factor = 1.0;
};

struct FrequencyTable {
    Method method = Method::rope;
    int rotary_dim = 0;
    double base = 0.0;
    double original_max_position = 0.0;
    double scale = 1.0;
    std::optional<Bounds> bounds;
    double attention_factor = 1.0;
    std::vector<double> inv_freq;          // radians per position, one per pair
    std::vector<double> cumulative_scale;  // by how much each pair was slowed; empty for relative tables
    std::vector<uint64_t> turns;           // inv_freq as a 64-bit fixed-point fraction of a full circle

    int pairs() const { return rotary_dim / 2; }
    std::vector<double> radix_factors() const;  // s[i + 1] / s[i]
};

// Kernels multiply by it in float32.
inline bool is_attention_factor(double value) {
    using Float = std::numeric_limits<float>;
    return double{Float::min()} <= value && value <= double{Float::max()};
}

// Throws std::invalid_argument naming the argument, its value and what was expected.
FrequencyTable build_table(const TableRequest&);

// For a table that was assembled by hand or read from a file: throws std::invalid_argument where its parts disagree.
void validate(const FrequencyTable&);

// Turns a vector rotated by `from` into one rotated by `to`. Throws std::invalid_argument where the quotient of their
// scales or attention factors is none.
FrequencyTable relative(const FrequencyTable& to, const FrequencyTable& from);

// Undoes `table`: angles negated, attention factor inverted. Throws like relative.
FrequencyTable inverse(const FrequencyTable& table);

// What the kernels read: the turns of every pair, then the bits of the attention factor as a double. One integer array
// holds the whole table, so it survives .half(), mixed precision and device maps unharmed.
std::vector<uint64_t> packed(const FrequencyTable& table);

}  // namespace mrrope
