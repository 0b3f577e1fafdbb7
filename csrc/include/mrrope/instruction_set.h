#pragma once

namespace mrrope {

// Name of the instruction set that the CPU backend runs on this processor: x86_64_v4, x86_64_v3 or baseline.
const char* cpu_instruction_set();

}  // namespace mrrope
