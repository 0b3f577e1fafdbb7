#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "args_fields.h"
#include "contract_memory.h"
#include "elements.h"
#include "field_changes.h"
#include "float8_elements.h"

// The contract of an op's arguments: a call, and how each field of its arguments is changed. A backend honours it where
// every change has the effect that is listed, and two backends agree where their results do.

namespace mrrope::testing {

template <class Args>
struct Contract {
    std::string name;
    const Args call;
    FieldChanges<Args> fields;
    std::shared_ptr<ContractMemory> memory;
};

// --- results

inline const RotaryArgs& rotary_of(const RotaryArgs& args) {
    return args;
}
template <class Args>
const auto& rotary_of(const Args& args) {
    if constexpr (requires { args.call; }) {
        return rotary_of(args.call);
    } else if constexpr (requires { args.rotary; }) {
        return args.rotary;
    } else {
        return args;  // RescaleCacheArgs
    }
}

// What a region's numbers are stored as.
struct NumberType {
    DType dtype = DType::float32;
    StoredAs stored_as = StoredAs::heads_dtype;

    int size() const { return size_of(stored_as, dtype); }
    double at(const std::byte* number) const {
        return is_float8(stored_as) ? value_of_float8(static_cast<uint8_t>(*number), stored_as)
                                    : element_at(dtype, number);
    }
    // Of two results that are each rounded once: one ulp.
    double rounding(double value) const {
        if (is_float8(stored_as)) return 2 * static_cast<double>(half_ulp_of_float8(value, stored_as));
        const Format format = format_of(dtype);
        return std::ldexp(std::abs(value), 1 - format.significant_bits) +
               std::ldexp(1.0, format.smallest_exponent - format.significant_bits);
    }
};

template <class Args>
NumberType number_type(Holds holds, const Args& args) {
    NumberType type{.dtype = rotary_of(args).dtype};
    if constexpr (requires { args.q_stored_as; }) {
        if (holds == Holds::q) type.stored_as = args.q_stored_as;
    }
    if constexpr (requires { args.cached_as; }) {
        if (holds == Holds::cache) type.stored_as = args.cached_as;
    }
    if constexpr (requires { args.table_dtype; }) {
        if (holds == Holds::table_numbers) type.dtype = args.table_dtype;
    }
    if constexpr (requires { args.call.table_dtype; }) {
        if (holds == Holds::table_numbers) type.dtype = args.call.table_dtype;
    }
    if (holds == Holds::scales) type.dtype = DType::float32;
    return type;
}

// Where two results of a region are further apart than rounding explains, or an empty string.
template <class Args>
std::string difference(const Region& region, const Args& args, std::span<const std::byte> one,
                       std::span<const std::byte> other) {
    const std::byte* a = one.data() + region.first_byte;
    const std::byte* b = other.data() + region.first_byte;
    const auto differs = [&](size_t at, const std::string& how) {
        return region.name + "[" + std::to_string(at) + "]" + how;
    };
    if (std::memcmp(a, b, region.size) == 0) return "";
    if (region.holds == Holds::input || region.holds == Holds::scratch) {
        return differs(std::mismatch(a, a + region.size, b).first - a, ", in bytes");
    }
    if (region.holds == Holds::words) {
        // phase_step_of rounds to nearest: FMA contraction may change the last bit.
        for (size_t i = 0; i < region.size / 8; ++i) {
            const auto apart = static_cast<int64_t>(read_as<uint64_t>(a + 8 * i) - read_as<uint64_t>(b + 8 * i));
            if (std::abs(apart) > 1) return differs(i, ", words");
        }
        return "";
    }
    const NumberType type = number_type(region.holds, args);
    const size_t count = region.size / type.size();
    double largest = 0;
    for (size_t i = 0; i < count; ++i) {
        for (const std::byte* result : {a, b}) {
            const double magnitude = std::abs(type.at(result + i * type.size()));
            if (std::isfinite(magnitude)) largest = std::max(largest, magnitude);
        }
    }
    // Before rounding, each backend is off by up to norm_error, 21 units, of the norm of a pair, which is up to sqrt(2)
    // times the largest component. Sums have up to 64 terms: the heads of all tokens.
    const bool is_sum = region.holds == Holds::head_sums || region.holds == Holds::table_numbers;
    const double unit = rotary_of(args).dtype == DType::float64 ? 0x1p-53 : 0x1p-24;
    const double error = (is_sum ? 64 : 1) * 64 * unit * largest;
    for (size_t i = 0; i < count; ++i) {
        const size_t byte = i * type.size();
        if (std::memcmp(a + byte, b + byte, type.size()) == 0) continue;
        const double x = type.at(a + byte);
        const double y = type.at(b + byte);
        const double slack = type.rounding(std::max(std::abs(x), std::abs(y))) + error;
        if (!(std::abs(x - y) <= slack)) return differs(i, ": " + std::to_string(x) + " and " + std::to_string(y));
    }
    return "";
}

// The bytes after a call. `run` takes arguments in `memory` and changes its bytes.
template <class Args, class Run>
std::vector<std::byte> result_of(ContractMemory& memory, const Args& args, const Run& run) {
    const std::span<std::byte> bytes = memory.bytes();
    const std::vector<std::byte> before(bytes.begin(), bytes.end());
    run(args, memory);
    std::vector<std::byte> after(bytes.begin(), bytes.end());
    std::vector<std::byte> expected = before;
    for (const Region& region : memory.regions()) {
        if (region.holds == Holds::input) continue;
        std::copy_n(after.begin() + region.first_byte, region.size, expected.begin() + region.first_byte);
    }
    EXPECT_TRUE(after == expected) << "byte "
                                   << std::mismatch(after.begin(), after.end(), expected.begin()).first - after.begin()
                                   << ", which is no output, was written";
    std::copy(before.begin(), before.end(), bytes.begin());
    return after;
}

template <class Args>
std::string first_difference(const Contract<Args>& contract, const Args& args, const std::vector<std::byte>& one,
                             const std::vector<std::byte>& other, bool with_scratch) {
    for (const Region& region : contract.memory->regions()) {
        if (region.holds == Holds::scratch && !with_scratch) continue;
        const std::string found = difference(region, args, one, other);
        if (!found.empty()) return found;
    }
    return "";
}

template <class Args>
std::string name_of(const Change<Args>& change) {
    std::string names;
    for (const std::string& field : change.fields) names += (names.empty() ? "" : ", ") + field;
    return names;
}

template <class Args>
Args changed(const Contract<Args>& contract, const Change<Args>& change) {
    Args args = contract.call;
    change.apply(args);
    return args;
}

// --- what is expected

// The fields of which two calls' values differ.
template <class Args>
std::set<std::string> changed_fields(Args before, Args after) {
    std::vector<std::vector<std::byte>> values;
    const auto bytes_of = [](const auto& value) {
        const auto* first = reinterpret_cast<const std::byte*>(&value);
        return std::vector<std::byte>(first, first + sizeof value);
    };
    for_each_leaf(before, [&](const std::string&, auto& value) { values.push_back(bytes_of(value)); });
    std::set<std::string> fields;
    size_t at = 0;
    for_each_leaf(after, [&](const std::string& name, auto& value) {
        if (bytes_of(value) != values[at++]) fields.insert(name);
    });
    return fields;
}

// Expects a change, or a reason for none, of every field, and that changes change what they name.
template <class Args>
void expect_every_field_listed(const Contract<Args>& contract) {
    SCOPED_TRACE(contract.name);
    std::set<std::string> listed;
    for (const Change<Args>& change : contract.fields.changes()) {
        const std::set<std::string> named(change.fields.begin(), change.fields.end());
        EXPECT_EQ(changed_fields(contract.call, changed(contract, change)), named);
        listed.insert(named.begin(), named.end());
    }
    Args args = contract.call;
    std::set<std::string> unlisted, kept;
    for_each_leaf(args, [&](const std::string& name, auto&) {
        for (const auto& [field, why] : contract.fields.kept()) {
            if (is_in(name, field)) kept.insert(name);
        }
        if (!listed.contains(name) && !kept.contains(name)) unlisted.insert(name);
    });
    EXPECT_EQ(unlisted, std::set<std::string>{});
    for (const auto& [field, why] : contract.fields.kept()) {
        EXPECT_TRUE(std::ranges::any_of(kept, [&](const std::string& name) { return is_in(name, field); }))
            << "there is no field " << field;
    }
}

// Expects that a backend heeds every field that it should, and no other.
template <class Args, class Run>
void expect_effects(const Contract<Args>& contract, const Run& run) {
    SCOPED_TRACE(contract.name);
    const std::vector<std::byte> result = result_of(*contract.memory, contract.call, run);
    for (const Change<Args>& change : contract.fields.changes()) {
        SCOPED_TRACE(name_of(change));
        const Args args = changed(contract, change);
        const std::vector<std::byte> of_changed = result_of(*contract.memory, args, run);
        const std::string found = first_difference(contract, args, result, of_changed, true);
        EXPECT_EQ(found.empty(), change.effect == Effect::none) << (found.empty() ? "the field is ignored" : found);
    }
}

// Expects that two backends agree on the call, and on every change of it.
template <class Args, class Run, class OtherRun>
void expect_agreement(const Contract<Args>& contract, const Run& run, const OtherRun& other_run) {
    SCOPED_TRACE(contract.name);
    const auto expect_same = [&](const Args& args) {
        const std::vector<std::byte> one = result_of(*contract.memory, args, run);
        const std::vector<std::byte> other = result_of(*contract.memory, args, other_run);
        EXPECT_EQ(first_difference(contract, args, one, other, false), "");
    };
    expect_same(contract.call);
    for (const Change<Args>& change : contract.fields.changes()) {
        SCOPED_TRACE(name_of(change));
        expect_same(changed(contract, change));
    }
}

}  // namespace mrrope::testing
