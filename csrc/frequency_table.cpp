#include "mrrope/frequency_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <sstream>
#include <stdexcept>

#include "wide_float.h"

namespace mrrope {
namespace {

constexpr std::array method_names{
    std::pair{Method::rope, "rope"},
    std::pair{Method::pi, "pi"},
    std::pair{Method::ntk, "ntk"},
    std::pair{Method::yarn, "yarn"},
    std::pair{Method::yarn_ratio, "yarn_ratio"},
    std::pair{Method::mrrope_uni, "mrrope_uni"},
    std::pair{Method::mrrope_pro, "mrrope_pro"},
    std::pair{Method::mrrope_pow, "mrrope_pow"},
    std::pair{Method::radix, "radix"},
    std::pair{Method::longrope, "longrope"},
    std::pair{Method::llama3, "llama3"},
    std::pair{Method::relative, "relative"},
};

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
    constexpr int most = 1 << 16;  // far past any head; every step between them is computed
    require(0 <= low && low <= high && high <= most, "bounds must be (d_l, d_h) with 0 <= d_l <= d_h <= ", most,
            ", got (", low, ", ", high, ")");
}

bool has_temperature(Method method) {
    switch (method) {
        case Method::yarn:
        case Method::yarn_ratio:
        case Method::mrrope_uni:
        case Method::mrrope_pro:
        case Method::mrrope_pow: return true;
        default: return false;
    }
}

double default_attention_factor(Method method, double scale) {
    return has_temperature(method) && scale > 1.0 ? 0.1 * std::log(scale) + 1.0 : 1.0;
}

void check_factors(const TableRequest& request) {
    const auto pairs = static_cast<size_t>(request.rotary_dim / 2);
    const auto& factors = request.factors;
    if (request.method == Method::radix) {
        require(factors.size() == pairs - 1, "factors must hold rotary_dim / 2 - 1 = ", pairs - 1,
                " radix factors for method 'radix', got ", factors.size());
    } else if (request.method == Method::longrope) {
        require(factors.size() == pairs, "factors must hold rotary_dim / 2 = ", pairs,
                " cumulative scales for method 'longrope', got ", factors.size());
    } else {
        require(factors.empty(), "factors is for the methods 'radix' and 'longrope' only, got ", factors.size(),
                " factors with method '", method_name(request.method), "'");
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
    if (request.method == Method::mrrope_pow) {
        require(request.power && std::isfinite(*request.power),
                "power must be a finite number for method 'mrrope_pow', got ",
                request.power ? std::to_string(*request.power) : "none");
    } else {
        require(!request.power, "power is for the method 'mrrope_pow' only, got ", request.power.value_or(0.0),
                " with method '", method_name(request.method), "'");
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

// The frequencies that a method extends. Pairs are counted from the fastest on, as the methods' formulas do, whatever
// their order in the head; past the last pair the spacing of plain RoPE goes on.
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

    // How many pairs are faster than pair i.
    int rank(int i) const {
        const auto first = std::ranges::lower_bound(fastest_first_, theta_[i], [](auto a, auto b) { return b < a; });
        return static_cast<int>(first - fastest_first_.begin());
    }

    WideFloat of_rank(int rank) const {
        const int last = static_cast<int>(fastest_first_.size()) - 1;
        if (rank <= last) return fastest_first_[rank];
        return fastest_first_[last] * wide::exp(log_spacing_ * static_cast<double>(last - rank));
    }

    // The rank, as a real number, of a pair of this frequency: logarithms between two pairs are interpolated.
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

// The pair, as a real number, that turns `rotations` times over the native length.
double pair_with_rotations(const TableRequest& request, const NativeFrequencies& theta, double rotations) {
    const double wavelength = request.original_max_position / rotations;
    if (!request.native_scale.empty()) return theta.rank_of(2.0 * std::numbers::pi / wavelength);
    return request.rotary_dim * std::log(wavelength / (2.0 * std::numbers::pi)) / (2.0 * std::log(request.base));
}

Bounds bounds_of(const TableRequest& request, const NativeFrequencies& theta) {
    if (request.bounds) return *request.bounds;
    // YaRN clamps with rotary_dim, not with the number of pairs, so the upper bound may lie beyond the last pair.
    const double last = request.rotary_dim - 1;
    const double fast = std::floor(pair_with_rotations(request, theta, request.beta));
    const double slow = std::ceil(pair_with_rotations(request, theta, request.alpha));
    const int low = static_cast<int>(std::clamp(fast, 0.0, last));
    return {low, std::max(low, static_cast<int>(std::clamp(slow, 0.0, last)))};
}

// Everything a method needs to know of the pair it slows down.
class Slowdown {
public:
    Slowdown(const TableRequest& request, Bounds bounds, const NativeFrequencies& theta)
        : request_(request), bounds_(bounds), theta_(theta), log_scale_(wide::log(request.scale)) {
        if (request.method == Method::mrrope_uni) set_power(0.0);
        if (request.method == Method::mrrope_pro) set_power(1.0);
        if (request.method == Method::mrrope_pow) set_power(*request.power);
    }

    // By how much pair i is slowed.
    WideFloat operator()(int i) const {
        const int rank = theta_.rank(i);
        switch (request_.method) {
            case Method::rope: return 1.0;
            case Method::pi: return request_.scale;
            case Method::ntk:
                return rank == 0 ? WideFloat(1.0) : power_of_scale(WideFloat(2.0 * rank) / (request_.rotary_dim - 2.0));
            case Method::yarn: return mixed(index_ramp(rank));
            case Method::yarn_ratio:
            case Method::llama3: return mixed(ratio_ramp(theta_[i]));
            case Method::mrrope_uni:
            case Method::mrrope_pro:
            case Method::mrrope_pow: return power_of_scale(share_of_scale_[steps_above_low(rank)]);
            case Method::radix: return product_of_factors(rank);
            case Method::longrope: return request_.factors[i];
            case Method::relative: break;
        }
        fail("method ", method_name(request_.method), " has no cumulative scale");
    }

private:
    WideFloat power_of_scale(WideFloat exponent) const { return wide::exp(exponent * log_scale_); }

    // The scale where the ramp is 1, none where it is 0; what is mixed are frequencies, not wavelengths.
    WideFloat mixed(WideFloat ramp) const { return WideFloat(1.0) / (ramp / request_.scale + (WideFloat(1.0) - ramp)); }

    WideFloat index_ramp(int rank) const {
        const auto [low, high] = bounds_;
        if (rank <= low) return 0.0;
        if (rank >= high) return 1.0;
        return WideFloat(rank - low) / static_cast<double>(high - low);
    }

    WideFloat rotations(WideFloat frequency) const {
        return WideFloat(request_.original_max_position) * frequency / wide::two_pi;
    }

    WideFloat ratio_ramp(WideFloat frequency) const {
        const auto at_bound = [&](int bound) { return rotations(theta_.of_rank(bound)); };
        const WideFloat slow = request_.bounds ? at_bound(bounds_.second) : WideFloat(request_.alpha);
        const WideFloat fast = request_.bounds ? at_bound(bounds_.first) : WideFloat(request_.beta);
        const WideFloat turned = rotations(frequency);
        if (!(turned < fast)) return 0.0;
        if (!(slow < turned)) return 1.0;
        return (fast - turned) / (fast - slow);
    }

    int steps_above_low(int rank) const {
        const auto [low, high] = bounds_;
        // With coinciding bounds the whole scale comes in one step, right after them: the limit of YaRN's ramp.
        return std::clamp(rank - low, 0, std::max(high - low, 1));
    }

    // share_of_scale_[k]: the part of log(scale) that the first k of the radix factors between the bounds carry, when
    // factor j carries a part proportional to (j - d_l + 1)^power.
    void set_power(double power) {
        const int steps = std::max(bounds_.second - bounds_.first, 1);
        // Divided by the largest, so that no power overflows; nor does its logarithm with such an exponent.
        const double largest = power > 0.0 ? steps : 1.0;
        const double exponent = std::clamp(power, -1e300, 1e300);
        share_of_scale_.assign(1, 0.0);
        for (int j = 1; j <= steps; ++j) {
            share_of_scale_.push_back(share_of_scale_.back() + wide::pow(WideFloat(j) / largest, exponent));
        }
        const WideFloat total = share_of_scale_.back();
        for (WideFloat& share : share_of_scale_) share = share / total;
    }

    WideFloat product_of_factors(int rank) const {
        WideFloat product = 1.0;
        for (int j = 0; j < rank; ++j) product = product * request_.factors[j];
        return product;
    }

    const TableRequest& request_;
    Bounds bounds_;
    const NativeFrequencies& theta_;
    WideFloat log_scale_;
    std::vector<WideFloat> share_of_scale_;
};

}  // namespace

const char* method_name(Method method) {
    for (const auto& [value, name] : method_names) {
        if (value == method) return name;
    }
    return "unknown";
}

Method method_from_name(std::string_view name) {
    std::string known;
    for (const auto& [value, candidate] : method_names) {
        if (name == candidate) return value;
        if (value != Method::relative) known += std::string(known.empty() ? "" : ", ") + candidate;
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
    table.attention_factor = request.attention_factor.value_or(request.native_attention_factor *
                                                               default_attention_factor(request.method, request.scale));

    const Slowdown slowdown(request, *table.bounds, theta);
    for (int i = 0; i < table.pairs(); ++i) {
        const WideFloat slowed = slowdown(i);
        const WideFloat scale = request.native_scale.empty() ? slowed : slowed * request.native_scale[i];
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
        // Both were rounded on their own from the same real number: a double has 53 bits, turns have 64 after the
        // point.
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
        // Wraps, as angles do: frequencies that differ by whole turns a position are the same.
        const uint64_t turns = to.turns[i] - from.turns[i];
        table.turns.push_back(turns);
        table.inv_freq.push_back(std::ldexp(static_cast<double>(static_cast<int64_t>(turns)), -64) * 2.0 *
                                 std::numbers::pi);
    }
    return table;
}

FrequencyTable inverse(const FrequencyTable& table) {
    FrequencyTable nothing = relative(table, table);
    return relative(nothing, table);
}

std::vector<uint64_t> packed(const FrequencyTable& table) {
    std::vector<uint64_t> words = table.turns;
    words.push_back(std::bit_cast<uint64_t>(table.attention_factor));
    return words;
}

}  // namespace mrrope
