// The rules as they are told: the hyper-parameters of one parameter group at
// one step count, and the scalars that the inner loops read.
//
// The arithmetic is stated in src/longshore/kernels/reference.py, in plain
// torch; every kernel here gives the same bits as that oracle.
#pragma once

#include <cstdint>

#include "buffers.h"
#include "kernels.h"

namespace longshore {

// `step` is the count after this step: 1 the first time.
struct AdamRule {
    double lr, beta1, beta2, eps, weight_decay;
    double step;
    bool decoupled;  // AdamW's decay; otherwise Adam's L2 term in the gradient
    bool maximize;
    bool bias_correction = true;
};

struct LionRule {
    double lr, beta1, beta2, weight_decay;
    bool maximize;
};

struct AdagradRule {
    double lr, lr_decay, eps, weight_decay;
    double step;
    bool maximize;
};

struct SgdRule {
    double lr, momentum, dampening, weight_decay;
    bool nesterov;
    bool first;  // no momentum buffer yet: it becomes the gradient
    bool maximize;
};

AdamScalars scalars_of(const AdamRule& rule, const Scale& scale);
LionScalars scalars_of(const LionRule& rule, const Scale& scale);
AdagradScalars scalars_of(const AdagradRule& rule, const Scale& scale);
SgdScalars scalars_of(const SgdRule& rule, const Scale& scale);

// Throws std::invalid_argument for a step count below 1, or a page whose number
// of arrays (master and states) is not the rule's.
void check_rule(const AdamRule& rule, std::int64_t page_arrays);
void check_rule(const LionRule& rule, std::int64_t page_arrays);
void check_rule(const AdagradRule& rule, std::int64_t page_arrays);
void check_rule(const SgdRule& rule, std::int64_t page_arrays);

}  // namespace longshore
