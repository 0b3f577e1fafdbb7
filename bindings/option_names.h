#pragma once

#include <string_view>

#include "mrrope/torch_ops.h"
#include "tensor_views.h"

// The names that the ops' schemas have for options of the C++ interface.

namespace mrrope {

constexpr std::string_view name_of(HeadsLayout layout) {
    switch (layout) {
        case HeadsLayout::bhsd: return "bhsd";
        case HeadsLayout::bshd: return "bshd";
        case HeadsLayout::thd: return "thd";
    }
    return "";  // which the op refuses
}

inline HeadsLayout heads_layout_named(std::string_view name) {
    layout_named(name);  // refuses other names
    if (name == name_of(HeadsLayout::bhsd)) return HeadsLayout::bhsd;
    return name == name_of(HeadsLayout::bshd) ? HeadsLayout::bshd : HeadsLayout::thd;
}

constexpr std::string_view name_of(CacheLayout layout) {
    switch (layout) {
        case CacheLayout::nhd: return "nhd";
        case CacheLayout::hnd: return "hnd";
    }
    return "";
}

constexpr std::string_view name_of(Pairing pairing) {
    switch (pairing) {
        case Pairing::halves: return "halves";
        case Pairing::interleaved: return "interleaved";
    }
    return "";
}

constexpr std::string_view name_of(NormOver over) {
    switch (over) {
        case NormOver::head: return "head";
        case NormOver::all_heads: return "all_heads";
    }
    return "";
}

}  // namespace mrrope
