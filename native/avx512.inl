// Blocks in vectors, and conversions by hand for AVX-512, where compilers need many more
// instructions. Each gives the bits of the loop that it replaces. Part of kernels.inl.
#pragma once

namespace longshore {
namespace {
namespace avx512 {

constexpr size_t kLanes = 16;  // of 32 bits
constexpr size_t kVectors = kBlock / kLanes;

// The elements of a block, 32 bits each.
struct Lanes {
    __m512i of[kVectors];
};

LONGSHORE_INLINE Lanes lanes_at(const void* values) {
    const auto* from = static_cast<const char*>(values);
    return {{_mm512_loadu_si512(from), _mm512_loadu_si512(from + 64), _mm512_loadu_si512(from + 128),
             _mm512_loadu_si512(from + 192)}};
}

LONGSHORE_INLINE __m512 floats(const Lanes& lanes, size_t k) { return _mm512_castsi512_ps(lanes.of[k]); }

// Stream: whole lines are written past the caches.
template <bool Stream = false>
LONGSHORE_INLINE void write(void* target, __m512i vector) {
    if constexpr (Stream) {
        if (reinterpret_cast<uintptr_t>(target) % 64 == 0) return _mm512_stream_si512(static_cast<__m512i*>(target), vector);
    }
    _mm512_storeu_si512(target, vector);
}
template <bool Stream = false>
LONGSHORE_INLINE void write(void* target, const Lanes& lanes) {
    for (size_t k = 0; k < kVectors; ++k) write<Stream>(static_cast<char*>(target) + 64 * k, lanes.of[k]);
}

LONGSHORE_INLINE __m512i all_of(uint32_t number) { return _mm512_set1_epi32(static_cast<int>(number)); }

// A constant that is read from memory where it is used, which most instructions do by
// themselves. Of a number in the code, compilers would make a vector each time, with two
// instructions: `used` keeps the number from them.
template <uint32_t Number>
struct Constant {
    [[gnu::used]] static inline uint32_t number = Number;
};
template <uint32_t Number>
LONGSHORE_INLINE __m512i constant() {
    return all_of(Constant<Number>::number);
}
template <uint16_t Number>
LONGSHORE_INLINE __m512i constant_words() {
    return constant<Number * 0x10001u>();
}
template <uint8_t Number>
LONGSHORE_INLINE __m512i constant_bytes() {
    return constant<Number * 0x1010101u>();
}

// Words 0, 2, 4 ... 62, of two vectors: the lower halves of their lanes. One more: the upper halves.
alignas(64) constexpr uint16_t kLowerHalves[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                    32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
alignas(64) constexpr uint16_t kUpperHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
// The word that each upper half is to have: of the lower half of a vector, and of the upper one.
alignas(64) constexpr uint16_t kWidenLower[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                                   0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
alignas(64) constexpr uint16_t kWidenUpper[32] = {0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23,
                                                   0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31};

// The upper halves of 32 elements, and zeros below them: one permutation for 16 elements
// instead of widening and a shift.
LONGSHORE_INLINE Lanes widened(__m512i first, __m512i second) {
    const auto to_upper_halves = [](const uint16_t* places, __m512i words) {
        return _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, _mm512_load_si512(places), words);
    };
    return {{to_upper_halves(kWidenLower, first), to_upper_halves(kWidenUpper, first),
             to_upper_halves(kWidenLower, second), to_upper_halves(kWidenUpper, second)}};
}

// bfloat16 to float32.
LONGSHORE_INLINE Lanes widened_at(const uint16_t* from) {
    return widened(_mm512_loadu_si512(from), _mm512_loadu_si512(from + 2 * kLanes));
}

// float32 to bfloat16, to nearest even. False, and `to` is not to be used: there is infinity or NaN.
LONGSHORE_INLINE bool round_finite(__m512i (&to)[2], const Lanes& values) {
    const __m512i one = constant_words<1>();
    __mmask32 special = 0;
    for (size_t k = 0; k < 2; ++k) {
        const __m512i a = values.of[2 * k], b = values.of[2 * k + 1];
        const __m512i high = _mm512_permutex2var_epi16(a, _mm512_load_si512(kUpperHalves), b);
        const __m512i low = _mm512_permutex2var_epi16(a, _mm512_load_si512(kLowerHalves), b);
        // Half of a unit in the last place, or just below it where the last bit is odd.
        const __m512i half = _mm512_sub_epi16(constant_words<0x8000>(), _mm512_and_si512(high, one));
        to[k] = _mm512_mask_add_epi16(high, _mm512_cmpgt_epu16_mask(low, half), high, one);
        special |= _mm512_cmpge_epu16_mask(_mm512_and_si512(high, constant_words<0x7fff>()), constant_words<0x7f80>());
    }
    return special == 0;
}

// The same, written; False, and nothing is.
LONGSHORE_INLINE bool write_rounded(uint16_t* to, const Lanes& values) {
    __m512i rounded[2];
    if (!round_finite(rounded, values)) return false;
    for (size_t k = 0; k < 2; ++k) write(to + 2 * k * kLanes, rounded[k]);
    return true;
}

// Whether a bfloat16 parameter is its rounded master everywhere. False: perhaps not.
LONGSHORE_INLINE bool nobody_wrote(const uint16_t* parameter, const Lanes& master) {
    __m512i rounded[2];
    if (!round_finite(rounded, master)) return false;
    const __m512i differing = _mm512_or_si512(_mm512_xor_si512(rounded[0], _mm512_loadu_si512(parameter)),
                                              _mm512_xor_si512(rounded[1], _mm512_loadu_si512(parameter + 2 * kLanes)));
    return _mm512_test_epi32_mask(differing, differing) == 0;
}

}  // namespace avx512
}  // namespace
}  // namespace longshore
