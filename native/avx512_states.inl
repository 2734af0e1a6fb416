// A step with encoded states by hand for AVX-512: a block stays in registers from its loads
// to its stores. Where it has values that are not common, the general code of states.inl
// takes their place. Part of states.inl.
#pragma once

namespace longshore {
namespace {
namespace avx512 {

// (bits & mask) | more
LONGSHORE_INLINE __m512i and_or(__m512i bits, __m512i mask, __m512i more) {
    return _mm512_ternarylogic_epi32(bits, mask, more, 0xea);
}

// As `random_bits`, with the same bits: a shift of what lanes have in common is computed
// once for all of them. `Whole`: the place is a multiple of the block.
template <bool Whole>
LONGSHORE_INLINE Lanes random_lanes(uint64_t key, uint64_t place) {
    const uint32_t low = static_cast<uint32_t>(place), first = static_cast<uint32_t>(key);
    const uint32_t second = static_cast<uint32_t>(key >> 32) + static_cast<uint32_t>(place >> 32) * 0x9e3779b9u;
    const auto folded = [](uint32_t x, int shift) { return x ^ (x >> shift); };
    const auto fold = [](__m512i x, int shift, __m512i common) {
        return _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, shift), common, 0x96);  // the xor of three
    };
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    Lanes random;
    for (size_t k = 0; k < kVectors; ++k) {
        const __m512i element = _mm512_add_epi32(lanes, all_of(static_cast<uint32_t>(k * kLanes)));
        __m512i x = Whole ? _mm512_xor_si512(element, all_of(folded(low ^ first, 16)))
                          : fold(_mm512_add_epi32(element, all_of(low)), 16, all_of(folded(first, 16)));
        x = fold(_mm512_mullo_epi32(x, constant<0x21f0aaadu>()), 15, all_of(folded(second, 15)));
        x = _mm512_mullo_epi32(x, constant<0x735a2d97u>());
        random.of[k] = _mm512_xor_si512(x, _mm512_srli_epi32(x, 15));
    }
    return random;
}

// For functions that are not inlined. Lanes whose address they had would be in memory for
// all blocks.
struct Stored {
    alignas(64) float values[kBlock];
    alignas(64) uint32_t random[kBlock];

    LONGSHORE_INLINE Stored(const Lanes& value_lanes, const Lanes& random_lanes) {
        write(values, value_lanes);
        write(random, random_lanes);
    }
};

// Loads and stores of the states of a block. A rule with one state has it as the first and
// as the last. A store calls `store_master` for the vectors 2 and 3 on its way.
template <class Format>
struct InLanes;

template <>
struct InLanes<BFloat16States> {
    static constexpr bool kWholeBlocks = false;

    template <bool NeverNegative>
    LONGSHORE_INLINE static Lanes load(const EncodedStates& states, size_t state, size_t at) {
        return widened_at(static_cast<const uint16_t*>(states.in[state]) + at);
    }

    template <class Rule, bool Stream, class StoreMaster>
    LONGSHORE_INLINE static void store(const EncodedStates& states, size_t at, const Lanes& first, const Lanes& last,
                                       const Lanes& random, const StoreMaster& store_master) {
        store_one<0, Stream>(states, at, first, random);
        store_master(2);
        if constexpr (Rule::kArrays == 3) store_one<1, Stream>(states, at, last, random);
        store_master(3);
    }

    template <size_t State>
    [[gnu::cold, gnu::noinline]] static void bfloat16_any(uint16_t* to, const float* values, const uint32_t* random) {
        for (size_t i = 0; i < kBlock; ++i) to[i] = bfloat16_of(values[i], half_of<State>(random[i]));
    }

    template <size_t State, bool Stream>
    LONGSHORE_INLINE static void store_one(const EncodedStates& states, size_t at, const Lanes& value, const Lanes& random) {
        auto* to = static_cast<uint16_t*>(states.out[State]) + at;
        const __m512i upper = _mm512_load_si512(kUpperHalves);
        const auto sum = [&](size_t k) {
            const __m512i bits = random.of[k];
            const __m512i half = State == 0 ? _mm512_and_si512(bits, constant<0xffffu>()) : _mm512_srli_epi32(bits, 16);
            return _mm512_add_epi32(value.of[k], half);
        };
        const __m512i a = _mm512_permutex2var_epi16(sum(0), upper, sum(1));
        const __m512i b = _mm512_permutex2var_epi16(sum(2), upper, sum(3));
        const __m512i magnitude = constant_words<0x7fff>();
        const __m512i largest = _mm512_max_epu16(_mm512_and_si512(a, magnitude), _mm512_and_si512(b, magnitude));
        // Infinity, or what would become it, or NaN; of some NaN the sum is a small number.
        const auto nan = [&](size_t k) {
            return _mm512_cmp_ps_mask(floats(value, k), floats(value, k + 1), _CMP_UNORD_Q);
        };
        if ((_mm512_cmpge_epu16_mask(largest, constant_words<0x7f80>()) | nan(0) | nan(2)) != 0) {
            const Stored stored(value, random);
            return bfloat16_any<State>(to, stored.values, stored.random);
        }
        write<Stream>(to, a);
        write<Stream>(to + 2 * kLanes, b);
    }
};

template <>
struct InLanes<EightBitStates> {
    static constexpr bool kWholeBlocks = true;

    template <bool NeverNegative>
    [[gnu::cold, gnu::noinline]] static void decode_any(float* values, const uint8_t* codes, uint32_t scale) {
        for (size_t i = 0; i < kBlock; ++i) values[i] = ByteCode<NeverNegative>::template decode<false>(codes[i], scale);
    }

    // The bits of a number are those of its upper half.
    template <bool NeverNegative>
    LONGSHORE_INLINE static Lanes load(const EncodedStates& states, size_t state, size_t at) {
        using Code = ByteCode<NeverNegative>;
        const auto* codes = static_cast<const uint8_t*>(states.in[state]) + at;
        const uint32_t scale = bits_of(states.scales_in[state][at / kBlock]);
        const __m512i numbers = _mm512_and_si512(_mm512_loadu_si512(codes), constant_bytes<Code::kNan>());
        if (_mm512_cmpge_epu8_mask(numbers, constant_bytes<Code::kInfinity>()) != 0) {
            alignas(64) float values[kBlock];
            decode_any<NeverNegative>(values, codes, scale);
            return lanes_at(values);
        }
        constexpr uint32_t shift = Code::kDropped - 16, number_mask = Code::kNan << shift;
        const __m512i base = all_of(((scale - (Code::kOne << Code::kDropped)) >> 16) * 0x10001u);
        const auto upper_halves = [&](size_t half) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + half * kBlock / 2));
            const __m512i code = NeverNegative ? _mm512_cvtepu8_epi16(bytes) : _mm512_cvtepi8_epi16(bytes);
            __m512i number = _mm512_slli_epi16(code, shift);
            if constexpr (!NeverNegative) number = _mm512_and_si512(number, constant_words<0x8000u | number_mask>());
            const __mmask32 not_zero = _mm512_test_epi16_mask(number, constant_words<number_mask>());
            return _mm512_mask_add_epi16(number, not_zero, number, base);
        };
        return widened(upper_halves(0), upper_halves(1));
    }

    template <bool NeverNegative>
    LONGSHORE_INLINE static Lanes magnitudes(Lanes value) {
        if constexpr (!NeverNegative) {
            for (__m512i& each : value.of) each = _mm512_and_si512(each, constant<0x7fffffffu>());
        }
        return value;
    }

    // The bits of the scale of `first` in the lower half, and of that of `last` in the upper
    // one. Without a number but zero it is more than that of any number.
    LONGSHORE_INLINE static __m512i scales_of(const Lanes& first, const Lanes& last) {
        const auto largest = [](const __m512i(&m)[kVectors]) {
            return _mm512_max_epu32(_mm512_max_epu32(m[0], m[1]), _mm512_max_epu32(m[2], m[3]));
        };
        const __m512i a = largest(first.of), b = largest(last.of);
        __m512i x = _mm512_max_epu32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
        x = _mm512_max_epu32(x, _mm512_shuffle_i64x2(x, x, 0xb1));
        x = _mm512_max_epu32(x, _mm512_shuffle_epi32(x, _MM_PERM_BADC));
        x = _mm512_max_epu32(x, _mm512_shuffle_epi32(x, _MM_PERM_CDAB));
        x = _mm512_and_si512(_mm512_add_epi32(x, constant<~0u>()), constant<0xff800000u>());
        return _mm512_max_epu32(x, constant<ByteCode<true>::kLeastExponent << 23>());
    }

    // Which lanes have a number below the smallest code.
    template <class Code>
    LONGSHORE_INLINE static __mmask16 too_small(const __m512i (&m)[kVectors], __m512i scale) {
        const __m512i smallest = _mm512_min_epu32(_mm512_min_epu32(m[0], m[1]), _mm512_min_epu32(m[2], m[3]));
        const __m512i least = _mm512_sub_epi32(scale, constant<(Code::kOne - 1) << Code::kDropped>());
        return _mm512_cmplt_epu32_mask(smallest, least);
    }

    template <class Rule, bool Stream, class StoreMaster>
    LONGSHORE_INLINE static void store(const EncodedStates& states, size_t at, const Lanes& first, const Lanes& last,
                                       const Lanes& random, const StoreMaster& store_master) {
        constexpr size_t end = Rule::kArrays - 1;
        constexpr bool first_has_no_sign = never_negative<Rule, 1>(), last_has_no_sign = never_negative<Rule, end>();
        const Lanes first_magnitude = magnitudes<first_has_no_sign>(first);
        const Lanes last_magnitude = magnitudes<last_has_no_sign>(last);
        const __m512i scales = scales_of(first_magnitude, last_magnitude);
        const __m512i first_scale = _mm512_shuffle_i64x2(scales, scales, 0x00);
        const __m512i last_scale = _mm512_shuffle_i64x2(scales, scales, 0xff);
        __mmask16 special = _mm512_cmpge_epu32_mask(scales, constant<ByteCode<true>::kLargestScale>());
        special |= too_small<ByteCode<first_has_no_sign>>(first_magnitude.of, first_scale);
        if constexpr (end == 2) special |= too_small<ByteCode<last_has_no_sign>>(last_magnitude.of, last_scale);
        store_master(2);
        if (special != 0) {
            store_any<0, first_has_no_sign>(states, at, Stored(first, random));
            if constexpr (end == 2) store_any<1, last_has_no_sign>(states, at, Stored(last, random));
            return store_master(3);
        }
        store_one<0, first_has_no_sign, Stream>(states, at, first, first_magnitude, first_scale, random);
        store_master(3);
        if constexpr (end == 2) {
            store_one<1, last_has_no_sign, Stream>(states, at, last, last_magnitude, last_scale, random);
        }
    }

    template <size_t State, bool NeverNegative>
    [[gnu::cold, gnu::noinline]] static void store_any(const EncodedStates& states, size_t at, const Stored& stored) {
        encode_any<ByteCode<NeverNegative>, State>(static_cast<uint8_t*>(states.out[State]) + at,
                                                   states.scales_out[State] + at / kBlock, stored.values, stored.random);
    }

    template <size_t State, bool NeverNegative, bool Stream>
    LONGSHORE_INLINE static void store_one(const EncodedStates& states, size_t at, const Lanes& value, const Lanes& magnitude,
                                           __m512i scale, const Lanes& random) {
        using Code = ByteCode<NeverNegative>;
        constexpr uint32_t shift = Code::kDropped - 16;
        __m512i number[kVectors];
        for (size_t k = 0; k < kVectors; ++k) {
            const __m512i bits = random.of[k];
            const __m512i moved = State == 0 ? _mm512_slli_epi32(bits, shift) : _mm512_srli_epi32(bits, 16 - shift);
            const __m512i added = and_or(moved, constant<(0xffffu << shift)>(), constant<(1u << (shift - 1))>());
            number[k] = _mm512_srli_epi32(_mm512_add_epi32(magnitude.of[k], added), Code::kDropped);
        }
        const __m512i base = _mm512_sub_epi32(_mm512_srli_epi32(scale, Code::kDropped), constant<Code::kOne>());
        const __m512i base_words = _mm512_packs_epi32(base, base);
        const auto words = [](const __m512i* lanes) { return _mm512_packs_epi32(lanes[0], lanes[1]); };
        __m512i bytes = _mm512_packus_epi16(_mm512_sub_epi16(words(number), base_words),
                                            _mm512_sub_epi16(words(number + 2), base_words));
        if constexpr (!NeverNegative) {  // packing with saturation keeps the sign
            bytes = and_or(_mm512_packs_epi16(words(value.of), words(value.of + 2)), constant_bytes<0x80>(), bytes);
        }
        // Packing is within 128 bits.
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        write<Stream>(static_cast<uint8_t*>(states.out[State]) + at, _mm512_permutexvar_epi32(order, bytes));
        _mm_store_ss(states.scales_out[State] + at / kBlock, _mm512_castps512_ps128(_mm512_castsi512_ps(scale)));
    }
};

template <class T>
LONGSHORE_INLINE Lanes widened_any(const typename T::Storage* from) {
    if constexpr (same_type<T, BFloat16>) {
        return widened_at(from);
    } else {
        alignas(64) float values[kBlock];
        load_values<T>(values, from, kBlock);
        return lanes_at(values);
    }
}

LONGSHORE_INLINE void see(NanSeen& nan, const Lanes& values) {
    for (size_t k = 0; k < kVectors; k += 2) nan.see(floats(values, k), floats(values, k + 1));
}

template <class T>
LONGSHORE_INLINE void round_any(typename T::Storage* to, const Lanes& values, NanSeen& nan) {
    if constexpr (same_type<T, BFloat16>) {
        if (write_rounded(to, values)) return;  // there is no NaN
    }
    see(nan, values);
    alignas(64) float stored[kBlock];
    write(stored, values);
    for (size_t i = 0; i < kBlock; ++i) to[i] = T::round(stored[i]);
}

template <class T>
LONGSHORE_INLINE Lanes adopted_any(const Lanes& master, const typename T::Storage* parameter) {
    if constexpr (same_type<T, BFloat16>) {
        if (nobody_wrote(parameter, master)) return master;
    }
    alignas(64) float values[kBlock];
    write(values, master);
    for (size_t i = 0; i < kBlock; ++i) values[i] = adopted<T>(values[i], parameter[i]);
    return lanes_at(values);
}

// A block in registers, and its step.
template <class Rule>
struct BlockInLanes {
    Lanes g, a[Rule::kArrays];

    // Whether the master's half of the step is left to store_master. Its divisions are slow,
    // and a processor does other work meanwhile if that is near in the program.
    static constexpr bool kInHalves = requires { requires Rule::kInHalves; };

    LONGSHORE_INLINE void step_states(const float* s) {
        if constexpr (kInHalves) {
            for (size_t k = 0; k < kVectors; ++k) {
                __m512 m = floats(a[1], k), v = floats(a[2], k);
                Rule::step_states(s, floats(a[0], k), floats(g, k), m, v);
                a[1].of[k] = _mm512_castps_si512(m);
                a[2].of[k] = _mm512_castps_si512(v);
            }
        } else {
            Block<Rule::kArrays> b;
            write(b.g, g);
            for (size_t i = 0; i < Rule::kArrays; ++i) write(b.a[i], a[i]);
            Rule::step(s, b);
            for (size_t i = 0; i < Rule::kArrays; ++i) a[i] = lanes_at(b.a[i]);
        }
    }

    // Vector `k` of the block.
    template <bool Stream>
    LONGSHORE_INLINE void store_master(const float* s, float* to, size_t k) {
        if constexpr (kInHalves) {
            const __m512 stepped = Rule::stepped_master(s, floats(a[0], k), floats(a[1], k), floats(a[2], k));
            a[0].of[k] = _mm512_castps_si512(stepped);
        }
        write<Stream>(to + k * kLanes, a[0].of[k]);
    }
};

template <class Format, class Rule, size_t At = 1>
LONGSHORE_INLINE void load_states(BlockInLanes<Rule>& b, const EncodedStates& states, size_t at) {
    if constexpr (At < Rule::kArrays) {
        prefetch_bytes(static_cast<const char*>(states.in[At - 1]) + at * Format::kBytes, kBlock * Format::kBytes);
        b.a[At] = InLanes<Format>::template load<never_negative<Rule, At>()>(states, At - 1, at);
        load_states<Format, Rule, At + 1>(b, states, at);
    }
}

// The same as step_encoded_block of states.inl, for a whole block.
template <class Rule, class Format, bool Stream>
LONGSHORE_INLINE void step_encoded_block(const float* s, DType gradient, DType output, const Span& span, size_t at,
                                         NanSeen& nan) {
    BlockInLanes<Rule> b;
    b.g = {};
    with_type(gradient, [&]<class T>(T) {
        const auto* from = static_cast<const typename T::Storage*>(span.gradient) + at;
        prefetch_later(from);
        b.g = widened_any<T>(from);
    });
    if (s[0] != 1.0f || s[1] != 1.0f) {
        for (size_t k = 0; k < kVectors; ++k) {
            const __m512 scaled = _mm512_mul_ps(floats(b.g, k), _mm512_set1_ps(s[0]));
            b.g.of[k] = _mm512_castps_si512(_mm512_mul_ps(scaled, _mm512_set1_ps(s[1])));
        }
    }
    prefetch_later(span.in[0] + at);
    b.a[0] = lanes_at(span.in[0] + at);
    load_states<Format>(b, span.states, at);
    if (span.adopt) {
        with_type(output, [&]<class T>(T) {
            b.a[0] = adopted_any<T>(b.a[0], static_cast<const typename T::Storage*>(span.output) + at);
        });
    }
    b.step_states(s);
    const auto store_master = [&](size_t k) { b.template store_master<Stream>(s, span.out[0] + at, k); };
    store_master(0);
    const Lanes random = random_lanes<InLanes<Format>::kWholeBlocks>(span.states.key, span.states.place + at);
    store_master(1);
    InLanes<Format>::template store<Rule, Stream>(span.states, at, b.a[1], b.a[Rule::kArrays - 1], random, store_master);
    if (output == DType::none) return see(nan, b.a[0]);
    with_type(output, [&]<class T>(T) { round_any<T>(static_cast<typename T::Storage*>(span.output) + at, b.a[0], nan); });
}

}  // namespace avx512
}  // namespace
}  // namespace longshore
