// Which build of the kernels runs on this CPU, chosen at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace longshore {

enum class InstructionSet : std::int32_t { baseline = 0, avx2 = 1, avx512 = 2 };

const KernelTable& kernels_for(InstructionSet isa);

// What this CPU and this build can run, the best last.
std::vector<InstructionSet> supported_instruction_sets();
InstructionSet best_instruction_set();
std::string name_of(InstructionSet isa);

}  // namespace longshore
