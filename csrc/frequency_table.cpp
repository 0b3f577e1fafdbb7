#include "mrrope/frequency_table.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <iterator>
#include <numbers>
#include <sstream>
#include <stdexcept>

#include "wide_float.h"

namespace mrrope {
namespace {

constexpr const char* relative_name = "relative";

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
    std::ostringstream text;
    text.precision(17);
    (text << ... << parts);
    throw std::invalid_argument(text.str());
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) fail(parts...);
}

void require_positive(const char* argument, double value) {
    require(std::isfinite(value) && value > 0.0, argument, " must be a positive finite number, got ", value);
}

void require_attention_factor(const char* argument, double value) {
    require(is_attention_factor(value), argument, " must be a positive finite number in float32's range, got ", value);
}

void require_base(double base) {
    require(std::isfinite(base) && base > 1.0, "base must be a finite number above 1, got ", base);
}

void require_ordered(Bounds bounds) {
    const auto [low, high] = bounds;
    constexpr int most = 1 << 16;  // far past any head; set_power allocates one share per step between the bounds
    require(0 <= low && low <= high && high <= most, "bounds must be (d_l, d_h) with 0 <= d_l <= d_h <= ", most,
            ", got (", low, ", ", high, ")");
}

// The frequencies that a method extends. Formulas address pairs by rank, fastest first, whatever their order in the
// head. Ranks past the last pair extrapolate with the spacing of plain RoPE.
class NativeFrequencies {
public:
    explicit NativeFrequencies(const TableRequest& request)
        : log_spacing_(WideFloat(2.0) / static_cast<double>(request.rotary_dim) * wide::log(request.base)) {
        for (int i = 0; i < request.rotary_dim / 2; ++i) {
            plain_.push_back(wide::exp(log_spacing_ * static_cast<double>(-i)));
            const double slowed = request.native_scale.empty() ? 1.0 : request.native_scale[i];
            theta_.push_back(slowed == 1.0 ? plain_[i] : plain_[i] / slowed);
        }
        fastest_first_ = theta_;
        std::ranges::stable_sort(fastest_first_, [](WideFloat a, WideFloat b) { return b < a; });
    }

    WideFloat plain(int i) const { return plain_[i]; }
    WideFloat operator[](int i) const { return theta_[i]; }

    // The number of pairs that are faster than pair i.
    int rank(int i) const {
        const auto first = std::ranges::lower_bound(fastest_first_, theta_[i], [](auto a, auto b) { return b < a; });
        return static_cast<int>(first - fastest_first_.begin());
    }

    WideFloat of_rank(int rank) const {
        const int last = static_cast<int>(fastest_first_.size()) - 1;
        if (rank <= last) return fastest_first_[rank];
        return fastest_first_[last] * wide::exp(log_spacing_ * static_cast<double>(last - rank));
    }

    // The fractional rank of a frequency, interpolated between pairs in the logarithm.
    double rank_of(double frequency) const {
        const double spacing = static_cast<double>(log_spacing_);
        const double wanted = std::log(frequency);
        const auto log_of = [&](int rank) { return std::log(static_cast<double>(fastest_first_[rank])); };
        const int last = static_cast<int>(fastest_first_.size()) - 1;
        if (wanted >= log_of(0)) return (log_of(0) - wanted) / spacing;
        for (int rank = 1; rank <= last; ++rank) {
            if (wanted < log_of(rank)) continue;
            return rank - (wanted - log_of(rank)) / (log_of(rank - 1) - log_of(rank));
        }
        return last + (log_of(last) - wanted) / spacing;
    }

private:
    WideFloat log_spacing_;
    std::vector<WideFloat> plain_, theta_, fastest_first_;
};

// The fractional rank of the pair that makes `rotations` full rotations over original_max_position.
double rank_with_rotations(const TableRequest& request, const NativeFrequencies& theta, double rotations) {
    const double wavelength = request.original_max_position / rotations;
    if (!request.native_scale.empty()) return theta.rank_of(2.0 * std::numbers::pi / wavelength);
    return request.rotary_dim * std::log(wavelength / (2.0 * std::numbers::pi)) / (2.0 * std::log(request.base));
}

Bounds bounds_of(const TableRequest& request, const NativeFrequencies& theta) {
    if (request.bounds) return *request.bounds;
    // YaRN clamps to rotary_dim - 1, not to the last pair, so the upper bound may exceed the last pair.
    const double last = request.rotary_dim - 1;
    const double fast = std::floor(rank_with_rotations(request, theta, request.beta));
    const double slow = std::ceil(rank_with_rotations(request, theta, request.alpha));
    const int low = static_cast<int>(std::clamp(fast, 0.0, last));
    return {low, std::max(low, static_cast<int>(std::clamp(slow, 0.0, last)))};
}

// The cumulative scale of a pair, by which its frequency is divided: one public function per formula.
class CumulativeScale {
public:
    CumulativeScale(const TableRequest& request, Bounds bounds, const NativeFrequencies& theta,
                    std::optional<double> power)
        : request_(request), bounds_(bounds), theta_(theta), log_scale_(wide::log(request.scale)) {
        if (power) set_power(*power);
    }

    WideFloat rope(int) const { return 1.0; }

    WideFloat pi(int) const { return request_.scale; }

    WideFloat ntk(int pair) const {
        const int rank = theta_.rank(pair);
        return rank == 0 ? WideFloat(1.0) : power_of_scale(WideFloat(2.0 * rank) / (request_.rotary_dim - 2.0));
    }

    WideFloat index_ramp(int pair) const {
        const auto [low, high] = bounds_;
        const int rank = theta_.rank(pair);
        if (rank <= low) return interpolated(0.0);
        if (rank >= high) return interpolated(1.0);
        return interpolated(WideFloat(rank - low) / static_cast<double>(high - low));
    }

    WideFloat ratio_ramp(int pair) const {
        const auto at_bound = [&](int bound) { return rotations(theta_.of_rank(bound)); };
        const WideFloat slow = request_.bounds ? at_bound(bounds_.second) : WideFloat(request_.alpha);
        const WideFloat fast = request_.bounds ? at_bound(bounds_.first) : WideFloat(request_.beta);
        const WideFloat own = rotations(theta_[pair]);
        if (!(own < fast)) return interpolated(0.0);
        if (!(slow < own)) return interpolated(1.0);
        return interpolated((fast - own) / (fast - slow));
    }

    // The radix factors between the bounds share the scale: see set_power.
    WideFloat mrrope(int pair) const {
        const auto [low, high] = bounds_;
        // If the bounds coincide, the full scale starts at the next pair, as with YaRN's ramp.
        const int step = std::clamp(theta_.rank(pair) - low, 0, std::max(high - low, 1));
        return power_of_scale(share_of_scale_[step]);
    }

    WideFloat radix(int pair) const {
        const int rank = theta_.rank(pair);
        WideFloat product = 1.0;
        for (int j = 0; j < rank; ++j) product = product * request_.factors[j];
        return product;
    }

    WideFloat longrope(int pair) const { return request_.factors[pair]; }

private:
    WideFloat power_of_scale(WideFloat exponent) const { return wide::exp(exponent * log_scale_); }

    // YaRN interpolates frequencies, not wavelengths: ramp 0 keeps the frequency, ramp 1 divides it by the scale.
    WideFloat interpolated(WideFloat ramp) const {
        return WideFloat(1.0) / (ramp / request_.scale + (WideFloat(1.0) - ramp));
    }

    WideFloat rotations(WideFloat frequency) const {
        return WideFloat(request_.original_max_position) * frequency / wide::two_pi;
    }

    // share_of_scale_[k] is the share of log(scale) in the first k radix factors between the bounds, where factor j
    // has a share proportional to (j - d_l + 1)^power.
    void set_power(double power) {
        const int steps = std::max(bounds_.second - bounds_.first, 1);
        // Dividing j by the j of the largest term keeps all terms at most 1; clamping keeps exponent * log(j) finite.
        const double largest = power > 0.0 ? steps : 1.0;
        const double exponent = std::clamp(power, -1e300, 1e300);
        share_of_scale_.assign(1, 0.0);
        for (int j = 1; j <= steps; ++j) {
            share_of_scale_.push_back(share_of_scale_.back() + wide::pow(WideFloat(j) / largest, exponent));
        }
        const WideFloat total = share_of_scale_.back();
        for (WideFloat& share : share_of_scale_) share = share / total;
    }

    const TableRequest& request_;
    Bounds bounds_;
    const NativeFrequencies& theta_;
    WideFloat log_scale_;
    std::vector<WideFloat> share_of_scale_;
};

struct MethodRow {
    MethodTraits traits;
    WideFloat (CumulativeScale::*cumulative_scale)(int pair) const;
};

// Every method, in the order of Method. A new method is one row here and one function of CumulativeScale.
constexpr MethodRow rows[] = {
    {{.method = Method::rope, .name = "rope"}, &CumulativeScale::rope},
    {{.method = Method::pi, .name = "pi"}, &CumulativeScale::pi},
    {{.method = Method::ntk, .name = "ntk"}, &CumulativeScale::ntk},
    {{.method = Method::yarn, .name = "yarn", .has_temperature = true}, &CumulativeScale::index_ramp},
    {{.method = Method::yarn_ratio, .name = "yarn_ratio", .has_temperature = true}, &CumulativeScale::ratio_ramp},
    {{.method = Method::mrrope_uni, .name = "mrrope_uni", .has_temperature = true, .power = 0.0},
     &CumulativeScale::mrrope},
    {{.method = Method::mrrope_pro, .name = "mrrope_pro", .has_temperature = true, .power = 1.0},
     &CumulativeScale::mrrope},
    {{.method = Method::mrrope_pow, .name = "mrrope_pow", .has_temperature = true, .needs = Needs::power},
     &CumulativeScale::mrrope},
    {{.method = Method::radix, .name = "radix", .needs = Needs::radix_factors}, &CumulativeScale::radix},
    {{.method = Method::longrope, .name = "longrope", .needs = Needs::cumulative_scales}, &CumulativeScale::longrope},
    {{.method = Method::llama3, .name = "llama3", .needs = Needs::beta}, &CumulativeScale::ratio_ramp},
};

constexpr bool rows_are_in_order() {
    for (size_t i = 0; i < std::size(rows); ++i) {
        if (rows[i].traits.method != static_cast<Method>(i)) return false;
    }
    return std::size(rows) == static_cast<size_t>(Method::relative);
}
static_assert(rows_are_in_order(), "every method but relative needs one row, in the order of Method");

const MethodRow& row_of(Method method) {
    return rows[static_cast<size_t>(method)];
}

double default_attention_factor(const MethodTraits& method, double scale) {
    return method.has_temperature && scale > 1.0 ? 0.1 * std::log(scale) + 1.0 : 1.0;
}

std::string names_of_methods_with(std::initializer_list<Needs> needs) {
    std::string names;
    for (const auto& [traits, _] : rows) {
        if (std::ranges::find(needs, traits.needs) == needs.end()) continue;
        names += std::string(names.empty() ? "'" : " and '") + traits.name + "'";
    }
    return names;
}

void check_factors(const TableRequest& request) {
    const auto pairs = static_cast<size_t>(request.rotary_dim / 2);
    const auto& factors = request.factors;
    const MethodTraits& method = row_of(request.method).traits;
    if (method.needs == Needs::radix_factors) {
        require(factors.size() == pairs - 1, "factors must hold rotary_dim / 2 - 1 = ", pairs - 1,
                " radix factors for method '", method.name, "', got ", factors.size());
    } else if (method.needs == Needs::cumulative_scales) {
        require(factors.size() == pairs, "factors must hold rotary_dim / 2 = ", pairs,
                " cumulative scales for method '", method.name, "', got ", factors.size());
    } else {
        require(factors.empty(), "factors is for the methods ",
                names_of_methods_with({Needs::radix_factors, Needs::cumulative_scales}), " only, got ", factors.size(),
                " factors with method '", method.name, "'");
    }
    for (size_t i = 0; i < factors.size(); ++i) {
        require(std::isfinite(factors[i]) && factors[i] > 0.0, "factors must be positive finite numbers, got ",
                factors[i], " at index ", i);
    }
}

void check(const TableRequest& request) {
    require(request.method != Method::relative,
            "method must be one that builds a table, got 'relative': use relative_to on two tables");
    require(request.rotary_dim > 0 && request.rotary_dim % 2 == 0, "rotary_dim must be a positive even number, got ",
            request.rotary_dim);
    require_base(request.base);
    require_positive("original_max_position", request.original_max_position);
    require(std::isfinite(request.scale) && request.scale >= 1.0, "scale must be a finite number, 1 or more, got ",
            request.scale);
    require_positive("alpha", request.alpha);
    require_positive("beta", request.beta);
    require(request.alpha <= request.beta, "alpha must not be above beta, got alpha ", request.alpha, " and beta ",
            request.beta);
    if (request.bounds) require_ordered(*request.bounds);
    const MethodTraits& method = row_of(request.method).traits;
    if (method.needs == Needs::power) {
        require(request.power && std::isfinite(*request.power), "power must be a finite number for method '",
                method.name, "', got ", request.power ? std::to_string(*request.power) : "none");
    } else {
        require(!request.power, "power is for the method ", names_of_methods_with({Needs::power}), " only, got ",
                request.power.value_or(0.0), " with method '", method.name, "'");
    }
    if (request.attention_factor) require_attention_factor("attention_factor", *request.attention_factor);
    check_factors(request);
    const auto pairs = static_cast<size_t>(request.rotary_dim / 2);
    require(request.native_scale.empty() || request.native_scale.size() == pairs,
            "native_scale must hold rotary_dim / 2 = ", pairs, " cumulative scales or none, got ",
            request.native_scale.size());
    for (const double scale : request.native_scale) require_positive("native_scale", scale);
    require_positive("native_attention_factor", request.native_attention_factor);
}

}  // namespace

std::vector<MethodTraits> methods() {
    std::vector<MethodTraits> traits;
    for (const MethodRow& row : rows) traits.push_back(row.traits);
    return traits;
}

const char* method_name(Method method) {
    return method == Method::relative ? relative_name : row_of(method).traits.name;
}

Method method_from_name(std::string_view name) {
    if (name == relative_name) return Method::relative;
    std::string known;
    for (const auto& [traits, _] : rows) {
        if (name == traits.name) return traits.method;
        known += std::string(known.empty() ? "" : ", ") + traits.name;
    }
    fail("method must be one of ", known, ", got '", name, "'");
}

std::vector<double> FrequencyTable::radix_factors() const {
    std::vector<double> factors;
    for (size_t i = 1; i < cumulative_scale.size(); ++i) {
        factors.push_back(cumulative_scale[i] / cumulative_scale[i - 1]);
    }
    return factors;
}

FrequencyTable build_table(const TableRequest& request) {
    check(request);
    FrequencyTable table;
    table.method = request.method;
    table.rotary_dim = request.rotary_dim;
    table.base = request.base;
    table.original_max_position = request.original_max_position;
    table.scale = request.scale;
    const NativeFrequencies theta(request);
    table.bounds = bounds_of(request, theta);
    const auto& [method, cumulative_scale] = row_of(request.method);
    table.attention_factor = request.attention_factor.value_or(request.native_attention_factor *
                                                               default_attention_factor(method, request.scale));

    const CumulativeScale scales(request, *table.bounds, theta, method.power ? method.power : request.power);
    for (int i = 0; i < table.pairs(); ++i) {
        const WideFloat added = (scales.*cumulative_scale)(i);
        const WideFloat scale = request.native_scale.empty() ? added : added * request.native_scale[i];
        const WideFloat frequency = theta.plain(i) / scale;
        require(std::isfinite(frequency.hi) && frequency.hi > 0.0, "the frequency of pair ", i,
                " is not a positive finite number: ", frequency.hi, " (base ", request.base, ", cumulative scale ",
                scale.hi, ")");
        table.cumulative_scale.push_back(static_cast<double>(scale));
        table.inv_freq.push_back(static_cast<double>(frequency));
        table.turns.push_back(wide::phase_step(frequency));
    }
    return table;
}

void validate(const FrequencyTable& table) {
    require(table.rotary_dim > 0 && table.rotary_dim % 2 == 0, "rotary_dim must be a positive even number, got ",
            table.rotary_dim);
    const auto pairs = static_cast<size_t>(table.pairs());
    const bool is_relative = table.method == Method::relative;
    require(table.inv_freq.size() == pairs, "inv_freq must hold rotary_dim / 2 = ", pairs, " numbers, got ",
            table.inv_freq.size());
    require(table.turns.size() == pairs, "turns must hold rotary_dim / 2 = ", pairs, " numbers, got ",
            table.turns.size());
    require(table.cumulative_scale.size() == (is_relative ? 0 : pairs), "cumulative_scale must hold ",
            is_relative ? 0 : pairs, " numbers, got ", table.cumulative_scale.size());
    require_base(table.base);
    require_positive("original_max_position", table.original_max_position);
    require_attention_factor("attention_factor", table.attention_factor);
    require_positive("scale", table.scale);
    if (table.bounds) require_ordered(*table.bounds);
    for (const double scale : table.cumulative_scale) require_positive("cumulative_scale", scale);
    for (size_t i = 0; i < pairs; ++i) {
        const double frequency = table.inv_freq[i];
        require(std::isfinite(frequency), "inv_freq must be finite, got ", frequency, " at index ", i);
        // inv_freq (53 significant bits) and turns (64 bits after the point) are rounded independently.
        const double slack = std::ldexp(std::abs(frequency) + 1.0, -50) / (2.0 * std::numbers::pi);
        const auto difference = static_cast<int64_t>(table.turns[i] - wide::phase_step(frequency));
        require(std::abs(std::ldexp(static_cast<double>(difference), -64)) <= slack, "turns must be inv_freq / (2 pi) ",
                "in units of 2^-64, got ", table.turns[i], " for inv_freq ", frequency, " at index ", i);
        if (is_relative) continue;
        const double plain = std::pow(table.base, -2.0 * static_cast<double>(i) / table.rotary_dim);
        require(std::abs(frequency * table.cumulative_scale[i] - plain) <= 1e-12 * plain,
                "inv_freq must be base^(-2i / rotary_dim) / cumulative_scale, got ", frequency, " for base ",
                table.base, " and cumulative_scale ", table.cumulative_scale[i], " at index ", i);
    }
}

FrequencyTable relative(const FrequencyTable& to, const FrequencyTable& from) {
    require(to.rotary_dim == from.rotary_dim, "tables must have the same rotary_dim to be related, got ", to.rotary_dim,
            " and ", from.rotary_dim);
    FrequencyTable table;
    table.method = Method::relative;
    table.rotary_dim = to.rotary_dim;
    table.base = to.base;
    table.original_max_position = to.original_max_position;
    table.scale = to.scale / from.scale;
    table.attention_factor = to.attention_factor / from.attention_factor;
    require_positive("scale of one table relative to another", table.scale);
    require_attention_factor("attention_factor of one table relative to another", table.attention_factor);
    for (int i = 0; i < to.pairs(); ++i) {
        // The difference wraps: frequencies that differ by whole revolutions per position are equal.
        const uint64_t phase_step = to.turns[i] - from.turns[i];
        table.turns.push_back(phase_step);
        table.inv_freq.push_back(std::ldexp(static_cast<double>(static_cast<int64_t>(phase_step)), -64) * 2.0 *
                                 std::numbers::pi);
    }
    return table;
}

FrequencyTable inverse(const FrequencyTable& table) {
    const FrequencyTable identity = relative(table, table);
    return relative(identity, table);
}

std::vector<uint64_t> packed(const FrequencyTable& table) {
    std::vector<uint64_t> words = table.turns;
    words.push_back(std::bit_cast<uint64_t>(table.attention_factor));
    return words;
}

}  // namespace mrrope
