// Each rule against its scalar loop: the same bits on every instruction set, and
// not one byte written elsewhere.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "step.h"
#include "step_support.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {
namespace {

TEST(adamw_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kDecoupled, 3); }

TEST(adam_l2_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kL2, 3); }

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
                            const bool bias_correction = seed % 7 != 0;
                            const Scale scale = scales[seed % 4];
                            const double eps = seed % 3 == 0 ? 1e-40 : seed % 3 == 1 ? 1e-8 : 0.0;
                            const double lr = seed % 5 == 0 ? 1e-42 : 3e-4;
                            const AdamRule rule = {lr, beta1, beta2, eps, weight_decay, step, decoupled, maximize,
                                                   bias_correction};
                            Expected values = ordinary(3, 500, DType::float32, ++seed);
                            values.step(rule, scale);
                            check_in_place(values, rule, scale, pool);
                        }
                    }
                }
            }
        }
    }
}

TEST(adam_of_every_special_value_and_random_patterns) {
    check_specials_and_patterns(kDecoupled, 3, 3);
    check_specials_and_patterns(kL2, 3, 4);
    check_specials_and_patterns(AdamRule{0.1, 0.0, 0.5, 0.0, 0.0, 1.0, true, false}, 3, 5);
    check_specials_and_patterns(AdamRule{0.1, 0.5, 0.5, 0.0, 0.0, 1.0, true, false, false}, 3, 6);
}

// g = fma(p, weight_decay, g) where a product rounded to float, or a sum
// rounded to double first, gives another g; with beta1 = 0 it is the new m.
TEST(adam_fuses_where_it_shows) {
    ThreadPool pool(1, {});
    Random random(4);
    Expected values(3, 4096, DType::float32);
    const AdamRule rule = {1e-3, 0.0, 0.999, 1e-8, 1.0 - 0x1p-20, 3.0, false, false};
    const float weight_decay = static_cast<float>(rule.weight_decay);
    std::size_t unfused_differs = 0, double_differs = 0;
    for (std::size_t i = 0; i < values.numel(); ++i) {
        const float p = i % 2 == 0 ? (1.0f + 0x1p-20f) * 0x1p-24f : random.ordinary();
        const float g = i % 2 == 0 ? float_of(0x3f800001u | static_cast<std::uint32_t>(random.bits() >> 41))
                                   : random.ordinary();
        values.a[0][i] = p;
        values.gradient.set(i, g);
        const float product = p * weight_decay;
        const float fused = std::fmaf(p, weight_decay, g);
        unfused_differs += product + g != fused;
        double_differs += static_cast<float>(static_cast<double>(p) * static_cast<double>(weight_decay) +
                                             static_cast<double>(g)) != fused;
    }
    CHECK(unfused_differs > 500, unfused_differs);
    CHECK(double_differs > 1500, double_differs);
    values.step(rule, {});
    CHECK(values.stepped[1][0] == std::fmaf(values.a[0][0], weight_decay, values.gradient.get(0)));
    check_in_place(values, rule, {}, pool);
}

constexpr LionRule kLion = {1e-2, 0.9, 0.99, 0.1, false};
constexpr AdagradRule kAdagrad = {1e-2, 0.1, 1e-10, 0.01, 3.0, false};
constexpr SgdRule kMomentum = {1e-2, 0.9, 0.3, 0.01, false, false, false};
constexpr SgdRule kPlain = {1e-2, 0.0, 0.0, 0.0, false, false, false};

TEST(lion_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kLion, 2); }

TEST(adagrad_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kAdagrad, 2); }

TEST(sgd_with_momentum_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kMomentum, 2); }

TEST(sgd_of_every_numel_offset_dtype_and_placement) { check_every_numel_and_offset(kPlain, 1); }

constexpr Scale kScales[] = {{}, kScale, {1.0 / 1024.0, 1.0}, {0x1p-140, 0.3}};

template <class Rule>
void check_hyper_parameters(const Rule& rule, std::size_t arrays, std::uint64_t seed) {
    ThreadPool pool(1, {});
    const Scale scale = kScales[seed % 4];
    Expected values = ordinary(arrays, 500, DType::float32, seed);
    values.step(rule, scale);
    check_in_place(values, rule, scale, pool);
}

TEST(lion_of_every_hyper_parameter) {
    std::uint64_t seed = 200;
    for (const double beta1 : {0.0, 0.5, 0.9}) {
        for (const double beta2 : {0.0, 0.99}) {
            for (const double weight_decay : {0.0, 0.1, 1e3}) {
                for (const double lr : {0.0, 1e-42, 1e-4}) {
                    check_hyper_parameters(LionRule{lr, beta1, beta2, weight_decay, seed % 2 == 0}, 2, seed);
                    ++seed;
                }
            }
        }
    }
}

TEST(adagrad_of_every_hyper_parameter) {
    std::uint64_t seed = 300;
    for (const double lr_decay : {0.0, 0.1}) {
        for (const double eps : {0.0, 1e-40, 1e-10}) {
            for (const double weight_decay : {0.0, 0.1}) {
                for (const double step : {1.0, 2.0, 16777216.0}) {
                    for (const double lr : {1e-42, 1e-2}) {
                        check_hyper_parameters(AdagradRule{lr, lr_decay, eps, weight_decay, step, seed % 2 == 0}, 2,
                                               seed);
                        seed += 3;
                    }
                }
            }
        }
    }
}

TEST(sgd_of_every_hyper_parameter) {
    std::uint64_t seed = 400;
    for (const double momentum : {0.0, 0.5, 0.9}) {
        for (const double dampening : {0.0, 0.3, 1.0}) {
            for (const double weight_decay : {0.0, 0.1}) {
                for (const bool nesterov : {false, true}) {
                    for (const bool first : {false, true}) {
                        const double lr = seed % 5 == 0 ? 1e-42 : 1e-2;
                        const SgdRule rule = {lr, momentum, dampening, weight_decay, nesterov, first, seed % 2 == 0};
                        check_hyper_parameters(rule, 2, seed);
                        if (momentum == 0.0) check_hyper_parameters(rule, 1, seed);
                        seed += 3;
                    }
                }
            }
        }
    }
}

TEST(lion_of_every_special_value_and_random_patterns) {
    check_specials_and_patterns(kLion, 2, 7);
    check_specials_and_patterns(LionRule{0.1, 0.5, 0.0, 0.0, true}, 2, 8);
}

TEST(adagrad_of_every_special_value_and_random_patterns) {
    check_specials_and_patterns(kAdagrad, 2, 9);
    check_specials_and_patterns(AdagradRule{0.1, 0.0, 0.0, 0.0, 1.0, true}, 2, 10);
}

TEST(sgd_of_every_special_value_and_random_patterns) {
    for (const bool first : {false, true}) {
        for (const bool nesterov : {false, true}) {
            check_specials_and_patterns(SgdRule{0.1, 0.9, 0.0, 0.1, nesterov, first, false}, 2, 11);
            check_specials_and_patterns(SgdRule{0.1, 0.0, 0.0, 0.0, nesterov, first, true}, 2, 12);
        }
    }
    check_specials_and_patterns(kPlain, 1, 13);
}

// Where rounding a product first would show: in the sum of Adagrad, and in both
// products of SGD with Nesterov's momentum.
TEST(adagrad_and_sgd_fuse_where_it_shows) {
    ThreadPool pool(1, {});
    Random random(14);
    const AdagradRule adagrad = {0.0, 0.0, 1e-10, 0.0, 1.0, false};
    const SgdRule sgd = {0x1.99999ap-1, 0x1.99999ap-1, 0.0, 0.0, true, false, false};
    Expected sums(2, 4096, DType::float32), buffers(2, 4096, DType::float32);
    std::size_t sums_differ = 0, buffers_differ = 0;
    for (std::size_t i = 0; i < sums.numel(); ++i) {
        const float g = random.ordinary(), state = std::fabs(random.ordinary());
        const float product = g * g;
        sums_differ += product + state != std::fmaf(g, g, state);
        sums.a[1][i] = state;
        sums.gradient.set(i, g);
        const float momentum = static_cast<float>(sgd.momentum), kept = state * momentum;
        const float next = g + kept, moved = next * momentum;
        buffers_differ += moved + g != std::fmaf(next, momentum, g);
        buffers.a[1][i] = state;
        buffers.gradient.set(i, g);
    }
    CHECK(sums_differ > 500, sums_differ);
    CHECK(buffers_differ > 500, buffers_differ);
    sums.step(adagrad, {});
    check_in_place(sums, adagrad, {}, pool);
    buffers.step(sgd, {});
    check_in_place(buffers, sgd, {}, pool);
}

// A group without momentum, on a state buffer that has one.
TEST(sgd_without_momentum_keeps_the_buffer_bit_for_bit) {
    Expected values = ordinary(2, 500, DType::float32, 15);
    values.step(kPlain, {});
    CHECK(std::equal(values.a[1].begin(), values.a[1].end(), values.stepped[1].begin(),
                     [](float a, float b) { return bits_of(a) == bits_of(b); }));
    ThreadPool pool(1, {});
    check_in_place(values, kPlain, {}, pool);
}

TEST(muon_of_every_numel_offset_dtype_and_placement) {
    check_every_numel_and_offset(MuonMomentumRule{0.95, true}, 1);
    check_every_numel_and_offset(MuonUpdateRule{2e-2, 0.998}, 1);
}

TEST(muon_of_every_hyper_parameter) {
    std::uint64_t seed = 500;
    for (const double momentum : {0.0, 0.4, 0.5, 0.6, 0.95, 1.0}) {
        for (const bool nesterov : {false, true}) check_hyper_parameters(MuonMomentumRule{momentum, nesterov}, 1, ++seed);
    }
    for (const double lr : {0.0, 1e-42, 2e-2}) {
        for (const double decay : {1.0, 0.998, -3.0}) check_hyper_parameters(MuonUpdateRule{lr, decay}, 1, ++seed);
    }
}

TEST(muon_of_every_special_value_and_random_patterns) {
    for (const bool nesterov : {false, true}) {
        check_specials_and_patterns(MuonMomentumRule{0.95, nesterov}, 1, 16);
        check_specials_and_patterns(MuonMomentumRule{0.4, nesterov, true}, 1, 17);
    }
    check_specials_and_patterns(MuonUpdateRule{0.1, 0.99}, 1, 18);
}

}  // namespace
}  // namespace longshore::testing
