// step_tile() against a scalar loop: the same bits on every instruction set,
// and not one byte written elsewhere.
#include "adam.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {
namespace {

struct Element {
    float p, m, v;
};

// The arithmetic of kernels/reference.py, one element at a time. This file is
// compiled without contraction, so only what says fmaf is fused.
class NaiveAdam {
  public:
    NaiveAdam(const AdamRule& rule, Scale scale) : rule_(rule) {
        scale0_ = static_cast<float>(rule.maximize ? -scale.first : scale.first);
        scale1_ = static_cast<float>(scale.second);
        decay_ = static_cast<float>(1.0 - rule.lr * rule.weight_decay);
        weight_decay_ = static_cast<float>(rule.weight_decay);
        one_minus_beta1_ = static_cast<float>(1.0 - rule.beta1);
        beta2_ = static_cast<float>(rule.beta2);
        one_minus_beta2_ = static_cast<float>(1.0 - rule.beta2);
        root_ = static_cast<float>(std::sqrt(1.0 - std::pow(rule.beta2, rule.step)));
        eps_ = static_cast<float>(rule.eps);
        step_size_ = static_cast<float>(-(rule.lr / (1.0 - std::pow(rule.beta1, rule.step))));
    }

    Element step(Element x, float gradient) const {
        float g = gradient * scale0_;
        g = g * scale1_;
        if (rule_.weight_decay != 0.0) {
            if (rule_.decoupled) {
                x.p = x.p * decay_;
            } else {
                g = std::fmaf(x.p, weight_decay_, g);
            }
        }
        if (one_minus_beta1_ < 0.5f) {
            x.m = std::fmaf(one_minus_beta1_, g - x.m, x.m);
        } else {
            x.m = std::fmaf(one_minus_beta1_ - 1.0f, g - x.m, g);
        }
        const float kept = x.v * beta2_;
        const float weighted = one_minus_beta2_ * g;
        x.v = std::fmaf(weighted, g, kept);
        const float denominator = std::sqrt(x.v) / root_ + eps_;
        const float numerator = step_size_ * x.m;
        x.p = x.p + numerator / denominator;
        return x;
    }

  private:
    AdamRule rule_;
    float scale0_, scale1_, decay_, weight_decay_, one_minus_beta1_, beta2_, one_minus_beta2_, root_, eps_, step_size_;
};

constexpr AdamRule kDecoupled = {1e-3, 0.9, 0.999, 1e-8, 0.01, 3.0, true, false};
constexpr AdamRule kL2 = {1e-3, 0.9, 0.999, 1e-8, 0.01, 3.0, false, false};
constexpr Scale kScale = {0.7, 1.0 / 3.0};

// Elements as they are before a step and as the oracle leaves them.
struct Expected {
    std::vector<float> p, m, v, new_p, new_m, new_v;
    Buffer gradient;

    Expected(std::size_t numel, DType gradient_dtype) : p(numel), m(numel), v(numel), gradient(gradient_dtype, numel) {
        new_p = p, new_m = m, new_v = v;
    }
    std::size_t numel() const { return p.size(); }
    void step(const NaiveAdam& adam, std::size_t begin, std::size_t count) {
        for (std::size_t i = begin; i < begin + count; ++i) {
            const Element x = adam.step({p[i], m[i], v[i]}, gradient.get(i));
            new_p[i] = x.p, new_m[i] = x.m, new_v[i] = x.v;
        }
    }
    Buffer output(DType dtype) const {
        Buffer rounded(dtype, numel());
        for (std::size_t i = 0; i < numel(); ++i) rounded.set(i, new_p[i]);
        return rounded;
    }
};

// Ordinary values, with a special one now and then.
Expected ordinary(std::size_t numel, DType gradient_dtype, std::uint64_t seed) {
    Random random(seed);
    Expected values(numel, gradient_dtype);
    const auto draw = [&random](float usual) {
        return random.below(16) == 0 ? kSpecials[static_cast<std::size_t>(random.below(kSpecials.size()))] : usual;
    };
    for (std::size_t i = 0; i < numel; ++i) {
        values.p[i] = draw(random.ordinary());
        values.m[i] = draw(random.ordinary() * 1e-2f);
        values.v[i] = std::fabs(draw(random.ordinary() * 1e-4f));
        values.gradient.set(i, draw(random.ordinary()));
    }
    return values;
}

enum class Place { none, apart, over_gradient };

// Where the buffers of one call lie: elements past a cache line.
struct Offsets {
    std::size_t page = 0, target = 0, gradient = 0, output = 0, in_page = 0;
};

struct Sweep {
    InstructionSet isa;
    DType output_dtype;
    Place place;
    bool in_place;
};

void put_page(Buffer& page, std::size_t at, const std::vector<float>& p, const std::vector<float>& m,
              const std::vector<float>& v, std::size_t count) {
    const std::size_t stride = page.numel() / 3;
    page.write(at, p.data(), count);
    page.write(stride + at, m.data(), count);
    page.write(2 * stride + at, v.data(), count);
}

// One segment of the first `numel` elements, in buffers of its own.
void check_segment(const Expected& values, const Buffer& output_values, const AdamRule& rule, std::size_t numel,
                   const Offsets& offsets, const Sweep& sweep, ThreadPool& pool) {
    const std::size_t page_numel = offsets.in_page + numel;
    Buffer source(DType::float32, 3 * page_numel, offsets.page);
    put_page(source, offsets.in_page, values.p, values.m, values.v, numel);
    Buffer target(DType::float32, sweep.in_place ? 0 : 3 * page_numel, offsets.target);
    Buffer gradient(values.gradient.dtype(), numel, offsets.gradient);
    gradient.write(0, values.gradient.at(0), numel);
    Buffer output(output_values.dtype(), sweep.place == Place::apart ? numel : 0, offsets.output);

    Buffer expected_source = source, expected_target = target, expected_gradient = gradient, expected_output = output;
    put_page(sweep.in_place ? expected_source : expected_target, offsets.in_page, values.new_p, values.new_m,
             values.new_v, numel);
    Buffer& output_buffer = sweep.place == Place::over_gradient ? gradient : output;
    Buffer& expected_output_buffer = sweep.place == Place::over_gradient ? expected_gradient : expected_output;
    if (sweep.place != Place::none) expected_output_buffer.write(0, output_values.at(0), numel);

    TileStep tile{source.floats(), sweep.in_place ? source.floats() : target.floats(),
                  static_cast<std::int64_t>(page_numel), {}, {rule}, kScale};
    tile.segments.push_back({static_cast<std::int64_t>(offsets.in_page), static_cast<std::int64_t>(numel),
                             gradient.at(0), sweep.place == Place::none ? nullptr : output_buffer.at(0), 0,
                             values.gradient.dtype(),
                             sweep.place == Place::none ? DType::none : output_values.dtype()});
    step_tile(tile, pool, sweep.isa);

    const std::string context =
        text(longshore::name_of(sweep.isa), sweep.in_place ? ", in place, " : ", out of place, ",
             sweep.place == Place::over_gradient ? "output over the gradient, numel " : "numel ", numel, ", offsets ",
             offsets.page, " ", offsets.target, " ", offsets.gradient, " ", offsets.output, " ", offsets.in_page);
    source.check_same(expected_source, "the source page, ", context);
    target.check_same(expected_target, "the target page, ", context);
    gradient.check_same(expected_gradient, "the gradient, ", context);
    output.check_same(expected_output, "the output, ", context);
}

// Over all placements of an output of every dtype.
void for_each_sweep(DType gradient_dtype, const std::function<void(const Sweep&)>& body) {
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

void check_every_numel_and_offset(const AdamRule& rule) {
    constexpr std::size_t kMost = 150;  // beyond two blocks of 64 and two vectors of 16
    const std::size_t offset_step = kSanitized ? 5 : 1;
    ThreadPool pool(1, {});
    for (const DType gradient_dtype : kDTypes) {
        Expected values = ordinary(kMost, gradient_dtype, 10 + static_cast<std::uint64_t>(gradient_dtype));
        values.step(NaiveAdam(rule, kScale), 0, kMost);
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

TEST(adamw_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kDecoupled); }

TEST(adam_l2_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kL2); }

// In place on a page of its own, on every instruction set; `values` has been stepped.
void check_in_place(const Expected& values, const AdamRule& rule, Scale scale, ThreadPool& pool) {
    const std::size_t numel = values.numel();
    for (const InstructionSet isa : supported_instruction_sets()) {
        Buffer page(DType::float32, 3 * numel), expected = page;
        put_page(page, 0, values.p, values.m, values.v, numel);
        put_page(expected, 0, values.new_p, values.new_m, values.new_v, numel);
        TileStep tile{page.floats(), page.floats(), static_cast<std::int64_t>(numel), {}, {rule}, scale};
        tile.segments.push_back({0, static_cast<std::int64_t>(numel), values.gradient.at(0), nullptr, 0,
                                 values.gradient.dtype(), DType::none});
        step_tile(tile, pool, isa);
        page.check_same(expected, longshore::name_of(isa), ", lr ", rule.lr, ", betas ", rule.beta1, " ", rule.beta2,
                        ", eps ", rule.eps, ", weight decay ", rule.weight_decay, rule.decoupled ? " decoupled" : " L2",
                        rule.maximize ? ", maximize" : "", ", step ", rule.step, ", scale ", scale.first, " ",
                        scale.second);
    }
}

TEST(adam_of_every_hyper_parameter) {
    ThreadPool pool(1, {});
    const Scale scales[] = {{}, kScale, {1.0 / 1024.0, 1.0}, {0x1p-140, 0.3}};
    std::uint64_t seed = 100;
    for (const double beta1 : {0.0, 0.4, 0.5, 0.9}) {
        for (const double beta2 : {0.0, 0.95, 0.999}) {
            for (const double weight_decay : {0.0, 0.1}) {
                for (const bool decoupled : {true, false}) {
                    for (const bool maximize : {false, true}) {
                        for (const double step : {1.0, 2.0, 1000.0, 16777216.0}) {
                            const Scale scale = scales[seed % 4];
                            const double eps = seed % 3 == 0 ? 1e-40 : seed % 3 == 1 ? 1e-8 : 0.0;
                            const double lr = seed % 5 == 0 ? 1e-42 : 3e-4;
                            const AdamRule rule = {lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize};
                            Expected values = ordinary(500, DType::float32, ++seed);
                            values.step(NaiveAdam(rule, scale), 0, values.numel());
                            check_in_place(values, rule, scale, pool);
                        }
                    }
                }
            }
        }
    }
}

TEST(adam_of_every_special_value_in_every_place) {
    ThreadPool pool(2, {});
    for (const AdamRule& rule : {kDecoupled, kL2, AdamRule{0.1, 0.0, 0.5, 0.0, 0.0, 1.0, true, false}}) {
        Expected values(kSpecials.size() * kSpecials.size() * kSpecials.size() * kSpecials.size(), DType::float32);
        std::size_t i = 0;
        for (const float p : kSpecials) {
            for (const float m : kSpecials) {
                for (const float v : kSpecials) {
                    for (const float g : kSpecials) {
                        values.p[i] = p, values.m[i] = m, values.v[i] = v;
                        values.gradient.set(i++, g);
                    }
                }
            }
        }
        values.step(NaiveAdam(rule, {}), 0, values.numel());
        check_in_place(values, rule, {}, pool);
    }
}

TEST(adam_of_random_patterns) {
    ThreadPool pool(2, {});
    Random random(3);
    for (const AdamRule& rule : {kDecoupled, kL2, AdamRule{0.1, 0.5, 0.5, 0.0, 0.0, 1.0, true, false}}) {
        Expected values(200000, DType::float32);
        for (std::size_t i = 0; i < values.numel(); ++i) {
            values.p[i] = random.pattern(), values.m[i] = random.pattern(), values.v[i] = random.pattern();
            values.gradient.set(i, random.pattern());
        }
        values.step(NaiveAdam(rule, {}), 0, values.numel());
        check_in_place(values, rule, {}, pool);
    }
}

// g = fma(p, weight_decay, g) where a product rounded to float, or a sum
// rounded to double first, gives another g; with beta1 = 0 it is the new m.
TEST(adam_fuses_where_it_shows) {
    ThreadPool pool(1, {});
    Random random(4);
    Expected values(4096, DType::float32);
    const AdamRule rule = {1e-3, 0.0, 0.999, 1e-8, 1.0 - 0x1p-20, 3.0, false, false};
    const float weight_decay = static_cast<float>(rule.weight_decay);
    std::size_t unfused_differs = 0, double_differs = 0;
    for (std::size_t i = 0; i < values.numel(); ++i) {
        const float p = i % 2 == 0 ? (1.0f + 0x1p-20f) * 0x1p-24f : random.ordinary();
        const float g = i % 2 == 0 ? float_of(0x3f800001u | static_cast<std::uint32_t>(random.bits() >> 41))
                                   : random.ordinary();
        values.p[i] = p;
        values.gradient.set(i, g);
        const float product = p * weight_decay;
        const float fused = std::fmaf(p, weight_decay, g);
        unfused_differs += product + g != fused;
        double_differs += static_cast<float>(static_cast<double>(p) * static_cast<double>(weight_decay) +
                                             static_cast<double>(g)) != fused;
    }
    CHECK(unfused_differs > 500, unfused_differs);
    CHECK(double_differs > 1500, double_differs);
    values.step(NaiveAdam(rule, {}), 0, values.numel());
    CHECK(values.new_m[0] == std::fmaf(values.p[0], weight_decay, values.gradient.get(0)));
    check_in_place(values, rule, {}, pool);
}

// A tile of many segments with gaps between them, of all dtypes and several
// rules, some longer than one piece and none on a round number.
struct ManySegments {
    struct Part {
        std::size_t offset, numel;
        std::int32_t rule;
        Expected values;
        DType output_dtype;
    };
    std::vector<AdamRule> rules;
    std::vector<Part> parts;
    std::size_t page_numel = 0;

    ManySegments() {
        rules = {kDecoupled, kL2, {0.1, 0.5, 0.95, 1e-6, 0.0, 7.0, true, true}};
        Random random(5);
        std::size_t offset = 3;
        const auto piece = static_cast<std::size_t>(kPieceNumel);
        for (std::size_t i = 0; i < 60; ++i) {
            std::size_t numel = 1 + static_cast<std::size_t>(random.below(i % 3 == 0 ? 5 : 900));
            if (i == 20) numel = 2 * piece + 17;
            if (i == 40) numel = piece - 1;
            const DType gradient = kDTypes[random.below(3)];
            const DType output = static_cast<DType>(random.below(4));
            parts.push_back({offset, numel, static_cast<std::int32_t>(random.below(3)),
                             ordinary(numel, gradient, 1000 + i), output});
            Part& part = parts.back();
            part.values.step(NaiveAdam(rules[static_cast<std::size_t>(part.rule)], kScale), 0, numel);
            offset += numel + static_cast<std::size_t>(i % 4 == 0 ? random.below(40) : 0);
        }
        page_numel = offset + 5;
    }

    void check(ThreadPool& pool, InstructionSet isa, bool in_place) {
        Buffer source(DType::float32, 3 * page_numel), target(DType::float32, 3 * page_numel);
        for (Part& part : parts) put_page(source, part.offset, part.values.p, part.values.m, part.values.v, part.numel);
        Buffer expected_source = source, expected_target = target;
        std::vector<std::unique_ptr<Buffer>> outputs;
        TileStep tile{source.floats(), in_place ? source.floats() : target.floats(),
                      static_cast<std::int64_t>(page_numel), {}, rules, kScale};
        for (Part& part : parts) {
            put_page(in_place ? expected_source : expected_target, part.offset, part.values.new_p, part.values.new_m,
                     part.values.new_v, part.numel);
            const bool none = part.output_dtype == DType::none;
            outputs.push_back(std::make_unique<Buffer>(none ? DType::float32 : part.output_dtype, none ? 0 : part.numel));
            tile.segments.push_back({static_cast<std::int64_t>(part.offset), static_cast<std::int64_t>(part.numel),
                                     part.values.gradient.at(0), none ? nullptr : outputs.back()->at(0), part.rule,
                                     part.values.gradient.dtype(), part.output_dtype});
        }
        step_tile(tile, pool, isa);
        const std::string context = text(longshore::name_of(isa), ", ", pool.threads(), " threads, in place: ", in_place);
        source.check_same(expected_source, "the source page, ", context);
        target.check_same(expected_target, "the target page, ", context);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            if (parts[i].output_dtype == DType::none) continue;
            outputs[i]->check_same(parts[i].values.output(parts[i].output_dtype), "output ", i, ", ", context);
        }
    }
};

TEST(step_tile_of_many_segments_for_all_thread_counts) {
    ManySegments tile;
    for (const int threads : {1, 2, 3, 7}) {
        ThreadPool pool(threads, {});
        for (const InstructionSet isa : supported_instruction_sets()) {
            tile.check(pool, isa, true);
            tile.check(pool, isa, false);
        }
    }
}

// The same elements as one segment and in cuts at odd places.
TEST(step_tile_of_any_cut_into_segments_and_threads) {
    const std::size_t numel = 2 * static_cast<std::size_t>(kPieceNumel) + 12345;
    Expected values = ordinary(numel, DType::bfloat16, 6);
    values.step(NaiveAdam(kDecoupled, kScale), 0, numel);
    const Buffer expected_output = values.output(DType::bfloat16);
    ThreadPool pool(3, {});
    Random random(7);
    for (const std::int64_t longest : {std::int64_t{1} << 40, kPieceNumel + 1, kPieceNumel - 1, std::int64_t{997}}) {
        for (const InstructionSet isa : supported_instruction_sets()) {
            Buffer page(DType::float32, 3 * numel), expected = page, output(DType::bfloat16, numel);
            put_page(page, 0, values.p, values.m, values.v, numel);
            put_page(expected, 0, values.new_p, values.new_m, values.new_v, numel);
            TileStep tile{page.floats(), page.floats(), static_cast<std::int64_t>(numel), {}, {kDecoupled}, kScale};
            for (std::size_t at = 0; at < numel;) {
                const auto count = std::min(longest > kPieceNumel ? longest : 1 + random.below(longest),
                                            static_cast<std::int64_t>(numel - at));
                tile.segments.push_back({static_cast<std::int64_t>(at), count, values.gradient.at(at), output.at(at), 0,
                                         DType::bfloat16, DType::bfloat16});
                at += static_cast<std::size_t>(count);
            }
            step_tile(tile, pool, isa);
            page.check_same(expected, longshore::name_of(isa), ", segments of at most ", longest);
            output.check_same(expected_output, longshore::name_of(isa), ", segments of at most ", longest);
        }
    }
}

TEST(step_tile_of_no_segments_writes_nothing) {
    ThreadPool pool(2, {});
    Buffer page(DType::float32, 30), expected = page;
    step_tile({page.floats(), page.floats(), 10, {}, {kDecoupled}, {}}, pool, InstructionSet::baseline);
    page.check_same(expected);
}

// Denormals in, denormals out, and scalars that are denormal themselves, while
// the caller and the threads that it made flush them.
TEST(step_tile_keeps_denormals_under_flush_to_zero_on_all_threads) {
    if (!FlushToZero::known()) return;
    const AdamRule rule = {1e-41, 0.9, 0.999, 1e-40, 0.0, 1.0, true, false};
    const Scale scale = {0x1p-130, 1.0};
    for (const std::size_t numel : {std::size_t{100}, 3 * static_cast<std::size_t>(kPieceNumel)}) {  // one piece; several
        Expected values(numel, DType::float32);
        Random random(8);
        for (std::size_t i = 0; i < numel; ++i) {
            values.p[i] = random.ordinary() * 0x1p-127f;
            values.m[i] = random.ordinary() * 0x1p-127f;
            values.v[i] = i % 3 == 0 ? 0.0f : std::fabs(random.ordinary()) * 0x1p-127f;
            values.gradient.set(i, random.ordinary());
        }
        values.step(NaiveAdam(rule, scale), 0, numel);
        const auto denormal = [](float x) { return x != 0.0f && std::fabs(x) < 0x1p-126f; };
        CHECK(std::count_if(values.new_p.begin(), values.new_p.end(), denormal) > static_cast<std::int64_t>(numel) / 2);
        CHECK(std::count_if(values.new_m.begin(), values.new_m.end(), denormal) > static_cast<std::int64_t>(numel) / 2);
        CHECK(!flushes());
        FlushToZero mode;
        CHECK(flushes());
        ThreadPool pool(2, {});
        check_in_place(values, rule, scale, pool);
        CHECK(FlushToZero::active() && flushes(), "the caller lost its own mode");
    }
}

// A tile of two segments that step_tile() takes, for a refusal to spoil.
struct RefusedTile {
    Buffer source{DType::float32, 60}, target{DType::float32, 60}, gradient{DType::bfloat16, 20},
        output{DType::bfloat16, 20};
    TileStep tile{source.floats(), target.floats(), 20, {}, {kDecoupled, kL2}, {}};

    RefusedTile() {
        tile.segments = {{0, 10, gradient.at(0), output.at(0), 0, DType::bfloat16, DType::bfloat16},
                         {10, 10, gradient.at(10), output.at(10), 1, DType::bfloat16, DType::bfloat16}};
    }
};

void check_refused(const char* part, const std::function<void(RefusedTile&)>& spoil,
                   InstructionSet isa = InstructionSet::baseline) {
    ThreadPool pool(2, {});
    RefusedTile refused;
    const Buffer source = refused.source, target = refused.target, gradient = refused.gradient, output = refused.output;
    spoil(refused);
    CHECK_THROWS(std::invalid_argument, part, step_tile(refused.tile, pool, isa));
    refused.source.check_same(source, part);
    refused.target.check_same(target, part);
    refused.gradient.check_same(gradient, part);
    refused.output.check_same(output, part);
}

TEST(step_tile_refuses_before_it_writes) {
    {
        ThreadPool pool(2, {});
        RefusedTile accepted;
        const Buffer before = accepted.target;
        step_tile(accepted.tile, pool, InstructionSet::baseline);
        CHECK(std::memcmp(before.at(0), accepted.target.at(0), 60 * sizeof(float)) != 0, "unspoiled, the tile is stepped");
    }
    // The second segment is spoiled, so that a check made too late would find the first one stepped.
    const auto second = [](RefusedTile& t) -> Segment& { return t.tile.segments[1]; };
    const auto unaligned = [](void* address) { return static_cast<void*>(static_cast<char*>(address) + 1); };
    check_refused("a page of negative size", [](RefusedTile& t) { t.tile.page_numel = -1; });
    check_refused("the source page is a null address", [](RefusedTile& t) { t.tile.source_page = nullptr; });
    check_refused("the target page is a null address", [](RefusedTile& t) { t.tile.target_page = nullptr; });
    check_refused("the source page is not aligned", [&](RefusedTile& t) {
        t.tile.source_page = static_cast<const float*>(unaligned(t.source.at(0)));
    });
    check_refused("the target page is not aligned",
                  [&](RefusedTile& t) { t.tile.target_page = static_cast<float*>(unaligned(t.target.at(0))); });
    check_refused("pages overlap", [](RefusedTile& t) { t.tile.target_page = t.source.floats(1); });
    check_refused("pages overlap", [](RefusedTile& t) {
        t.tile.source_page = t.source.floats(20);
        t.tile.target_page = t.source.floats(0);
        t.tile.page_numel = 7;
    });
    check_refused("a step count below 1", [](RefusedTile& t) { t.tile.rules[1].step = 0.0; });
    check_refused("a step count below 1", [](RefusedTile& t) { t.tile.rules[1].step = std::nan(""); });
    check_refused("segment 1 of the tile has no elements", [&](RefusedTile& t) { second(t).numel = 0; });
    check_refused("segment 1 of the tile has no elements", [&](RefusedTile& t) { second(t).numel = -3; });
    check_refused("begins before the one ahead of it ends", [&](RefusedTile& t) { second(t).page_offset = 9; });
    check_refused("segment 0 of the tile begins before", [](RefusedTile& t) { t.tile.segments[0].page_offset = -1; });
    check_refused("segment 1 of the tile begins before",
                  [](RefusedTile& t) { std::swap(t.tile.segments[0], t.tile.segments[1]); });
    check_refused("past the end of the page", [&](RefusedTile& t) { second(t).numel = 11; });
    check_refused("past the end of the page", [&](RefusedTile& t) { second(t).page_offset = 21; });
    check_refused("past the end of the page", [&](RefusedTile& t) { second(t).page_offset = INT64_MAX; });
    check_refused("past the end of the page", [&](RefusedTile& t) { second(t).numel = INT64_MAX; });
    check_refused("names a rule that the tile does not have", [&](RefusedTile& t) { second(t).rule = 2; });
    check_refused("names a rule that the tile does not have", [&](RefusedTile& t) { second(t).rule = -1; });
    check_refused("the gradient is a null address", [&](RefusedTile& t) { second(t).gradient = nullptr; });
    check_refused("the gradient is not aligned",
                  [&](RefusedTile& t) { second(t).gradient = unaligned(t.gradient.at(0)); });
    check_refused("unknown dtype 0", [&](RefusedTile& t) { second(t).gradient_dtype = DType::none; });
    check_refused("unknown dtype 4", [&](RefusedTile& t) { second(t).gradient_dtype = static_cast<DType>(4); });
    check_refused("unknown dtype -1", [&](RefusedTile& t) { second(t).output_dtype = static_cast<DType>(-1); });
    check_refused("the output is a null address", [&](RefusedTile& t) { second(t).output = nullptr; });
    check_refused("the output is not aligned", [&](RefusedTile& t) { second(t).output = unaligned(t.output.at(0)); });
    check_refused("has an output address but no output dtype",
                  [&](RefusedTile& t) { second(t).output_dtype = DType::none; });
    check_refused("overlaps its gradient", [&](RefusedTile& t) { second(t).output = t.gradient.at(9); });
    check_refused("overlaps its gradient", [&](RefusedTile& t) {  // its place, but not its size
        second(t).numel = 4;
        second(t).output = t.gradient.at(10);
        second(t).output_dtype = DType::float32;
    });
    check_refused("unknown instruction set", [](RefusedTile&) {}, static_cast<InstructionSet>(99));
    check_refused("unknown instruction set", [](RefusedTile&) {}, static_cast<InstructionSet>(-1));
}

}  // namespace
}  // namespace longshore::testing
