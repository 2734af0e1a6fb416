// States that are not float32: decoded before a block's step, and encoded behind it, as
// longshore/kernels/buffers.py says in plain torch. Part of kernels.inl.
#pragma once

namespace longshore {
namespace {

constexpr uint32_t kInfinityBits = 0x7f800000u;

// 32 random bits for each element of a block: the lower 16 for the first state, the
// upper ones for the second.
LONGSHORE_INLINE void random_bits(uint32_t* bits, uint64_t key, uint64_t place) {
    const uint32_t low = static_cast<uint32_t>(place), first = static_cast<uint32_t>(key);
    const uint32_t second = static_cast<uint32_t>(key >> 32) + static_cast<uint32_t>(place >> 32) * 0x9e3779b9u;
    for (size_t i = 0; i < kBlock; ++i) {
        uint32_t x = (low + static_cast<uint32_t>(i)) ^ first;
        x = (x ^ (x >> 16)) * 0x21f0aaadu ^ second;
        x = (x ^ (x >> 15)) * 0x735a2d97u;
        bits[i] = x ^ (x >> 15);
    }
}

template <size_t State>
LONGSHORE_INLINE uint32_t half_of(uint32_t random) {
    return State == 0 ? random & 0xffffu : random >> 16;
}

// Whether array `At` of a rule has sums of squares.
template <class Rule, size_t At>
constexpr bool never_negative() {
    if constexpr (requires { Rule::kNeverNegative; }) {
        return Rule::kNeverNegative == At;
    } else {
        return false;
    }
}

// Non-temporal stores write whole lines; what is not aligned to one is written as usual.
template <bool Stream>
LONGSHORE_INLINE void store_bytes(char* target, const char* source, size_t bytes) {
#if defined(__SSE2__)
    if constexpr (Stream) {
        if (reinterpret_cast<uintptr_t>(target) % 64 == 0 && bytes % 64 == 0) {
            for (size_t i = 0; i < bytes; i += 16) {
                _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                                 _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
            }
            return;
        }
    }
#endif
    __builtin_memcpy(target, source, bytes);
}

// The largest of the values of a block, which are overwritten. Halving an array is vector
// code for every compiler, as a reduction is not.
template <size_t Half = kBlock / 2>
LONGSHORE_INLINE uint32_t largest_of(uint32_t* values) {
    for (size_t i = 0; i < Half; ++i) values[i] = values[i] > values[i + Half] ? values[i] : values[i + Half];
    if constexpr (Half > 1) return largest_of<Half / 2>(values);
    return values[0];
}
template <size_t Half = kBlock / 2>
LONGSHORE_INLINE uint32_t smallest_of(uint32_t* values) {
    for (size_t i = 0; i < Half; ++i) values[i] = values[i] < values[i + Half] ? values[i] : values[i + Half];
    if constexpr (Half > 1) return smallest_of<Half / 2>(values);
    return values[0];
}

// Rounded up or down at random: `random` has as many bits as are dropped. Finite values
// stay finite, infinity stays, and every NaN becomes the same one.
LONGSHORE_INLINE uint16_t bfloat16_of(float value, uint32_t random) {
    const uint32_t u = bits_of(value), magnitude = u & 0x7fffffffu;
    uint32_t rounded = (magnitude + random) >> 16;
    rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;
    rounded = (magnitude == kInfinityBits ? 0x7f80u : rounded) | ((u >> 16) & 0x8000u);
    return static_cast<uint16_t>(magnitude > kInfinityBits ? 0x7fc0u : rounded);
}

// A block at once. False: a value is infinity or NaN, or would become infinity.
template <size_t State>
LONGSHORE_INLINE bool round_at_random(uint16_t* to, const float* values, const uint32_t* random) {
    alignas(64) uint32_t magnitudes[kBlock];
    for (size_t i = 0; i < kBlock; ++i) magnitudes[i] = bits_of(values[i]) & 0x7fffffffu;
    if (largest_of(magnitudes) >= 0x7f7f0000u) return false;
    for (size_t i = 0; i < kBlock; ++i) {
        to[i] = static_cast<uint16_t>((bits_of(values[i]) + half_of<State>(random[i])) >> 16);
    }
    return true;
}

struct BFloat16States {
    static constexpr size_t kBytes = 2;

    template <bool NeverNegative>
    LONGSHORE_INLINE static void load(float* values, const EncodedStates& states, size_t state, size_t at, size_t count) {
        load_values<BFloat16>(values, static_cast<const uint16_t*>(states.in[state]) + at, count);
    }

    template <size_t State, bool NeverNegative, bool Stream>
    LONGSHORE_INLINE static void store(const float* values, const EncodedStates& states, const uint32_t* random, size_t at,
                                       size_t count) {
        alignas(64) uint16_t encoded[kBlock];
        if (!round_at_random<State>(encoded, values, random)) {
            for (size_t i = 0; i < kBlock; ++i) encoded[i] = bfloat16_of(values[i], half_of<State>(random[i]));
        }
        store_bytes<Stream>(static_cast<char*>(states.out[State]) + at * kBytes, reinterpret_cast<const char*>(encoded),
                            count * kBytes);
    }
};

// The numbers of a code: 0 is zero, the largest two are infinity and NaN, and those
// between are small floating-point numbers, in order. `Regular` code does the same for
// blocks without the values that it does not look for.
template <bool NeverNegative>
struct ByteCode {
    static constexpr bool kSigned = !NeverNegative;
    static constexpr uint32_t kLargestScale = 0x7f000000u;  // 2^127
    static constexpr uint32_t kLeastExponent = 33;          // the smallest code is then still a normal float
    static constexpr uint32_t kNan = NeverNegative ? 255 : 127;
    static constexpr uint32_t kInfinity = kNan - 1, kLargest = kNan - 2;
    static constexpr uint32_t kMantissaBits = 3, kDropped = 23 - kMantissaBits;
    static constexpr uint32_t kOne = kLargest - (1u << kMantissaBits);  // the scale itself; the largest is twice that

    // Regular: neither infinity nor NaN.
    template <bool Regular>
    LONGSHORE_INLINE static float decode(uint8_t code, uint32_t scale) {
        const uint32_t number = code & kNan;
        uint32_t bits = (number << kDropped) + (scale - (kOne << kDropped));
        bits = number == 0 ? 0 : bits;
        if constexpr (!Regular) {
            bits = number == kInfinity ? kInfinityBits : bits;
            bits = number == kNan ? 0x7fc00000u : bits;
        }
        return float_of(NeverNegative ? bits : bits | (static_cast<uint32_t>(code & 0x80u) << 24));
    }

    LONGSHORE_INLINE static uint32_t magnitude_of(float value) {
        return NeverNegative ? bits_of(value) : bits_of(value) & 0x7fffffffu;
    }

    LONGSHORE_INLINE static uint32_t least_of(uint32_t scale) { return scale - ((kOne - 1) << kDropped); }

    // Regular: nothing below the smallest code, nor from 2^127 on.
    template <bool Regular>
    LONGSHORE_INLINE static uint8_t encode(float value, uint32_t scale, uint32_t random) {
        const uint32_t magnitude = magnitude_of(value);
        const uint32_t added = (random << (kDropped - 16)) + (1u << (kDropped - 17));
        uint32_t number = ((magnitude + added) >> kDropped) - ((scale >> kDropped) - kOne);
        if constexpr (!Regular) {
            const uint32_t largest = scale == kLargestScale ? kLargest - 1 : kLargest;  // twice that were infinity
            number = number > largest ? largest : number;
            const uint32_t least = least_of(scale);
            uint32_t tiny;
            if constexpr (NeverNegative) {
                tiny = magnitude != 0 ? 1u : 0u;  // a denominator is never made zero
            } else {
                const float share = static_cast<float>(static_cast<int32_t>(random)) * 0x1p-16f;
                tiny = float_of(magnitude) > float_of(least) * share ? 1u : 0u;
            }
            number = magnitude < least ? tiny : number;
            number = magnitude == kInfinityBits ? kInfinity : number;
        }
        if constexpr (!NeverNegative) number |= (bits_of(value) >> 24) & 0x80u;
        if constexpr (!Regular) number = magnitude > kInfinityBits ? kNan : number;
        return static_cast<uint8_t>(number);
    }
};

// The bits of the power of two below a magnitude, which is at most twice that.
LONGSHORE_INLINE uint32_t scale_of(uint32_t magnitude, uint32_t least_exponent) {
    const uint32_t exponent = magnitude == 0 ? 0 : (magnitude - 1) >> 23;
    return (exponent < least_exponent ? least_exponent : exponent) << 23;
}

// A block at once. False: a code is that of infinity or NaN.
template <class Code>
LONGSHORE_INLINE bool decode_regular(float* values, const uint8_t* codes, uint32_t scale) {
    uint8_t special = 0;
    for (size_t i = 0; i < kBlock; ++i) special |= static_cast<uint8_t>((codes[i] & Code::kNan) >= Code::kInfinity);
    if (special != 0) return false;
    for (size_t i = 0; i < kBlock; ++i) values[i] = Code::template decode<true>(codes[i], scale);
    return true;
}

// A block at once, and its scale. False: there is infinity, NaN, a number from 2^127 on, or
// one below the smallest code.
template <class Code, size_t State>
LONGSHORE_INLINE bool encode_regular(uint8_t* to, float* scale_to, const float* values, const uint32_t* random) {
    alignas(64) uint32_t larger[kBlock], smaller[kBlock];
    for (size_t i = 0; i < kBlock; ++i) larger[i] = smaller[i] = Code::magnitude_of(values[i]);
    const uint32_t largest = largest_of(larger), scale = scale_of(largest, Code::kLeastExponent);
    if (largest >= Code::kLargestScale || smallest_of(smaller) < Code::least_of(scale)) return false;
    for (size_t i = 0; i < kBlock; ++i) {
        to[i] = Code::template encode<true>(values[i], scale, half_of<State>(random[i]));
    }
    *scale_to = float_of(scale);
    return true;
}

template <class Code, size_t State>
LONGSHORE_INLINE void encode_any(uint8_t* to, float* scale_to, const float* values, const uint32_t* random) {
    alignas(64) uint32_t finite[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
        const uint32_t magnitude = Code::magnitude_of(values[i]);
        finite[i] = magnitude & mask_of(magnitude < kInfinityBits);
    }
    const uint32_t scale = scale_of(largest_of(finite), Code::kLeastExponent);
    for (size_t i = 0; i < kBlock; ++i) {
        to[i] = Code::template encode<false>(values[i], scale, half_of<State>(random[i]));
    }
    *scale_to = float_of(scale);
}

struct EightBitStates {
    static constexpr size_t kBytes = 1;

    template <bool NeverNegative>
    LONGSHORE_INLINE static void load(float* values, const EncodedStates& states, size_t state, size_t at, size_t) {
        using Code = ByteCode<NeverNegative>;
        const auto* from = static_cast<const uint8_t*>(states.in[state]) + at;
        const uint32_t scale = bits_of(states.scales_in[state][at / kBlock]);
        if (decode_regular<Code>(values, from, scale)) return;
        for (size_t i = 0; i < kBlock; ++i) values[i] = Code::template decode<false>(from[i], scale);
    }

    template <size_t State, bool NeverNegative, bool Stream>
    LONGSHORE_INLINE static void store(const float* values, const EncodedStates& states, const uint32_t* random, size_t at,
                                       size_t) {
        using Code = ByteCode<NeverNegative>;
        alignas(64) uint8_t encoded[kBlock];
        float* scale = states.scales_out[State] + at / kBlock;
        if (!encode_regular<Code, State>(encoded, scale, values, random)) {
            encode_any<Code, State>(encoded, scale, values, random);
        }
        store_bytes<Stream>(static_cast<char*>(states.out[State]) + at, reinterpret_cast<const char*>(encoded), kBlock);
    }
};

template <class Format, class Rule, size_t At = 1, size_t Arrays>
LONGSHORE_INLINE void load_states(Block<Arrays>& b, const EncodedStates& states, size_t at, size_t count) {
    if constexpr (At < Arrays) {
        prefetch_bytes(static_cast<const char*>(states.in[At - 1]) + at * Format::kBytes, kBlock * Format::kBytes);
        Format::template load<never_negative<Rule, At>()>(b.a[At], states, At - 1, at, count);
        load_states<Format, Rule, At + 1>(b, states, at, count);
    }
}

template <class Format, class Rule, bool Stream, size_t At = 1, size_t Arrays>
LONGSHORE_INLINE void store_states(const Block<Arrays>& b, const EncodedStates& states, const uint32_t* random, size_t at,
                                   size_t count) {
    if constexpr (At < Arrays) {
        Format::template store<At - 1, never_negative<Rule, At>(), Stream>(b.a[At], states, random, at, count);
        store_states<Format, Rule, Stream, At + 1>(b, states, random, at, count);
    }
}

// Calls `typed` with the type of a gradient or of an output that is there. For each
// block, so that only rule and format are compiled in all combinations.
template <class Typed>
LONGSHORE_INLINE void with_type(DType dtype, const Typed& typed) {
    switch (dtype) {
        case DType::none: return;
        case DType::float32: return typed(Float32{});
        case DType::bfloat16: return typed(BFloat16{});
        case DType::float16: return typed(Float16{});
    }
}

template <class Rule, class Format, bool Stream>
LONGSHORE_INLINE void step_encoded_block(const float* s, DType gradient, DType output, const Span& span, size_t at,
                                         size_t count, NanSeen& nan) {
    Block<Rule::kArrays> b;
    with_type(gradient, [&]<class T>(T) {
        const auto* from = static_cast<const typename T::Storage*>(span.gradient) + at;
        prefetch_later(from);
        load_values<T>(b.g, from, count);
    });
    prefetch_later(span.in[0] + at);
    load_values<Float32>(b.a[0], span.in[0] + at, count);
    load_states<Format, Rule>(b, span.states, at, count);
    if (span.adopt) {
        with_type(output, [&]<class T>(T) {
            const auto* parameter = static_cast<const typename T::Storage*>(span.output) + at;
            for (size_t i = 0; i < count; ++i) b.a[0][i] = adopted<T>(b.a[0][i], parameter[i]);
        });
    }
    scale_gradient(s, b);
    Rule::step(s, b);
    alignas(64) uint32_t random[kBlock];
    random_bits(random, span.states.key, span.states.place + at);
    store<Stream>(span.out[0] + at, b.a[0], count);
    store_states<Format, Rule, Stream>(b, span.states, random, at, count);
    with_type(output, [&]<class T>(T) {
        auto* to = static_cast<typename T::Storage*>(span.output) + at;
        round_values<T>(to, b.a[0], count);
    });
    nan.see(b.a[0]);
}

}  // namespace
}  // namespace longshore

#if defined(__AVX512BW__)
#include "avx512_states.inl"
#endif

namespace longshore {
namespace {

template <class Rule, class Format, bool Stream>
void step_encoded_span(const float* s, DType gradient, DType output, const Span& span) {
    const auto part = [&] [[gnu::always_inline]] (size_t at, size_t count, NanSeen& nan) {
        step_encoded_block<Rule, Format, Stream>(s, gradient, output, span, at, count, nan);
    };
    const auto whole = [&] [[gnu::always_inline]] (size_t at, NanSeen& nan) {
#if defined(__AVX512BW__)
        avx512::step_encoded_block<Rule, Format, Stream>(s, gradient, output, span, at, nan);
#else
        part(at, kBlock, nan);
#endif
    };
    step_blocks(span, output, whole, part);
#if defined(__SSE2__)
    if constexpr (Stream) _mm_sfence();
#endif
}

template <class Rule>
void step_encoded(const float* s, DType gradient, DType output, const Span& span, bool stream) {
    const auto in = [&]<class Format>(Format) {
        stream ? step_encoded_span<Rule, Format, true>(s, gradient, output, span)
               : step_encoded_span<Rule, Format, false>(s, gradient, output, span);
    };
    span.states.format == StateFormat::bf16 ? in(BFloat16States{}) : in(EightBitStates{});
}

}  // namespace
}  // namespace longshore
