// Accumulate, reconcile and block_sums against scalar loops.
#include "buffers.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {
namespace {

// Ordinary values, with a special one now and then.
Buffer filled(DType dtype, std::size_t numel, std::size_t offset, std::uint64_t seed) {
    Random random(seed);
    Buffer buffer(dtype, numel, offset);
    for (std::size_t i = 0; i < numel; ++i) {
        buffer.set(i, random.below(8) == 0 ? kSpecials[static_cast<std::size_t>(random.below(kSpecials.size()))]
                                           : random.ordinary());
    }
    return buffer;
}

std::vector<std::size_t> numels() {
    std::vector<std::size_t> all;
    for (std::size_t numel = 0; numel <= 150; ++numel) all.push_back(numel);
    all.push_back(2 * static_cast<std::size_t>(kPieceNumel) + 77);
    return all;
}

// Small sizes at every misalignment of source and target, and one of several pieces.
void for_each_layout(const std::function<void(std::size_t numel, std::size_t offset, std::size_t other)>& body) {
    for (const std::size_t numel : numels()) {
        if (numel > 1000) {
            body(numel, 1, 3);
            continue;
        }
        for (std::size_t offset = 0; offset <= 16; offset += kSanitized ? 5 : 1) {
            body(numel, offset, (3 * offset + numel) % 17);
        }
    }
}

TEST(accumulate_adds_and_widens_on_threads) {
    ThreadPool pool(2, {});
    for (const DType dtype : kDTypes) {
        for_each_layout([&](std::size_t numel, std::size_t offset, std::size_t other) {
            const Buffer source = filled(dtype, numel, other, numel + 1), before = filled(DType::float32, numel, offset, 2);
            Buffer sum = before, copy = before;
            for (std::size_t i = 0; i < numel; ++i) {
                sum.set(i, canonical(before.get(i) + source.get(i)));
                copy.set(i, source.get(i));
            }
            for (const InstructionSet isa : supported_instruction_sets()) {
                for (const bool add : {true, false}) {
                    Buffer target = before, untouched = source;
                    accumulate(target.floats(), untouched.at(0), dtype, static_cast<std::int64_t>(numel), add, pool, isa);
                    target.check_same(add ? sum : copy, longshore::name_of(isa), ", ", name_of(dtype), ", add: ", add);
                    untouched.check_same(source, "the gradient");
                }
            }
        });
    }
}

TEST(sum_of_two_adds_on_threads) {
    ThreadPool pool(2, {});
    for (const DType dtype : kDTypes) {
        for_each_layout([&](std::size_t numel, std::size_t offset, std::size_t other) {
            const Buffer first = filled(dtype, numel, other, numel + 1), second = filled(dtype, numel, offset, numel + 2);
            Buffer sum = filled(DType::float32, numel, offset, 2);
            const Buffer before = sum;
            for (std::size_t i = 0; i < numel; ++i) sum.set(i, canonical(first.get(i) + second.get(i)));
            for (const InstructionSet isa : supported_instruction_sets()) {
                Buffer target = before, one = first, two = second;
                sum_of_two(target.floats(), one.at(0), two.at(0), dtype, static_cast<std::int64_t>(numel), pool, isa);
                target.check_same(sum, longshore::name_of(isa), ", ", name_of(dtype));
                one.check_same(first, "the first gradient");
                two.check_same(second, "the gradient");
            }
        });
    }
}

// A parameter that is its rounded master except where it was written to: every
// seventh element, a zero of the other sign, a NaN of another payload.
TEST(reconcile_counts_and_adopts_what_differs_on_threads) {
    ThreadPool pool(2, {});
    for (const DType dtype : kDTypes) {
        for_each_layout([&](std::size_t numel, std::size_t offset, std::size_t other) {
            const Buffer before = filled(DType::float32, numel, offset, numel + 3);
            Buffer parameter(dtype, numel, other), adopted = before;
            std::int64_t expected = 0;
            for (std::size_t i = 0; i < numel; ++i) {
                const float master = before.get(i);
                parameter.set(i, master);
                const float rounded = parameter.get(i);
                if (i % 7 == 3) parameter.set(i, rounded == 2.0f ? 3.0f : 2.0f);
                if (rounded == 0.0f && i % 2 == 0) parameter.set(i, -rounded);
                const float now = parameter.get(i);
                if (bits_of(now) != bits_of(rounded)) {
                    ++expected;
                    adopted.set(i, now);
                }
            }
            for (const InstructionSet isa : supported_instruction_sets()) {
                for (const bool adopt : {false, true}) {
                    Buffer master = before;
                    const Buffer untouched = parameter;
                    const auto count = static_cast<std::int64_t>(numel);
                    CHECK_EQUAL(reconcile(master.floats(), parameter.at(0), dtype, count, adopt, pool, isa), expected,
                                longshore::name_of(isa), ", ", name_of(dtype), ", numel ", numel);
                    master.check_same(adopt ? adopted : before, longshore::name_of(isa), ", adopt: ", adopt);
                    parameter.check_same(untouched, "the parameter");
                    CHECK_EQUAL(reconcile(master.floats(), parameter.at(0), dtype, count, false, pool, isa),
                                adopt ? 0 : expected, "afterwards");
                }
            }
        });
    }
}

TEST(reconcile_compares_bits) {
    ThreadPool pool(1, {});
    for (const InstructionSet isa : supported_instruction_sets()) {
        float master[] = {0.0f, kNaN, kNaN, 1.0f, 0x1p-149f};
        const float parameter[] = {-0.0f, kNaN, float_of(0x7fc00001u), 1.0f, 0.0f};
        CHECK_EQUAL(reconcile(master, parameter, DType::float32, 5, true, pool, isa), 3);
        CHECK_EQUAL(std::memcmp(master, parameter, sizeof master), 0, longshore::name_of(isa));
        // The master's own NaN comes back rounded as the same NaN, so it is not adopted.
        float kept[] = {float_of(0x7fc00123u), float_of(0xffc00123u), 1.0f + 0x1p-20f};
        const std::uint16_t bfloat16[] = {0x7fc0, 0xffc0, 0x3f80}, float16[] = {0x7e00, 0xfe00, 0x3c00};
        CHECK_EQUAL(reconcile(kept, bfloat16, DType::bfloat16, 3, true, pool, isa), 0);
        CHECK_EQUAL(reconcile(kept, float16, DType::float16, 3, true, pool, isa), 0);
        CHECK_EQUAL(bits_of(kept[2]), bits_of(1.0f + 0x1p-20f), "a master keeps what its parameter rounds away");
    }
}

// Sums by lane (offset modulo kNormLanes) within blocks of kPieceNumel, then
// over lanes, blocks and parameters: the order that the header promises.
double naive_sum_of_squares(const std::vector<std::vector<float>>& parameters, Scale scale) {
    double total = 0.0;
    for (const std::vector<float>& values : parameters) {
        for (std::size_t begin = 0; begin < values.size(); begin += static_cast<std::size_t>(kPieceNumel)) {
            double lanes[kNormLanes] = {};
            for (std::size_t i = begin; i < values.size() && i < begin + static_cast<std::size_t>(kPieceNumel); ++i) {
                const float scaled = values[i] * static_cast<float>(scale.first);
                const double x = scaled * static_cast<float>(scale.second);
                lanes[i % kNormLanes] += x * x;
            }
            double sum = 0.0;
            for (const double lane : lanes) sum += lane;
            total += sum;
        }
    }
    return total;
}

double sum_of_squares(const std::vector<std::vector<GradientRange>>& parameters, Scale scale, ThreadPool& pool,
                      InstructionSet isa) {
    double total = 0.0;
    for (const auto& sums : block_sums(parameters, scale, pool, isa)) {
        for (const double sum : sums) total += sum;
    }
    return total;
}

struct Gradients {
    std::vector<std::vector<float>> values;
    std::vector<Buffer> buffers;

    explicit Gradients(const std::vector<std::size_t>& sizes, std::uint64_t seed = 20) {
        Random random(seed);
        for (const std::size_t numel : sizes) {
            buffers.emplace_back(kDTypes[random.below(3)], numel, static_cast<std::size_t>(random.below(17)));
            for (std::size_t i = 0; i < numel; ++i) buffers.back().set(i, random.ordinary());
            auto& row = values.emplace_back();
            for (std::size_t i = 0; i < numel; ++i) row.push_back(buffers.back().get(i));
        }
    }

    // Each parameter in consecutive pieces of 0 to `longest` elements.
    std::vector<std::vector<GradientRange>> cut(std::int64_t longest, Random& random) const {
        std::vector<std::vector<GradientRange>> parameters;
        for (const Buffer& buffer : buffers) {
            auto& pieces = parameters.emplace_back();
            for (std::int64_t at = 0; at < static_cast<std::int64_t>(buffer.numel());) {
                const std::int64_t count = std::min(random.below(longest + 1), static_cast<std::int64_t>(buffer.numel()) - at);
                pieces.push_back({buffer.at(static_cast<std::size_t>(at)), buffer.dtype(), count});
                at += count;
            }
        }
        return parameters;
    }
};

TEST(sum_of_squares_for_any_cut_and_threads) {
    const auto piece = static_cast<std::size_t>(kPieceNumel);
    const Gradients gradients({1, 15, 16, 17, 0, 1000, piece - 1, piece, 2 * piece + 5, 33});
    for (const Scale scale : {Scale{}, Scale{0.7, 1.0 / 3.0}}) {
        const double expected = naive_sum_of_squares(gradients.values, scale);
        Random random(21);
        for (const int threads : {1, 2, 3, 7}) {
            ThreadPool pool(threads, {});
            for (const InstructionSet isa : supported_instruction_sets()) {
                for (const std::int64_t longest : {std::int64_t{1} << 40, kPieceNumel, std::int64_t{997}, std::int64_t{5}}) {
                    CHECK_EQUAL(sum_of_squares(gradients.cut(longest, random), scale, pool, isa), expected,
                                longshore::name_of(isa), ", ", threads, " threads, pieces of at most ", longest);
                }
            }
        }
    }
}

// The order of addition shows: added in plain order, these numbers give another sum.
TEST(sum_of_squares_order_is_that_of_the_header) {
    const Gradients gradients({100000});
    double plain = 0.0;
    for (const float x : gradients.values[0]) plain += static_cast<double>(x) * static_cast<double>(x);
    CHECK(plain != naive_sum_of_squares(gradients.values, {}));
    CHECK(std::fabs(plain / naive_sum_of_squares(gradients.values, {}) - 1.0) < 1e-12);
}

TEST(sum_of_squares_of_nothing_and_of_what_is_not_finite) {
    ThreadPool pool(2, {});
    for (const InstructionSet isa : supported_instruction_sets()) {
        CHECK_EQUAL(sum_of_squares({}, {}, pool, isa), 0.0);
        CHECK_EQUAL(sum_of_squares({{}, {{nullptr, DType::float32, 0}}}, {}, pool, isa), 0.0);
        for (std::size_t at = 0; at < 70; ++at) {
            std::vector<float> values(70, 1.0f);
            const auto sum = [&](Scale scale) {
                return sum_of_squares({{{values.data(), DType::float32, 70}}}, scale, pool, isa);
            };
            values[at] = -kInfinity;
            CHECK_EQUAL(sum({}), HUGE_VAL, at);
            values[at] = kNaN;
            CHECK(std::isnan(sum({})), at);
            values[at] = 0x1p127f;  // its square is beyond a float, not beyond a double
            CHECK_EQUAL(sum({}), 0x1p254, at);
            values[at] = 0x1p-149f;  // its square is below a float
            CHECK_EQUAL(sum({}), 69.0, at);
            CHECK(sum({0.0, 1.0}) == 0.0, at);
        }
        const float denormal[] = {0x1p-149f, -0x1p-140f};
        CHECK_EQUAL(sum_of_squares({{{denormal, DType::float32, 2}}}, {}, pool, isa), 0x1p-298 + 0x1p-280);
    }
}

TEST(buffers_keep_denormals_under_flush_to_zero) {
    if (!FlushToZero::known()) return;
    for (const std::size_t numel : {std::size_t{100}, 3 * static_cast<std::size_t>(kPieceNumel)}) {
        Buffer source(DType::float32, numel), twice(DType::float32, numel), half(DType::float16, numel);
        for (std::size_t i = 0; i < numel; ++i) {
            source.set(i, 0x1p-140f);
            twice.set(i, 0x1p-139f);
            half.set(i, 0x1p-24f);  // float16 denormals are made by arithmetic
        }
        const auto count = static_cast<std::int64_t>(numel);
        FlushToZero mode;
        CHECK(flushes());
        ThreadPool pool(2, {});
        for (const InstructionSet isa : supported_instruction_sets()) {
            Buffer target = source, widened(DType::float32, numel);
            accumulate(target.floats(), source.at(0), DType::float32, count, true, pool, isa);
            target.check_same(twice, longshore::name_of(isa));
            accumulate(widened.floats(), half.at(0), DType::float16, count, false, pool, isa);
            CHECK_EQUAL(reconcile(widened.floats(), half.at(0), DType::float16, count, false, pool, isa), 0);
            const double sum = sum_of_squares({{{source.at(0), DType::float32, count}}}, {}, pool, isa);
            CHECK_EQUAL(sum, static_cast<double>(numel) * 0x1p-280, longshore::name_of(isa));
        }
        CHECK(FlushToZero::active() && flushes(), "the caller lost its own mode");
    }
}

TEST(buffers_refuse_before_they_write) {
    ThreadPool pool(2, {});
    const InstructionSet isa = InstructionSet::baseline;
    Buffer target(DType::float32, 8), source(DType::bfloat16, 8);
    const Buffer before = target;
    float* unaligned = reinterpret_cast<float*>(static_cast<char*>(target.at(0)) + 2);
    const void* odd = static_cast<const char*>(source.at(0)) + 1;
    const DType bf16 = DType::bfloat16, unknown = static_cast<DType>(4);
    using Bad = std::invalid_argument;
    CHECK_THROWS(Bad, "a buffer of -1 elements", accumulate(target.floats(), source.at(0), bf16, -1, true, pool, isa));
    CHECK_THROWS(Bad, "the accumulator is a null", accumulate(nullptr, source.at(0), bf16, 8, true, pool, isa));
    CHECK_THROWS(Bad, "the accumulator is not aligned", accumulate(unaligned, source.at(0), bf16, 4, true, pool, isa));
    CHECK_THROWS(Bad, "the first gradient is a null", sum_of_two(target.floats(), nullptr, source.at(0), bf16, 8, pool, isa));
    CHECK_THROWS(Bad, "the gradient is a null", sum_of_two(target.floats(), source.at(0), nullptr, bf16, 8, pool, isa));
    CHECK_THROWS(Bad, "the gradient is a null", accumulate(target.floats(), nullptr, bf16, 8, true, pool, isa));
    CHECK_THROWS(Bad, "the gradient is not aligned", accumulate(target.floats(), odd, bf16, 4, false, pool, isa));
    CHECK_THROWS(Bad, "unknown dtype 4", accumulate(target.floats(), source.at(0), unknown, 8, true, pool, isa));
    CHECK_THROWS(Bad, "unknown dtype 0", accumulate(target.floats(), source.at(0), DType::none, 8, true, pool, isa));
    CHECK_THROWS(Bad, "unknown instruction set",
                 accumulate(target.floats(), source.at(0), bf16, 8, true, pool, static_cast<InstructionSet>(9)));
    CHECK_THROWS(Bad, "a buffer of -1 elements", reconcile(target.floats(), source.at(0), bf16, -1, true, pool, isa));
    CHECK_THROWS(Bad, "the master is a null", reconcile(nullptr, source.at(0), bf16, 8, true, pool, isa));
    CHECK_THROWS(Bad, "the master is not aligned", reconcile(unaligned, source.at(0), bf16, 4, true, pool, isa));
    CHECK_THROWS(Bad, "the parameter is a null", reconcile(target.floats(), nullptr, bf16, 8, true, pool, isa));
    CHECK_THROWS(Bad, "the parameter is not aligned", reconcile(target.floats(), odd, bf16, 4, true, pool, isa));
    CHECK_THROWS(Bad, "unknown dtype 4", reconcile(target.floats(), source.at(0), unknown, 8, true, pool, isa));
    CHECK_THROWS(Bad, "a buffer of -1 elements", sum_of_squares({{{source.at(0), bf16, -1}}}, {}, pool, isa));
    CHECK_THROWS(Bad, "the gradient is a null", sum_of_squares({{{nullptr, bf16, 8}}}, {}, pool, isa));
    CHECK_THROWS(Bad, "the gradient is not aligned", sum_of_squares({{{odd, bf16, 4}}}, {}, pool, isa));
    CHECK_THROWS(Bad, "unknown dtype 4", sum_of_squares({{{source.at(0), unknown, 8}}}, {}, pool, isa));
    target.check_same(before);
    accumulate(nullptr, nullptr, bf16, 0, true, pool, isa);  // no elements: no address is needed
    CHECK_EQUAL(reconcile(nullptr, nullptr, bf16, 0, true, pool, isa), 0);
}

}  // namespace
}  // namespace longshore::testing
