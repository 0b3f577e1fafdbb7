#pragma once

#include "cache_contract.h"
#include "mla_contract.h"
#include "norm_contract.h"
#include "rescale_cache_contract.h"
#include "rotary_contract.h"

namespace mrrope::testing {

// The default, of a dtype with which rotary_cos_sin has a choice of columns.
inline constexpr ContractOptions every_field_matters{.dtype = DType::bfloat16};

// Calls use(contract) for the contract of every op with these options.
template <class Use>
void for_each_contract(const ContractOptions& options, const Use& use) {
    use(rotary_contract(options));
    if (options.dtype != DType::float32) use(rotary_cos_sin_contract(options));
    use(learnable_rotary_contract(options));
    use(learnable_rotary_gradient_contract(options));
    use(qk_norm_rotary_contract(options));
    use(qk_norm_rotary_gradient_contract(options));
    use(mla_rotary_contract(options));
    use(mla_rotary_gradient_contract(options));
    use(rescale_cache_contract(options));
    use(rotary_and_cache_contract(options));
    use(qk_norm_rotary_and_cache_contract(options));
    if (options.rounds_to_float8) use(qk_norm_rotary_and_cache_contract_with_computed_scales(options));
    use(mla_rotary_and_cache_contract(options));
}

}  // namespace mrrope::testing
