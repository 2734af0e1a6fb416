// Conversions and software_fma against arithmetic that is obviously right.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "convert.h"
#include "dispatch.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {
namespace {

struct Format {
    DType dtype;
    int precision;     // bits of significand, the hidden one included
    int min_exponent;  // of the smallest normal number
    double largest;
};

constexpr Format kBFloat16 = {DType::bfloat16, 8, -126, 0x1.fep127};
constexpr Format kFloat16 = {DType::float16, 11, -14, 65504.0};

// A value of the format's grid, which doubles hold exactly, from its 16 bits.
double naive_load(const Format& format, std::uint16_t bits) {
    const int fraction_bits = format.precision - 1;
    const int exponent_field = (bits & 0x7fff) >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent_field == 0x7fff >> fraction_bits) return fraction != 0 ? std::nan("") : sign * HUGE_VAL;
    if (exponent_field == 0) return sign * std::ldexp(fraction, format.min_exponent - fraction_bits);
    return sign * std::ldexp((1 << fraction_bits) + fraction, format.min_exponent + exponent_field - 1 - fraction_bits);
}

// Rounds on the format's grid with nearbyint(), to nearest even by default.
double naive_round(const Format& format, float x) {
    if (x == 0.0f || !std::isfinite(x)) return x;
    const int exponent = std::max(std::ilogb(x), format.min_exponent);
    const double unit = std::ldexp(1.0, exponent - (format.precision - 1));
    const double rounded = std::nearbyint(x / unit) * unit;
    return std::fabs(rounded) > format.largest ? std::copysign(HUGE_VAL, rounded) : rounded;
}

bool same_value(double a, double b) { return (a != a && b != b) || (a == b && std::signbit(a) == std::signbit(b)); }

// Every high half of a float with low halves at and beside each tie of both formats.
std::vector<float> boundary_patterns() {
    constexpr std::uint32_t lows[] = {0,      1,      0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000,
                                      0x3001, 0x7fff, 0x8000, 0x8001, 0xefff, 0xf000, 0xf001, 0xfffe, 0xffff};
    std::vector<float> patterns;
    for (std::uint32_t high = 0; high < 0x10000; ++high) {
        for (const std::uint32_t low : lows) patterns.push_back(float_of(high << 16 | low));
    }
    return patterns;
}

template <class T>
void check_format(const Format& format) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        CHECK(same_value(T::load(half), naive_load(format, half)), name_of(format.dtype), " ", bits, " is ",
              T::load(half), ", not ", naive_load(format, half));
    }
    std::size_t ties = 0;
    for (const float x : boundary_patterns()) {
        const std::uint16_t half = T::round(x);
        const double expected = naive_round(format, x);
        CHECK(same_value(naive_load(format, half), expected), name_of(format.dtype), " of ", x, " is ",
              naive_load(format, half), ", not ", expected);
        CHECK_EQUAL(half >> 15, static_cast<int>(bits_of(x) >> 31), "the sign, also of zeros and NaN, of ", x);
        const int unit_exponent = std::max(std::ilogb(x), format.min_exponent) - (format.precision - 1);
        ties += std::isfinite(x) && x != 0.0f && std::fabs(std::remainder(std::ldexp(x, -unit_exponent), 1.0)) == 0.5;
    }
    CHECK(ties > 10000, "only ", ties, " of the patterns are ties of ", name_of(format.dtype));
}

TEST(bfloat16_load_and_round_at_every_boundary) { check_format<BFloat16>(kBFloat16); }

TEST(float16_load_and_round_at_every_boundary) { check_format<Float16>(kFloat16); }

// The same conversions as vector code: reconcile() rounds, accumulate() loads.
TEST(conversions_of_every_instruction_set) {
    ThreadPool pool(2, {});
    std::vector<float> patterns = boundary_patterns();
    const auto numel = static_cast<std::int64_t>(patterns.size());
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
        std::vector<std::uint16_t> rounded, all(0x10000);
        for (const float x : patterns) {
            rounded.push_back(dtype == DType::bfloat16 ? BFloat16::round(x) : Float16::round(x));
        }
        for (std::size_t bits = 0; bits < all.size(); ++bits) all[bits] = static_cast<std::uint16_t>(bits);
        for (const InstructionSet isa : supported_instruction_sets()) {
            CHECK_EQUAL(reconcile(patterns.data(), rounded.data(), dtype, numel, false, pool, isa), 0, name_of(dtype),
                        " ", name_of(isa));
            std::vector<float> loaded(all.size());
            accumulate(loaded.data(), all.data(), dtype, static_cast<std::int64_t>(all.size()), false, pool, isa);
            for (std::size_t bits = 0; bits < all.size(); ++bits) {
                const float expected = dtype == DType::bfloat16 ? BFloat16::load(all[bits]) : Float16::load(all[bits]);
                CHECK(same(loaded[bits], expected), name_of(dtype), " ", bits, " ", name_of(isa));
            }
        }
    }
}

void check_fma(float a, float b, float c) {
    const float found = software_fma(a, b, c), expected = std::fmaf(a, b, c);
    CHECK(same(found, expected), "fma(", a, ", ", b, ", ", c, ") is ", found, ", not ", expected);
}

TEST(software_fma_of_random_patterns) {
    Random random(1);
    for (int i = 0; i < (kSanitized ? 300000 : 3000000); ++i) {
        const float a = random.pattern(), b = random.pattern();
        check_fma(a, b, random.pattern());
        // Cancellation: an addend within a few units in the last place of the product.
        const float product = a * b;
        check_fma(a, b, -product);
        check_fma(a, b, float_of(bits_of(-product) + static_cast<std::uint32_t>(random.below(7)) - 3u));
        // Exponents close enough that the sum rounds: unlike those of wild patterns.
        const float x = random.ordinary(), y = random.ordinary();
        check_fma(x, y, random.ordinary());
        check_fma(x * 0x1p-70f, y * 0x1p-75f, random.ordinary() * 0x1p-140f);  // denormal sums
    }
}

TEST(software_fma_of_special_values) {
    for (const float a : kSpecials) {
        for (const float b : kSpecials) {
            for (const float c : kSpecials) check_fma(a, b, c);
        }
    }
}

// The product is half a unit in the last place of c, less one part in 2^40 or
// so: too little for a double to see. A sum rounded to double is then a tie, and
// rounding that to float goes to even, away from the true sum where c is odd.
TEST(software_fma_where_double_rounding_would_differ) {
    Random random(2);
    int differ = 0, cases = 0;
    for (int exponent = -127; exponent <= 127; ++exponent) {  // -127: denormal
        const int half_unit = std::max(exponent, -126) - 24;
        for (int i = 0; i < 200; ++i) {
            const auto k = static_cast<float>(1 + random.below(64));
            const float a = std::ldexp(i % 2 == 0 ? 1.0f + k * 0x1p-23f : -1.0f - k * 0x1p-23f, half_unit / 2);
            const float b = std::ldexp(1.0f - k * 0x1p-23f, half_unit - half_unit / 2);
            const auto fraction = static_cast<std::uint32_t>(random.bits() >> 41);
            const float c = float_of(static_cast<std::uint32_t>(exponent + 127) << 23 | fraction | 1u);
            check_fma(a, b, c);
            const auto naive = static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
            differ += naive != std::fmaf(a, b, c);
            ++cases;
        }
    }
    CHECK(differ > cases / 2, "only ", differ, " of ", cases, " cases tell double rounding from one rounding");
}

}  // namespace
}  // namespace longshore::testing
