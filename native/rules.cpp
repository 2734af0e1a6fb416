#include "rules.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace longshore {

namespace {

void set_scale(float (&target)[2], const Scale& scale, bool maximize) {
    target[0] = static_cast<float>(maximize ? -scale.first : scale.first);
    target[1] = static_cast<float>(scale.second);
}

void check_step(double step) {
    if (!(step >= 1.0)) throw std::invalid_argument("a step count below 1");
}

void check_arrays(std::int64_t found, std::int64_t least, std::int64_t most, const char* rule) {
    if (found >= least && found <= most) return;
    throw std::invalid_argument("a page of " + std::to_string(found) + " arrays, and " + rule + " has " +
                                std::to_string(least) + (least == most ? "" : " or " + std::to_string(most)));
}

}  // namespace

// Not inlined: the compiler knows nothing of float modes, and would be free to
// move these roundings out of the scope of the caller's StandardFloatMode.
[[gnu::noinline]] AdamScalars scalars_of(const AdamRule& rule, const Scale& scale) {
    const double bias_correction1 = rule.bias_correction ? 1.0 - std::pow(rule.beta1, rule.step) : 1.0;
    const double bias_correction2 = rule.bias_correction ? 1.0 - std::pow(rule.beta2, rule.step) : 1.0;
    const float lerp_weight = static_cast<float>(1.0 - rule.beta1);
    AdamScalars s{};
    s.decay = rule.decoupled ? static_cast<float>(1.0 - rule.lr * rule.weight_decay) : 1.0f;
    s.l2 = rule.decoupled ? 0.0f : static_cast<float>(rule.weight_decay);
    // torch's lerp counts from the nearer end, so that a weight of 1 gives the
    // gradient exactly.
    s.lerp_from_gradient = !(lerp_weight < 0.5f);
    s.lerp_weight = s.lerp_from_gradient ? lerp_weight - 1.0f : lerp_weight;
    s.beta2 = static_cast<float>(rule.beta2);
    s.one_minus_beta2 = static_cast<float>(1.0 - rule.beta2);
    s.bias_correction2_sqrt = static_cast<float>(std::sqrt(bias_correction2));
    s.eps = static_cast<float>(rule.eps);
    s.negative_step_size = static_cast<float>(-(rule.lr / bias_correction1));
    set_scale(s.scale, scale, rule.maximize);
    return s;
}

[[gnu::noinline]] LionScalars scalars_of(const LionRule& rule, const Scale& scale) {
    LionScalars s{};
    s.decay = static_cast<float>(1.0 - rule.lr * rule.weight_decay);
    s.beta1 = static_cast<float>(rule.beta1);
    s.one_minus_beta1 = static_cast<float>(1.0 - rule.beta1);
    s.beta2 = static_cast<float>(rule.beta2);
    s.one_minus_beta2 = static_cast<float>(1.0 - rule.beta2);
    s.negative_lr = static_cast<float>(-rule.lr);
    set_scale(s.scale, scale, rule.maximize);
    return s;
}

[[gnu::noinline]] AdagradScalars scalars_of(const AdagradRule& rule, const Scale& scale) {
    AdagradScalars s{};
    s.l2 = static_cast<float>(rule.weight_decay);
    s.eps = static_cast<float>(rule.eps);
    s.negative_step_size = static_cast<float>(-(rule.lr / (1.0 + (rule.step - 1.0) * rule.lr_decay)));
    set_scale(s.scale, scale, rule.maximize);
    return s;
}

[[gnu::noinline]] SgdScalars scalars_of(const SgdRule& rule, const Scale& scale) {
    SgdScalars s{};
    s.l2 = static_cast<float>(rule.weight_decay);
    s.momentum = static_cast<float>(rule.momentum);
    s.one_minus_dampening = static_cast<float>(1.0 - rule.dampening);
    s.negative_lr = static_cast<float>(-rule.lr);
    s.keep_buffer = rule.momentum == 0.0;
    s.first = rule.first;
    s.nesterov = rule.nesterov;
    set_scale(s.scale, scale, rule.maximize);
    return s;
}

void check_rule(const AdamRule& rule, std::int64_t page_arrays) {
    check_arrays(page_arrays, 3, 3, "Adam");
    check_step(rule.step);
}

void check_rule(const LionRule&, std::int64_t page_arrays) { check_arrays(page_arrays, 2, 2, "Lion"); }

void check_rule(const AdagradRule& rule, std::int64_t page_arrays) {
    check_arrays(page_arrays, 2, 2, "Adagrad");
    check_step(rule.step);
}

// Groups with and without momentum may share a page.
void check_rule(const SgdRule& rule, std::int64_t page_arrays) {
    rule.momentum != 0.0 ? check_arrays(page_arrays, 2, 2, "SGD with momentum") : check_arrays(page_arrays, 1, 2, "SGD");
}

}  // namespace longshore
