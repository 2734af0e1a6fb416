// float <-> bfloat16 and float16, round to nearest even, NaN kept.
//
// Integer arithmetic without branches, so that a compiler turns the loops over
// it into vector code for any instruction set, with the same bits on each.
// Everything has internal linkage: the file is compiled several times with
// different flags, and the linker must never mix the results.
#pragma once

#include <stdint.h>

// The compiler's own limit on how much a file may grow by inlining would leave
// some loops with calls in them, which then are no vector code.
#define LONGSHORE_INLINE [[gnu::always_inline]] inline

namespace longshore {
namespace {

LONGSHORE_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
LONGSHORE_INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct Float32 {
    using Storage = float;
    LONGSHORE_INLINE static float load(Storage x) { return x; }
    LONGSHORE_INLINE static Storage round(float x) { return x; }
    LONGSHORE_INLINE static uint32_t bits(Storage x) { return bits_of(x); }
};

struct BFloat16 {
    using Storage = uint16_t;
    LONGSHORE_INLINE static float load(Storage x) { return float_of(static_cast<uint32_t>(x) << 16); }
    LONGSHORE_INLINE static Storage round(float x) {
        const uint32_t u = bits_of(x);
        const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        const uint32_t quiet_nan = (u >> 16) | 0x40u;
        return static_cast<Storage>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
    }
    LONGSHORE_INLINE static uint32_t bits(Storage x) { return x; }
};

struct Float16 {
    using Storage = uint16_t;
    LONGSHORE_INLINE static float load(Storage x) {
        const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
        const uint32_t magnitude = x & 0x7fffu;
        // Re-bias the exponent by 112; infinity and NaN (exponent 31) by 224.
        const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
        const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
        return float_of(sign | (magnitude < 0x400u ? subnormal : normal));
    }
    LONGSHORE_INLINE static Storage round(float x) {
        const uint32_t u = bits_of(x);
        const uint32_t sign = (u >> 16) & 0x8000u;
        const uint32_t magnitude = u & 0x7fffffffu;
        // 65520 and above carry into the exponent and become infinity by themselves.
        const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // One unit in the last place of 0.5f is the smallest float16: adding
        // 0.5 makes the adder round to it.
        const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        const uint32_t special = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x3ffu)) : 0x7c00u;
        uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
        result = magnitude >= 0x47800000u ? special : result;
        return static_cast<Storage>(sign | result);
    }
    LONGSHORE_INLINE static uint32_t bits(Storage x) { return x; }
};

// fma(a, b, c) rounded once, without an fma instruction (the method of Boldo
// and Melquiond, "Emulation of FMA and correctly rounded sums: proved
// algorithms using rounding to odd", IEEE Trans. Computers 57(4), 2008). The
// product of two floats is exact in double. The sum is rounded to odd there:
// TwoSum gives the error, and where it is not zero the last bit is made sticky.
// 53 bits are more than 24 + 2, so rounding to float afterwards is correct.
LONGSHORE_INLINE float software_fma(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double addend = static_cast<double>(c);
    const double sum = product + addend;
    const double addend_part = sum - product;
    const double error = (product - (sum - addend_part)) + (addend - addend_part);
    uint64_t bits = __builtin_bit_cast(uint64_t, sum);
    const bool inexact = error > 0.0 || error < 0.0;  // false for NaN: infinities stay
    const bool even = (bits & 1u) == 0;
    const bool away = (error > 0.0) == (sum > 0.0);  // the true sum is larger in magnitude
    bits += inexact && even ? (away ? uint64_t{1} : ~uint64_t{0}) : uint64_t{0};
    return static_cast<float>(__builtin_bit_cast(double, bits));
}

// scripts/aarch64/code.py defines it as 0: what is fused then, the compiler has contracted.
#if !defined(LONGSHORE_HAS_FMA)
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
#define LONGSHORE_HAS_FMA 1
#else
#define LONGSHORE_HAS_FMA 0
#endif
#endif

#if LONGSHORE_HAS_FMA
LONGSHORE_INLINE float fma_once(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
LONGSHORE_INLINE float fma_once(float a, float b, float c) { return software_fma(a, b, c); }
#endif

}  // namespace
}  // namespace longshore
