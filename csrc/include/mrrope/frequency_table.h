#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Frequency tables of RoPE and its extensions: one frequency per pair of components, and one attention factor.
//
// To add a method, add an enumerator to Method, and to csrc/frequency_table.cpp one row (its traits) and one function
// (its cumulative scale). Python derives every list of methods from methods().

namespace mrrope {

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
    relative,  // difference of two tables, from relative(); build_table() does not take it
};

// The argument besides the scale that a method needs. build_table() throws without power or factors. It accepts the
// default of beta, YaRN's 32, although llama3 checkpoints set 4.
enum class Needs { nothing, power, radix_factors, cumulative_scales, beta };

struct MethodTraits {
    Method method;
    const char* name;
    bool has_temperature = false;  // the default attention factor is 0.1 ln(scale) + 1, else 1
    Needs needs = Needs::nothing;
    std::optional<double> power = std::nullopt;  // mrrope_pow with this power is the same table
};

// Every method that build_table() takes, in the order of Method.
std::vector<MethodTraits> methods();

const char* method_name(Method);
Method method_from_name(std::string_view);  // throws std::invalid_argument listing the known names

// (d_l, d_h): pairs up to d_l keep their frequency, pairs from d_h on are slowed by the full scale.
using Bounds = std::pair<int, int>;

struct TableRequest {
    Method method = Method::rope;
    int rotary_dim = 0;
    double base = 10000.0;
    double original_max_position = 0.0;
    double scale = 1.0;
    double alpha = 1.0;  // alpha and beta: slow and fast bound, in rotations over original_max_position
    double beta = 32.0;
    std::optional<Bounds> bounds = std::nullopt;  // overrides alpha and beta
    std::optional<double> power = std::nullopt;   // mrrope_pow only
    std::vector<double> factors = {};             // radix: the radix factors; longrope: the cumulative scales
    std::optional<double> attention_factor = std::nullopt;
    // The model's own RoPE, which the method extends. Its frequencies, base^(-2i / rotary_dim) / native_scale[i], need
    // not be sorted; an empty native_scale is plain RoPE. It multiplies rotated q and k by native_attention_factor.
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
    std::vector<double> cumulative_scale;  // plain RoPE's frequency / inv_freq; empty for relative tables
    std::vector<uint64_t> turns;           // phase steps: inv_freq in revolutions per position, 64-bit fixed point

    int pairs() const { return rotary_dim / 2; }
    std::vector<double> radix_factors() const;  // cumulative_scale[i + 1] / cumulative_scale[i]
};

// Positive and in float32's range, since kernels multiply by it in float32.
inline bool is_attention_factor(double value) {
    using Float = std::numeric_limits<float>;
    return double{Float::min()} <= value && value <= double{Float::max()};
}

// Throws std::invalid_argument naming the argument, its value and what was expected.
FrequencyTable build_table(const TableRequest&);

// Checks a table that was assembled by hand or read from a file. Throws std::invalid_argument where its members are
// inconsistent.
void validate(const FrequencyTable&);

// The table that re-rotates a vector rotated by `from` into one rotated by `to`. Throws std::invalid_argument where the
// quotient of their scales or attention factors is out of range.
FrequencyTable relative(const FrequencyTable& to, const FrequencyTable& from);

// Undoes `table`: angles negated, attention factor inverted. Throws like relative().
FrequencyTable inverse(const FrequencyTable& table);

// The table as kernels read it: the phase step of every pair, then the bits of the attention factor as a double. An
// integer array survives .half(), mixed precision and device maps unchanged.
std::vector<uint64_t> packed(const FrequencyTable& table);

}  // namespace mrrope
