#include "dispatch.h"

#include <stdexcept>

namespace longshore {

std::vector<InstructionSet> supported_instruction_sets() {
    std::vector<InstructionSet> found{InstructionSet::baseline};
#if defined(LONGSHORE_X86_64)
    __builtin_cpu_init();
    // The compiler's checks include that the operating system saves the
    // registers (XCR0), which CPUID alone does not say.
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        found.push_back(InstructionSet::avx2);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            found.push_back(InstructionSet::avx512);
        }
    }
#endif
    return found;
}

InstructionSet best_instruction_set() {
    static const InstructionSet best = supported_instruction_sets().back();
    return best;
}

std::string name_of(InstructionSet isa) {
    switch (isa) {
        case InstructionSet::baseline: return "baseline";
        case InstructionSet::avx2: return "avx2";
        case InstructionSet::avx512: return "avx512";
    }
    throw std::invalid_argument("unknown instruction set");
}

const KernelTable& kernels_for(InstructionSet isa) {
    if (isa > best_instruction_set()) {
        throw std::invalid_argument("this CPU does not run " + name_of(isa) + " code; the best that it runs is " +
                                    name_of(best_instruction_set()));
    }
    switch (isa) {
        case InstructionSet::baseline: return kBaselineKernels;
#if defined(LONGSHORE_X86_64)
        case InstructionSet::avx2: return kAvx2Kernels;
        case InstructionSet::avx512: return kAvx512Kernels;
#else
        default: break;
#endif
    }
    throw std::invalid_argument("unknown instruction set");
}

}  // namespace longshore
