#pragma once

#include "device_properties.h"

namespace mrrope::testing {

inline constexpr Device h200{.sms = 132, .pdl = true, .wgmma = true};
inline constexpr Device a100{.sms = 108};

}  // namespace mrrope::testing
