// What the tests of step_tile() share: a scalar loop for each rule, values, and
// the sweeps over sizes, places and instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "step.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {

// The rules as the files of src/longshore/optim/rules/ are told them, and the
// scalars that those files compute: one row of a tile. kEntry is the place in
// kRules of rules.inl. `step` is the count after this step: 1 the first time.
struct AdamRule {
    static constexpr std::int32_t kEntry = 0;
    double lr, beta1, beta2, eps, weight_decay;
    double step;
    bool decoupled;  // AdamW's decay; otherwise Adam's L2 term in the gradient
    bool maximize;
    bool bias_correction = true;

    std::vector<double> scalars() const {
        const double correction1 = bias_correction ? 1.0 - std::pow(beta1, step) : 1.0;
        const double correction2 = bias_correction ? 1.0 - std::pow(beta2, step) : 1.0;
        return {decoupled ? 1.0 - lr * weight_decay : 1.0, decoupled ? 0.0 : weight_decay, 1.0 - beta1,
                beta2, 1.0 - beta2, std::sqrt(correction2), eps, -(lr / correction1)};
    }
};

struct LionRule {
    static constexpr std::int32_t kEntry = 1;
    double lr, beta1, beta2, weight_decay;
    bool maximize;

    std::vector<double> scalars() const {
        return {1.0 - lr * weight_decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, -lr};
    }
};

struct AdagradRule {
    static constexpr std::int32_t kEntry = 2;
    double lr, lr_decay, eps, weight_decay;
    double step;
    bool maximize;

    std::vector<double> scalars() const { return {weight_decay, eps, -(lr / (1.0 + (step - 1.0) * lr_decay))}; }
};

struct SgdRule {
    static constexpr std::int32_t kEntry = 3;
    double lr, momentum, dampening, weight_decay;
    bool nesterov;
    bool first;  // no momentum buffer yet: it becomes the gradient
    bool maximize;

    std::vector<double> scalars() const {
        return {weight_decay, momentum, 1.0 - dampening, -lr, momentum != 0.0 ? 1.0 : 0.0, first ? 1.0 : 0.0,
                nesterov ? 1.0 : 0.0};
    }
};

// A buffer of the momentum alone; what is output is not in it.
struct MuonMomentumRule {
    static constexpr std::int32_t kEntry = 4;
    double momentum;
    bool nesterov;
    bool maximize = false;

    std::vector<double> scalars() const { return {1.0 - momentum, momentum, nesterov ? 1.0 : 0.0}; }
};

struct MuonUpdateRule {
    static constexpr std::int32_t kEntry = 5;
    double lr, decay;
    bool maximize = false;

    std::vector<double> scalars() const { return {decay, -lr}; }
};

template <class Rule>
std::vector<std::vector<double>> rows_of(const std::vector<Rule>& rules, Scale scale) {
    std::vector<std::vector<double>> rows;
    for (const Rule& rule : rules) {
        rows.push_back({rule.maximize ? -scale.first : scale.first, scale.second});
        const std::vector<double> scalars = rule.scalars();
        rows.back().insert(rows.back().end(), scalars.begin(), scalars.end());
    }
    return rows;
}

// One element of each of a buffer's arrays, the master first, and of the output if that
// is none of them.
struct Element {
    float a[kMostArrays];
    float output;
};
template <class Rule>
inline constexpr bool outputs_master = true;
template <>
inline constexpr bool outputs_master<MuonMomentumRule> = false;
using Arrays = std::vector<std::vector<float>>;

// The arithmetic of the rules' files, one element at a time. These files
// are compiled without contraction, so only what says fmaf is fused.
template <class Rule>
class Naive;

template <class Rule>
float scaled(float gradient, const Rule& rule, Scale scale) {
    const float once = gradient * static_cast<float>(rule.maximize ? -scale.first : scale.first);
    return once * static_cast<float>(scale.second);
}

template <>
class Naive<AdamRule> {
  public:
    Naive(const AdamRule& rule, Scale scale) : rule_(rule), scale_(scale) {
        decay_ = static_cast<float>(1.0 - rule.lr * rule.weight_decay);
        weight_decay_ = static_cast<float>(rule.weight_decay);
        one_minus_beta1_ = static_cast<float>(1.0 - rule.beta1);
        beta2_ = static_cast<float>(rule.beta2);
        one_minus_beta2_ = static_cast<float>(1.0 - rule.beta2);
        root_ = rule.bias_correction ? static_cast<float>(std::sqrt(1.0 - std::pow(rule.beta2, rule.step))) : 1.0f;
        eps_ = static_cast<float>(rule.eps);
        const double correction = rule.bias_correction ? 1.0 - std::pow(rule.beta1, rule.step) : 1.0;
        step_size_ = static_cast<float>(-(rule.lr / correction));
    }

    Element step(Element x, float gradient) const {
        float g = scaled(gradient, rule_, scale_);
        if (rule_.weight_decay != 0.0) {
            if (rule_.decoupled) {
                x.a[0] = x.a[0] * decay_;
            } else {
                g = std::fmaf(x.a[0], weight_decay_, g);
            }
        }
        if (one_minus_beta1_ < 0.5f) {
            x.a[1] = std::fmaf(one_minus_beta1_, g - x.a[1], x.a[1]);
        } else {
            x.a[1] = std::fmaf(one_minus_beta1_ - 1.0f, g - x.a[1], g);
        }
        const float kept = x.a[2] * beta2_;
        const float weighted = one_minus_beta2_ * g;
        x.a[2] = std::fmaf(weighted, g, kept);
        const float denominator = std::sqrt(x.a[2]) / root_ + eps_;
        const float numerator = step_size_ * x.a[1];
        x.a[0] = x.a[0] + numerator / denominator;
        return x;
    }

  private:
    AdamRule rule_;
    Scale scale_;
    float decay_, weight_decay_, one_minus_beta1_, beta2_, one_minus_beta2_, root_, eps_, step_size_;
};

template <>
class Naive<LionRule> {
  public:
    Naive(const LionRule& rule, Scale scale) : rule_(rule), scale_(scale) {}

    Element step(Element x, float gradient) const {
        const float g = scaled(gradient, rule_, scale_);
        const float kept = x.a[1] * static_cast<float>(rule_.beta1);
        const float c = std::fmaf(static_cast<float>(1.0 - rule_.beta1), g, kept);
        const float sign = std::isnan(c) ? c : static_cast<float>((c > 0.0f) - (c < 0.0f));
        const float decayed = x.a[0] * static_cast<float>(1.0 - rule_.lr * rule_.weight_decay);
        const float move = static_cast<float>(-rule_.lr) * sign;
        x.a[0] = decayed + move;
        const float still = x.a[1] * static_cast<float>(rule_.beta2);
        x.a[1] = std::fmaf(static_cast<float>(1.0 - rule_.beta2), g, still);
        return x;
    }

  private:
    LionRule rule_;
    Scale scale_;
};

template <>
class Naive<AdagradRule> {
  public:
    Naive(const AdagradRule& rule, Scale scale) : rule_(rule), scale_(scale) {}

    Element step(Element x, float gradient) const {
        float g = scaled(gradient, rule_, scale_);
        if (rule_.weight_decay != 0.0) g = std::fmaf(x.a[0], static_cast<float>(rule_.weight_decay), g);
        x.a[1] = std::fmaf(g, g, x.a[1]);
        const float denominator = std::sqrt(x.a[1]) + static_cast<float>(rule_.eps);
        const double lr = rule_.lr / (1.0 + (rule_.step - 1.0) * rule_.lr_decay);
        const float numerator = static_cast<float>(-lr) * g;
        x.a[0] = x.a[0] + numerator / denominator;
        return x;
    }

  private:
    AdagradRule rule_;
    Scale scale_;
};

template <>
class Naive<SgdRule> {
  public:
    Naive(const SgdRule& rule, Scale scale) : rule_(rule), scale_(scale) {}

    Element step(Element x, float gradient) const {
        float g = scaled(gradient, rule_, scale_);
        if (rule_.weight_decay != 0.0) g = std::fmaf(x.a[0], static_cast<float>(rule_.weight_decay), g);
        if (rule_.momentum != 0.0) {
            const float momentum = static_cast<float>(rule_.momentum);
            const float kept = x.a[1] * momentum;
            x.a[1] = rule_.first ? g : std::fmaf(static_cast<float>(1.0 - rule_.dampening), g, kept);
            g = rule_.nesterov ? std::fmaf(x.a[1], momentum, g) : x.a[1];
        }
        x.a[0] = std::fmaf(g, static_cast<float>(-rule_.lr), x.a[0]);
        return x;
    }

  private:
    SgdRule rule_;
    Scale scale_;
};

template <>
class Naive<MuonMomentumRule> {
  public:
    Naive(const MuonMomentumRule& rule, Scale scale) : rule_(rule), scale_(scale) {}

    Element step(Element x, float gradient) const {
        const float g = scaled(gradient, rule_, scale_);
        const float next = lerp(x.a[0], g, static_cast<float>(1.0 - rule_.momentum));
        x.output = rule_.nesterov ? lerp(g, next, static_cast<float>(rule_.momentum)) : next;
        x.a[0] = next;
        return x;
    }

  private:
    static float lerp(float from, float to, float weight) {
        return weight < 0.5f ? std::fmaf(weight, to - from, from) : std::fmaf(weight - 1.0f, to - from, to);
    }
    MuonMomentumRule rule_;
    Scale scale_;
};

template <>
class Naive<MuonUpdateRule> {
  public:
    Naive(const MuonUpdateRule& rule, Scale scale) : rule_(rule), scale_(scale) {}

    Element step(Element x, float gradient) const {
        const float kept = x.a[0] * static_cast<float>(rule_.decay);
        x.a[0] = std::fmaf(scaled(gradient, rule_, scale_), static_cast<float>(-rule_.lr), kept);
        return x;
    }

  private:
    MuonUpdateRule rule_;
    Scale scale_;
};

inline std::string described(const AdamRule& r) {
    return text("Adam, lr ", r.lr, ", betas ", r.beta1, " ", r.beta2, ", eps ", r.eps, ", weight decay ",
                r.weight_decay, r.decoupled ? " decoupled" : " L2", r.maximize ? ", maximize" : "", ", step ", r.step,
                r.bias_correction ? "" : ", no bias correction");
}
inline std::string described(const LionRule& r) {
    return text("Lion, lr ", r.lr, ", betas ", r.beta1, " ", r.beta2, ", weight decay ", r.weight_decay,
                r.maximize ? ", maximize" : "");
}
inline std::string described(const AdagradRule& r) {
    return text("Adagrad, lr ", r.lr, ", lr decay ", r.lr_decay, ", eps ", r.eps, ", weight decay ", r.weight_decay,
                r.maximize ? ", maximize" : "", ", step ", r.step);
}
inline std::string described(const SgdRule& r) {
    return text("SGD, lr ", r.lr, ", momentum ", r.momentum, ", dampening ", r.dampening, ", weight decay ",
                r.weight_decay, r.nesterov ? ", nesterov" : "", r.first ? ", first" : "",
                r.maximize ? ", maximize" : "");
}

inline std::string described(const MuonMomentumRule& r) {
    return text("Muon's momentum, momentum ", r.momentum, r.nesterov ? ", nesterov" : "");
}
inline std::string described(const MuonUpdateRule& r) {
    return text("Muon's update, lr ", r.lr, ", decay ", r.decay);
}

inline constexpr AdamRule kDecoupled = {1e-3, 0.9, 0.999, 1e-8, 0.01, 3.0, true, false};
inline constexpr AdamRule kL2 = {1e-3, 0.9, 0.999, 1e-8, 0.01, 3.0, false, false};
inline constexpr Scale kScale = {0.7, 1.0 / 3.0};

// Elements as they are before a step and as the oracle leaves them.
struct Expected {
    Arrays a, stepped;
    std::vector<float> outputs;
    Buffer gradient;

    Expected(std::size_t arrays, std::size_t numel, DType gradient_dtype)
        : a(arrays, std::vector<float>(numel)), stepped(a), outputs(numel), gradient(gradient_dtype, numel) {}
    std::size_t arrays() const { return a.size(); }
    std::size_t numel() const { return a[0].size(); }
    template <class Rule>
    void step(const Rule& rule, Scale scale) {
        const Naive<Rule> naive(rule, scale);
        for (std::size_t i = 0; i < numel(); ++i) {
            Element x{};
            for (std::size_t k = 0; k < arrays(); ++k) x.a[k] = a[k][i];
            x = naive.step(x, gradient.get(i));
            for (std::size_t k = 0; k < arrays(); ++k) stepped[k][i] = canonical(x.a[k]);
            outputs[i] = canonical(outputs_master<Rule> ? x.a[0] : x.output);
        }
    }
    Buffer output(DType dtype) const {
        Buffer rounded(dtype, numel());
        for (std::size_t i = 0; i < numel(); ++i) rounded.set(i, outputs[i]);
        return rounded;
    }
};

// Ordinary values, with a special one now and then.
inline Expected ordinary(std::size_t arrays, std::size_t numel, DType gradient_dtype, std::uint64_t seed) {
    Random random(seed);
    Expected values(arrays, numel, gradient_dtype);
    const auto draw = [&random](float usual) {
        return random.below(16) == 0 ? kSpecials[static_cast<std::size_t>(random.below(kSpecials.size()))] : usual;
    };
    for (std::size_t i = 0; i < numel; ++i) {
        values.a[0][i] = draw(random.ordinary());
        if (arrays > 1) values.a[1][i] = draw(random.ordinary() * 1e-2f);
        if (arrays > 2) values.a[2][i] = std::fabs(draw(random.ordinary() * 1e-4f));
        values.gradient.set(i, draw(random.ordinary()));
    }
    return values;
}

enum class Place { none, apart, over_gradient };

// Where the buffers of one call lie: elements past a cache line.
struct Offsets {
    std::size_t buffer = 0, target = 0, gradient = 0, output = 0, in_buffer = 0;
};

struct Sweep {
    InstructionSet isa;
    DType output_dtype;
    Place place;
    bool in_place;
};

inline void put_buffer(Buffer& buffer, std::size_t at, const Arrays& arrays) {
    const std::size_t stride = buffer.numel() / arrays.size();
    for (std::size_t k = 0; k < arrays.size(); ++k) buffer.write(k * stride + at, arrays[k].data(), arrays[k].size());
}

inline Arrays first(const Arrays& arrays, std::size_t numel) {
    Arrays cut;
    for (const auto& array : arrays) cut.emplace_back(array.begin(), array.begin() + static_cast<std::ptrdiff_t>(numel));
    return cut;
}

// One segment of the first `numel` elements, in buffers of its own.
template <class Rule>
void check_segment(const Expected& values, const Buffer& output_values, const Rule& rule, std::size_t numel,
                   const Offsets& offsets, const Sweep& sweep, ThreadPool& pool) {
    const std::size_t buffer_numel = offsets.in_buffer + numel;
    const std::size_t arrays = values.arrays();
    Buffer source(DType::float32, arrays * buffer_numel, offsets.buffer);
    put_buffer(source, offsets.in_buffer, first(values.a, numel));
    Buffer target(DType::float32, sweep.in_place ? 0 : arrays * buffer_numel, offsets.target);
    Buffer gradient(values.gradient.dtype(), numel, offsets.gradient);
    gradient.write(0, values.gradient.at(0), numel);
    Buffer output(output_values.dtype(), sweep.place == Place::apart ? numel : 0, offsets.output);

    Buffer expected_source = source, expected_target = target, expected_gradient = gradient, expected_output = output;
    put_buffer(sweep.in_place ? expected_source : expected_target, offsets.in_buffer, first(values.stepped, numel));
    Buffer& output_buffer = sweep.place == Place::over_gradient ? gradient : output;
    Buffer& expected_output_buffer = sweep.place == Place::over_gradient ? expected_gradient : expected_output;
    if (sweep.place != Place::none) expected_output_buffer.write(0, output_values.at(0), numel);

    TileStep tile{source.floats(), sweep.in_place ? source.floats() : target.floats(),
                  static_cast<std::int64_t>(arrays), static_cast<std::int64_t>(buffer_numel), {}, Rule::kEntry,
                  rows_of(std::vector{rule}, kScale)};
    tile.segments.push_back({static_cast<std::int64_t>(offsets.in_buffer), static_cast<std::int64_t>(numel),
                             gradient.at(0), sweep.place == Place::none ? nullptr : output_buffer.at(0), 0,
                             values.gradient.dtype(),
                             sweep.place == Place::none ? DType::none : output_values.dtype()});
    step_tile(tile, pool, sweep.isa);

    const std::string context =
        text(longshore::name_of(sweep.isa), sweep.in_place ? ", in place, " : ", out of place, ",
             sweep.place == Place::over_gradient ? "output over the gradient, numel " : "numel ", numel, ", offsets ",
             offsets.buffer, " ", offsets.target, " ", offsets.gradient, " ", offsets.output, " ", offsets.in_buffer);
    source.check_same(expected_source, "the source buffer, ", context);
    target.check_same(expected_target, "the target buffer, ", context);
    gradient.check_same(expected_gradient, "the gradient, ", context);
    output.check_same(expected_output, "the output, ", context);
}

// Over all placements of an output of every dtype.
inline void for_each_sweep(DType gradient_dtype, const std::function<void(const Sweep&)>& body) {
    for (const InstructionSet isa : supported_instruction_sets()) {
        for (const bool in_place : {true, false}) {
            body({isa, DType::float32, Place::none, in_place});
            for (const DType output : kDTypes) {
                body({isa, output, Place::apart, in_place});
                if (item_bytes(output) == item_bytes(gradient_dtype)) {
                    body({isa, output, Place::over_gradient, in_place});
                }
            }
        }
    }
}

template <class Rule>
void check_every_numel_and_offset(const Rule& rule, std::size_t arrays) {
    constexpr std::size_t kMost = 150;  // beyond two blocks of 64 and two vectors of 16
    const std::size_t offset_step = kSanitized ? 5 : 1;
    ThreadPool pool(1, {});
    for (const DType gradient_dtype : kDTypes) {
        Expected values = ordinary(arrays, kMost, gradient_dtype, 10 + static_cast<std::uint64_t>(gradient_dtype));
        values.step(rule, kScale);
        const Buffer outputs[] = {values.output(DType::float32), values.output(DType::bfloat16),
                                  values.output(DType::float16)};
        for_each_sweep(gradient_dtype, [&](const Sweep& sweep) {
            const Buffer& output = outputs[static_cast<int>(sweep.output_dtype) - 1];
            for (std::size_t numel = 1; numel <= kMost; ++numel) {
                for (std::size_t offset = 0; offset <= 16; offset += offset_step) {
                    // Each buffer takes all 17 offsets, and not the same at the same time.
                    const Offsets offsets = {offset, (offset * 3 + 1) % 17, (offset * 5 + numel) % 17,
                                             (offset * 7 + 2 * numel) % 17, offset * 11 % 17};
                    check_segment(values, output, rule, numel, offsets, sweep, pool);
                }
            }
        });
    }
}

// In place on a buffer of its own, on every instruction set; `values` has been stepped.
template <class Rule>
void check_in_place(const Expected& values, const Rule& rule, Scale scale, ThreadPool& pool) {
    const std::size_t numel = values.numel();
    for (const InstructionSet isa : supported_instruction_sets()) {
        Buffer buffer(DType::float32, values.arrays() * numel), expected = buffer;
        put_buffer(buffer, 0, values.a);
        put_buffer(expected, 0, values.stepped);
        TileStep tile{buffer.floats(), buffer.floats(), static_cast<std::int64_t>(values.arrays()),
                      static_cast<std::int64_t>(numel), {}, Rule::kEntry, rows_of(std::vector{rule}, scale)};
        tile.segments.push_back({0, static_cast<std::int64_t>(numel), values.gradient.at(0), nullptr, 0,
                                 values.gradient.dtype(), DType::none});
        step_tile(tile, pool, isa);
        buffer.check_same(expected, longshore::name_of(isa), ", ", described(rule), ", scale ", scale.first, " ",
                        scale.second);
    }
}

// All combinations of special values in the arrays and the gradient, `values`
// having been made of as many elements as there are.
inline void fill_with_specials(Expected& values) {
    for (std::size_t i = 0; i < values.numel(); ++i) {
        std::size_t rest = i;
        for (auto& array : values.a) {
            array[i] = kSpecials[rest % kSpecials.size()];
            rest /= kSpecials.size();
        }
        values.gradient.set(i, kSpecials[rest % kSpecials.size()]);
    }
}

inline void fill_with_patterns(Expected& values, Random& random) {
    for (std::size_t i = 0; i < values.numel(); ++i) {
        for (auto& array : values.a) array[i] = random.pattern();
        values.gradient.set(i, random.pattern());
    }
}

// Every special value in every place, and random bit patterns.
template <class Rule>
void check_specials_and_patterns(const Rule& rule, std::size_t arrays, std::uint64_t seed) {
    ThreadPool pool(2, {});
    std::size_t combinations = kSpecials.size();
    for (std::size_t k = 0; k < arrays; ++k) combinations *= kSpecials.size();
    Expected specials(arrays, combinations, DType::float32);
    fill_with_specials(specials);
    specials.step(rule, {});
    check_in_place(specials, rule, {}, pool);
    Random random(seed);
    Expected patterns(arrays, 200000, DType::float32);
    fill_with_patterns(patterns, random);
    patterns.step(rule, {});
    check_in_place(patterns, rule, {}, pool);
}

}  // namespace longshore::testing
