// Conversions of a block by hand for AVX-512, where compilers need many more instructions.
// Each gives the bits of the loop that it replaces. Those for numbers that are common
// return false for a block that has others, which that loop then takes. Part of kernels.inl.
#pragma once

namespace longshore {
namespace {
namespace avx512 {

constexpr size_t kLanes = 16;  // of 32 bits
constexpr size_t kVectors = kBlock / kLanes;

LONGSHORE_INLINE __m512i bits_at(const void* values, size_t element) {
    return _mm512_loadu_si512(static_cast<const uint32_t*>(values) + element);
}
LONGSHORE_INLINE __m512i all_of(uint32_t number) { return _mm512_set1_epi32(static_cast<int>(number)); }
LONGSHORE_INLINE __m512i all_words_of(uint16_t number) { return _mm512_set1_epi16(static_cast<short>(number)); }

// a | (b & c)
LONGSHORE_INLINE __m512i or_and(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xf8); }

// Words 0, 2, 4 ... 62, of two vectors: the lower halves of their lanes. One more: the upper halves.
alignas(64) constexpr uint16_t kLowerHalves[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                    32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
// The word that each upper half is to have.
alignas(64) constexpr uint16_t kToUpperHalves[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                                      0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
constexpr __mmask32 kUpperHalves = 0xaaaaaaaau;

// bfloat16 to float32: one permutation for 16 elements instead of widening and a shift.
LONGSHORE_INLINE void widen(float* values, const uint16_t* from) {
    const __m512i lower = _mm512_load_si512(kToUpperHalves);
    const __m512i upper = _mm512_add_epi16(lower, all_words_of(kLanes));
    for (size_t i = 0; i < kBlock; i += 2 * kLanes) {
        const __m512i words = _mm512_loadu_si512(from + i);
        _mm512_storeu_si512(values + i, _mm512_maskz_permutexvar_epi16(kUpperHalves, lower, words));
        _mm512_storeu_si512(values + i + kLanes, _mm512_maskz_permutexvar_epi16(kUpperHalves, upper, words));
    }
}

// float32 to bfloat16, to nearest even. False, and nothing is written: there is infinity or NaN.
LONGSHORE_INLINE bool round_finite(uint16_t* to, const float* values) {
    const __m512i lower = _mm512_load_si512(kLowerHalves), one = all_words_of(1);
    const __m512i upper = _mm512_add_epi16(lower, one);
    __m512i rounded[2];
    __mmask32 special = 0;
    for (size_t k = 0; k < 2; ++k) {
        const __m512i a = bits_at(values, 2 * k * kLanes), b = bits_at(values, (2 * k + 1) * kLanes);
        const __m512i high = _mm512_permutex2var_epi16(a, upper, b), low = _mm512_permutex2var_epi16(a, lower, b);
        // Half of a unit in the last place, or just below it where the last bit is odd.
        const __m512i half = _mm512_sub_epi16(all_words_of(0x8000), _mm512_and_si512(high, one));
        rounded[k] = _mm512_mask_add_epi16(high, _mm512_cmpgt_epu16_mask(low, half), high, one);
        special |= _mm512_cmpge_epu16_mask(_mm512_and_si512(high, all_words_of(0x7fff)), all_words_of(0x7f80));
    }
    if (special != 0) return false;
    for (size_t k = 0; k < 2; ++k) _mm512_storeu_si512(to + 2 * k * kLanes, rounded[k]);
    return true;
}

// The 16 random bits of state `State` of 16 elements: in the lower halves.
template <size_t State>
LONGSHORE_INLINE __m512i random_half(__m512i random) {
    return State == 0 ? _mm512_and_si512(random, all_of(0xffff)) : _mm512_srli_epi32(random, 16);
}

// float32 to bfloat16, stochastically. False, and what was written is wrong: a value is
// infinity or NaN, or would become infinity.
template <size_t State>
LONGSHORE_INLINE bool round_at_random(uint16_t* to, const float* values, const uint32_t* random) {
    const __m512i upper = _mm512_add_epi16(_mm512_load_si512(kLowerHalves), all_words_of(1));
    const auto sum = [&](size_t k) {
        return _mm512_add_epi32(bits_at(values, k * kLanes), random_half<State>(bits_at(random, k * kLanes)));
    };
    const __m512i first = _mm512_permutex2var_epi16(sum(0), upper, sum(1));
    const __m512i second = _mm512_permutex2var_epi16(sum(2), upper, sum(3));
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + 2 * kLanes, second);
    const __m512i magnitude = all_words_of(0x7fff);
    const __m512i largest = _mm512_max_epu16(_mm512_and_si512(first, magnitude), _mm512_and_si512(second, magnitude));
    return _mm512_cmpge_epu16_mask(largest, all_words_of(0x7f80)) == 0;
}

// 8 bits to float32. False, and nothing is written: a code is that of infinity or NaN.
template <class Code>
LONGSHORE_INLINE bool decode_regular(float* values, const uint8_t* codes, uint32_t scale) {
    const __m512i all = _mm512_loadu_si512(codes);
    const __m512i number_bits = _mm512_set1_epi8(static_cast<char>(Code::kNan));
    const __m512i infinity = _mm512_set1_epi8(static_cast<char>(Code::kInfinity));
    if (_mm512_cmpge_epu8_mask(_mm512_and_si512(all, number_bits), infinity) != 0) return false;
    const __m512i base = all_of(scale - (Code::kOne << Code::kDropped));
    for (size_t i = 0; i < kBlock; i += kLanes) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m512i code = Code::kSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
        __m512i number = _mm512_slli_epi32(code, Code::kDropped);
        if constexpr (Code::kSigned) number = _mm512_and_si512(number, all_of(Code::kNan << Code::kDropped));
        __m512i bits = _mm512_maskz_add_epi32(_mm512_test_epi32_mask(number, number), number, base);
        if constexpr (Code::kSigned) bits = or_and(bits, code, all_of(0x80000000u));
        _mm512_storeu_si512(values + i, bits);
    }
    return true;
}

// The largest lane, in each lane.
LONGSHORE_INLINE __m512i largest_lane(__m512i x) {
    x = _mm512_max_epu32(x, _mm512_shuffle_i64x2(x, x, 0x4e));
    x = _mm512_max_epu32(x, _mm512_shuffle_i64x2(x, x, 0xb1));
    x = _mm512_max_epu32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
    return _mm512_max_epu32(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
}

// 64 lanes to bytes, in an order that the last permutation mends: packing is within 128 bits.
LONGSHORE_INLINE __m512i in_order(__m512i packed) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
}

// float32 to 8 bits. False, and nothing is written: there is infinity, NaN, a number that is
// so large that its scale is, or one below the smallest code.
template <class Code, size_t State>
LONGSHORE_INLINE bool encode_regular(uint8_t* to, float* scale_to, const float* values, const uint32_t* random) {
    __m512i value[kVectors], magnitude[kVectors], number[kVectors];
    for (size_t k = 0; k < kVectors; ++k) {
        value[k] = bits_at(values, k * kLanes);
        magnitude[k] = Code::kSigned ? _mm512_and_si512(value[k], all_of(0x7fffffff)) : value[k];
    }
    const auto& m = magnitude;
    const __m512i largest =
        largest_lane(_mm512_max_epu32(_mm512_max_epu32(m[0], m[1]), _mm512_max_epu32(m[2], m[3])));
    const __m512i smallest = _mm512_min_epu32(_mm512_min_epu32(m[0], m[1]), _mm512_min_epu32(m[2], m[3]));
    const __m512i one = all_of(1);
    const __m512i exponent = _mm512_srli_epi32(_mm512_sub_epi32(_mm512_max_epu32(largest, one), one), 23);
    const __m512i scale = _mm512_slli_epi32(_mm512_max_epu32(exponent, all_of(Code::kLeastExponent)), 23);
    const __m512i least = _mm512_sub_epi32(scale, all_of((Code::kOne - 1) << Code::kDropped));
    if ((_mm512_cmplt_epu32_mask(smallest, least) | _mm512_cmpge_epu32_mask(largest, all_of(Code::kLargestScale))) != 0) {
        return false;
    }
    for (size_t k = 0; k < kVectors; ++k) {
        const __m512i bits = bits_at(random, k * kLanes);
        constexpr unsigned shift = Code::kDropped - 16;
        const __m512i moved = State == 0 ? _mm512_slli_epi32(bits, shift) : _mm512_srli_epi32(bits, 16 - shift);
        const __m512i added = or_and(all_of(1u << (shift - 1)), moved, all_of(0xffffu << shift));
        number[k] = _mm512_srli_epi32(_mm512_add_epi32(magnitude[k], added), Code::kDropped);
    }
    const __m512i base = _mm512_sub_epi32(_mm512_srli_epi32(scale, Code::kDropped), all_of(Code::kOne));
    const __m512i base_words = _mm512_packs_epi32(base, base);
    const auto words = [&](const __m512i* lanes) { return _mm512_packs_epi32(lanes[0], lanes[1]); };
    __m512i bytes = _mm512_packus_epi16(_mm512_sub_epi16(words(number), base_words),
                                        _mm512_sub_epi16(words(number + 2), base_words));
    if constexpr (Code::kSigned) {  // packing with saturation keeps the sign
        const __m512i signs = _mm512_packs_epi16(words(value), words(value + 2));
        bytes = or_and(bytes, signs, _mm512_set1_epi8(static_cast<char>(0x80)));
    }
    _mm512_storeu_si512(to, in_order(bytes));
    _mm_store_ss(scale_to, _mm512_castps512_ps128(_mm512_castsi512_ps(scale)));
    return true;
}

}  // namespace avx512
}  // namespace
}  // namespace longshore
