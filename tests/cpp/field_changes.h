#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

// How a call's arguments are changed, field by field. Changes of a nested struct are written once, and used wherever
// the struct is a field.

namespace mrrope::testing {

enum class Effect { changes_the_result, none };

template <class Args>
struct Change {
    std::vector<std::string> fields;  // all that `apply` changes
    Effect effect;
    std::function<void(Args&)> apply;
};

inline bool is_in(std::string_view field, std::string_view struct_or_field) {
    return field.starts_with(struct_or_field) &&
           (field.size() == struct_or_field.size() || field[struct_or_field.size()] == '.');
}

template <class Args>
class FieldChanges {
public:
    struct Kept {
        std::string field;  // or a struct of fields
        std::string why;
    };

    const std::vector<Change<Args>>& changes() const { return changes_; }
    const std::vector<Kept>& kept() const { return kept_; }

    FieldChanges& add(const std::string& field, std::function<void(Args&)> apply) {
        return add_together({field}, std::move(apply));
    }

    // For fields of which none may change alone.
    FieldChanges& add_together(std::vector<std::string> fields, std::function<void(Args&)> apply,
                               Effect effect = Effect::changes_the_result) {
        changes_.push_back({std::move(fields), effect, std::move(apply)});
        return *this;
    }

    FieldChanges& add_unused(const std::string& field, std::function<void(Args&)> apply) {
        return add_together({field}, std::move(apply), Effect::none);
    }

    template <class Struct, class Part>
    FieldChanges& add_struct(const std::string& name, Part Struct::* part, const FieldChanges<Part>& of_part) {
        const auto path = [&](const std::string& field) { return name + "." + field; };
        for (const Change<Part>& change : of_part.changes()) {
            std::vector<std::string> fields;
            for (const std::string& field : change.fields) fields.push_back(path(field));
            add_together(fields, [part, apply = change.apply](Args& args) { apply(args.*part); }, change.effect);
        }
        for (const auto& [field, why] : of_part.kept()) kept_.push_back({path(field), why});
        return *this;
    }

    template <class Base>
    FieldChanges& add_base(const FieldChanges<Base>& of_base) {
        for (const Change<Base>& change : of_base.changes()) {
            add_together(change.fields, [apply = change.apply](Args& args) { apply(args); }, change.effect);
        }
        for (const auto& [field, why] : of_base.kept()) kept_.push_back({field, why});
        return *this;
    }

    // The field, or all fields of the struct, must not change the result.
    FieldChanges& unused(std::string_view struct_or_field) {
        for (Change<Args>& change : changes_) {
            if (is_in(change.fields.front(), struct_or_field)) change.effect = Effect::none;
        }
        return *this;
    }

    // The field, or all fields of the struct, may not be changed, or not alone.
    FieldChanges& keep(const std::string& struct_or_field, const std::string& why) {
        drop(struct_or_field);
        kept_.push_back({struct_or_field, why});
        return *this;
    }

    FieldChanges& drop(std::string_view struct_or_field) {
        std::erase_if(changes_, [&](const Change<Args>& change) {
            for (const std::string& field : change.fields) {
                if (is_in(field, struct_or_field)) return true;
            }
            return false;
        });
        return *this;
    }

private:
    std::vector<Change<Args>> changes_;
    std::vector<Kept> kept_;
};

// By whole vectors of every dtype, so that heads stay aligned. Null pointers stay null.
template <class T>
void advance_by_vectors(T*& pointer) {
    using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    if (pointer != nullptr) pointer = reinterpret_cast<T*>(reinterpret_cast<Byte*>(pointer) + 64);
}

template <class T>
void advance(T*& pointer) {
    if (pointer != nullptr) ++pointer;
}

}  // namespace mrrope::testing
