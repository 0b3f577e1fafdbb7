#include "norm_args.h"

#include <c10/util/Exception.h>

#include <cmath>

namespace mrrope {

NormOver over_named(std::string_view name) {
    if (name == "head") return NormOver::head;
    if (name == "all_heads") return NormOver::all_heads;
    TORCH_CHECK_VALUE(false, "over must be one of head, all_heads, got '", name, "'");
}

void check_norm_kinds(double eps, double weight_offset, std::string_view over) {
    over_named(over);
    TORCH_CHECK_VALUE(std::isfinite(eps) && eps >= 0.0, "eps must be finite and not negative, got ", eps);
    TORCH_CHECK_VALUE(std::isfinite(weight_offset), "weight_offset must be finite, got ", weight_offset);
}

void check_weight_kind(NamedTensor weight, NamedTensor reference) {
    TORCH_CHECK_VALUE(weight.tensor.dim() == 1, weight.name, " must have one dimension, got ", weight.tensor.dim());
    check_like(weight, reference);
}

void check_weight_size(NamedTensor weight, NamedTensor heads, const Layout& layout, NormOver over) {
    const bool per_head = over == NormOver::head;
    const int64_t expected = heads.tensor.size(-1) * (per_head ? 1 : heads.tensor.size(layout.head));
    TORCH_CHECK_VALUE(weight.tensor.size(0) == expected, weight.name, " must be [", expected, "], ",
                      per_head ? "head_dim" : "heads * head_dim", " for ", heads.name, " of ", heads.tensor.sizes(),
                      ", got ", weight.tensor.sizes());
}

}  // namespace mrrope
