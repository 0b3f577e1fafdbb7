#include "mrrope/instruction_set.h"

#include "instruction_sets.h"

namespace mrrope {
namespace baseline {
constexpr char name[] = "baseline";
}
namespace x86_64_v3 {
constexpr char name[] = "x86_64_v3";
}
namespace x86_64_v4 {
constexpr char name[] = "x86_64_v4";
}

const char* cpu_instruction_set() {
#if defined(MRROPE_X86_64_LEVELS)
    return best_for_this_processor<const char>(x86_64_v4::name, x86_64_v3::name, baseline::name);
#else
    return baseline::name;
#endif
}

}  // namespace mrrope
