// The kernels, written once. Each kernels_*.cpp includes this file under its
// own instruction set and names the table that it fills. The rules' arithmetic
// is in rules.inl.
//
// Everything but the table has internal linkage (see kernels.h).
#include "convert.h"
#include "kernels.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define LONGSHORE_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#else
#define LONGSHORE_VECTORIZE _Pragma("GCC ivdep")
#endif

namespace longshore {
namespace {

// Elements of one block, which is also what shares a scale among states of 8 bits. A
// block is worked on in local arrays: nothing aliases them, so every compiler makes
// vector code of the loops below, and the caches see each line once. All of a block is
// read before any of it is written, which makes in-place use and an output over its own
// gradient sound.
constexpr size_t kBlock = kScaleBlock;

// The gradient, and the buffer's arrays: the master first.
template <size_t Arrays>
struct Block {
    alignas(64) float g[kBlock];
    alignas(64) float a[Arrays][kBlock];
};

}  // namespace
}  // namespace longshore

#if defined(__AVX512BW__)
#include "avx512.inl"
#endif

namespace longshore {
namespace {

// What a call fixes is chosen bit by bit, so that no choice costs a loop its
// vector code. NaN and the sign of zero pass unchanged.
LONGSHORE_INLINE uint32_t mask_of(bool condition) { return condition ? ~0u : 0u; }
LONGSHORE_INLINE float choose(uint32_t mask, float yes, float no) {
    return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

LONGSHORE_INLINE float root_of(float x) { return __builtin_sqrtf(x); }

// A number, or a vector of it, as the first argument is.
LONGSHORE_INLINE float like(float, float number) { return number; }

#if defined(__AVX512BW__)
LONGSHORE_INLINE __m512 choose(uint32_t mask, __m512 yes, __m512 no) {
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_set1_epi32(static_cast<int>(mask)), _mm512_castps_si512(yes),
                                                   _mm512_castps_si512(no), 0xca);
    return _mm512_castsi512_ps(bits);
}
LONGSHORE_INLINE __m512 fma_once(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
LONGSHORE_INLINE __m512 root_of(__m512 x) { return _mm512_sqrt_ps(x); }
LONGSHORE_INLINE __m512 like(__m512, float number) { return _mm512_set1_ps(number); }
#endif

struct NoOutput {
    using Storage = uint16_t;
};

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

template <class T>
inline constexpr DType dtype_of = same_type<T, Float32>    ? DType::float32
                                  : same_type<T, BFloat16> ? DType::bfloat16
                                  : same_type<T, Float16>  ? DType::float16
                                                           : DType::none;

// `count` elements of a block as float32, and zeros behind them.
template <class T>
LONGSHORE_INLINE void load_values(float* values, const typename T::Storage* from, size_t count) {
#if defined(__AVX512BW__)
    if constexpr (same_type<T, BFloat16>) {
        if (count == kBlock) return avx512::write(values, avx512::widened_at(from));
    }
#endif
    for (size_t i = 0; i < count; ++i) values[i] = T::load(from[i]);
    for (size_t i = count; i < kBlock; ++i) values[i] = 0.0f;
}

template <class T>
LONGSHORE_INLINE void round_values(typename T::Storage* to, const float* values, size_t count) {
#if defined(__AVX512BW__)
    if constexpr (same_type<T, BFloat16>) {
        if (count == kBlock && avx512::write_rounded(to, avx512::lanes_at(values))) return;
    }
#endif
    for (size_t i = 0; i < count; ++i) to[i] = T::round(values[i]);
}

// Non-temporal stores write whole lines without reading them first.
template <bool Stream>
LONGSHORE_INLINE void store(float* target, const float* source, size_t numel) {
    size_t i = 0;
#if defined(__SSE2__)
    if constexpr (Stream) {
#if defined(__AVX512F__)
        constexpr size_t width = 16;
#elif defined(__AVX__)
        constexpr size_t width = 8;
#else
        constexpr size_t width = 4;
#endif
        for (; i < numel && reinterpret_cast<uintptr_t>(target + i) % (width * sizeof(float)) != 0; ++i) {
            target[i] = source[i];
        }
        for (; i + width <= numel; i += width) {
#if defined(__AVX512F__)
            _mm512_stream_ps(target + i, _mm512_loadu_ps(source + i));
#elif defined(__AVX__)
            _mm256_stream_ps(target + i, _mm256_loadu_ps(source + i));
#else
            _mm_stream_ps(target + i, _mm_loadu_ps(source + i));
#endif
        }
    }
#endif
    for (; i < numel; ++i) target[i] = source[i];
}

// The arrays of a buffer one after the other, without a loop over them: with one,
// the block would have to be in memory.
template <size_t At = 0, size_t Arrays>
LONGSHORE_INLINE void load_arrays(Block<Arrays>& b, const Span& span, size_t at, size_t count) {
    if constexpr (At < Arrays) {
        load_values<Float32>(b.a[At], span.in[At] + at, count);
        load_arrays<At + 1>(b, span, at, count);
    }
}

template <bool Stream, size_t At = 0, size_t Arrays>
LONGSHORE_INLINE void store_arrays(const Block<Arrays>& b, const Span& span, size_t at, size_t count) {
    if constexpr (At < Arrays) {
        store<Stream>(span.out[At] + at, b.a[At], count);
        store_arrays<Stream, At + 1>(b, span, at, count);
    }
}

// Asks for the lines that a later block will read. A block is long for the window in
// which a processor reorders instructions, so that without it the reads of one block
// wait for the arithmetic of the one before. What is past the end costs nothing.
constexpr size_t kPrefetchBytes = 1024;
LONGSHORE_INLINE void prefetch_bytes(const void* block, size_t block_bytes) {
    const auto address = reinterpret_cast<uintptr_t>(block) + kPrefetchBytes;
    for (size_t line = 0; line < block_bytes; line += 64) {
        __builtin_prefetch(reinterpret_cast<const void*>(address + line));
    }
}
template <class T>
LONGSHORE_INLINE void prefetch_later(const T* block) {
    prefetch_bytes(block, kBlock * sizeof(T));
}

// Makes each element of `parameter` whose bits are not those of its rounded
// master the master, if somebody wrote it.
template <class T>
LONGSHORE_INLINE float adopted(float master, typename T::Storage parameter) {
    return choose(mask_of(T::bits(T::round(master)) != T::bits(parameter)), T::load(parameter), master);
}

// The first two scalars of each rule. Multiplying by 1 changes no bits, and most
// gradients are not scaled.
template <size_t Arrays>
LONGSHORE_INLINE void scale_gradient(const float* s, Block<Arrays>& b) {
    const float scale0 = s[0], scale1 = s[1];
    if (scale0 == 1.0f && scale1 == 1.0f) return;
    for (size_t i = 0; i < kBlock; ++i) b.g[i] = b.g[i] * scale0 * scale1;
}

// Whether the output is what the rule leaves in the gradient's place, and not its master.
template <class Rule>
inline constexpr bool outputs_gradient = requires { requires Rule::kOutputsGradient; };

}  // namespace
}  // namespace longshore

#include "nan.inl"

namespace longshore {
namespace {

// One pass over `count` elements, at most a block, from element `at` on. `Rule`
// is the arithmetic, from rules.inl; everything else is the same for each.
template <class Rule, class Gradient, class Output, bool Stream>
LONGSHORE_INLINE void step_block(const float* s, const Span& span, size_t at, size_t count, bool master_shows,
                                 NanSeen& nan) {
    const auto* gradient = static_cast<const typename Gradient::Storage*>(span.gradient) + at;
    prefetch_later(gradient);
    for (size_t k = 0; k < Rule::kArrays; ++k) prefetch_later(span.in[k] + at);
    Block<Rule::kArrays> b;
    load_values<Gradient>(b.g, gradient, count);
    load_arrays(b, span, at, count);
    if constexpr (!same_type<Output, NoOutput>) {
        // The output's line is read for the write anyway.
        const auto* parameter = static_cast<const typename Output::Storage*>(span.output) + at;
        if (span.adopt) {
            for (size_t i = 0; i < count; ++i) b.a[0][i] = adopted<Output>(b.a[0][i], parameter[i]);
        }
    }
    scale_gradient(s, b);
    Rule::step(s, b);
    if constexpr (!kSeenLast) see_written<Rule>(nan, b, master_shows);
    store_arrays<Stream>(b, span, at, count);
    if constexpr (!same_type<Output, NoOutput>) {
        auto* output = static_cast<typename Output::Storage*>(span.output) + at;
        round_values<Output>(output, outputs_gradient<Rule> ? b.g : b.a[0], count);
    }
    if constexpr (kSeenLast) see_written<Rule>(nan, b, master_shows);
}

template <class Rule, class Gradient, class Output, bool Stream>
void step_span(const float* s, const Span& span) {
    const bool shows = master_shows_nan<Rule>(s);
    const auto part = [&] [[gnu::always_inline]] (size_t at, size_t count, NanSeen& nan) {
        step_block<Rule, Gradient, Output, Stream>(s, span, at, count, shows, nan);
    };
    const auto whole = [&] [[gnu::always_inline]] (size_t at, NanSeen& nan) {
        part(at, kBlock, nan);  // loops without tails: the count is a constant
    };
    step_blocks(span, dtype_of<Output>, whole, part);
#if defined(__SSE2__)
    // Streaming stores are not ordered with the lock that publishes them.
    if constexpr (Stream) _mm_sfence();
#endif
}

template <class Rule, class Gradient>
void step_from(const float* s, DType output, const Span& span, bool stream) {
    const auto typed = [&]<class Output>(Output) {
        stream ? step_span<Rule, Gradient, Output, true>(s, span) : step_span<Rule, Gradient, Output, false>(s, span);
    };
    switch (output) {
        case DType::none: return typed(NoOutput{});
        case DType::float32: return typed(Float32{});
        case DType::bfloat16: return typed(BFloat16{});
        case DType::float16: return typed(Float16{});
    }
}

}  // namespace
}  // namespace longshore

#include "states.inl"

namespace longshore {
namespace {

template <class Rule>
void step_by(const float* s, DType gradient, DType output, const Span& span, bool stream) {
    if constexpr (Rule::kArrays > 1) {
        if (span.states.format != StateFormat::fp32) return step_encoded<Rule>(s, gradient, output, span, stream);
    }
    switch (gradient) {
        case DType::none: return;
        case DType::float32: return step_from<Rule, Float32>(s, output, span, stream);
        case DType::bfloat16: return step_from<Rule, BFloat16>(s, output, span, stream);
        case DType::float16: return step_from<Rule, Float16>(s, output, span, stream);
    }
}

}  // namespace
}  // namespace longshore

#include "rules.inl"

namespace longshore {
namespace {

template <class T>
void add_typed(float* target, const void* source, size_t numel) {
    const auto* from = static_cast<const typename T::Storage*>(source);
    NanSeen nan;
    const auto add = [&] [[gnu::always_inline]] (size_t at, size_t count) {
        alignas(64) float sums[kBlock];
        load_values<T>(sums, from + at, count);
        for (size_t i = 0; i < count; ++i) sums[i] = target[at + i] + sums[i];
        nan.see(sums);
        store<false>(target + at, sums, count);
    };
    size_t at = 0;
    for (; at + kBlock <= numel; at += kBlock) add(at, kBlock);
    if (at < numel) add(at, numel - at);
    if (nan.any()) [[unlikely]] make_canonical(target, DType::float32, numel);
}

template <class T>
void widen_typed(float* target, const void* source, size_t numel) {
    const auto* from = static_cast<const typename T::Storage*>(source);
    LONGSHORE_VECTORIZE
    for (size_t i = 0; i < numel; ++i) target[i] = T::load(from[i]);
}

template <bool Accumulate>
void widen_any(float* target, const void* source, DType dtype, size_t numel) {
    const auto typed = [&]<class T>(T) {
        Accumulate ? add_typed<T>(target, source, numel) : widen_typed<T>(target, source, numel);
    };
    switch (dtype) {
        case DType::none: return;
        case DType::float32: return typed(Float32{});
        case DType::bfloat16: return typed(BFloat16{});
        case DType::float16: return typed(Float16{});
    }
}

template <class T, bool Adopt>
size_t reconcile_typed(float* master, const void* parameter, size_t numel) {
    const auto* from = static_cast<const typename T::Storage*>(parameter);
    size_t differing = 0;
    LONGSHORE_VECTORIZE
    for (size_t i = 0; i < numel; ++i) {
        const bool differs = T::bits(T::round(master[i])) != T::bits(from[i]);
        differing += differs ? 1 : 0;
        if constexpr (Adopt) master[i] = adopted<T>(master[i], from[i]);
    }
    return differing;
}

template <bool Adopt>
size_t reconcile_any(float* master, const void* parameter, DType dtype, size_t numel) {
    switch (dtype) {
        case DType::none: break;
        case DType::float32: return reconcile_typed<Float32, Adopt>(master, parameter, numel);
        case DType::bfloat16: return reconcile_typed<BFloat16, Adopt>(master, parameter, numel);
        case DType::float16: return reconcile_typed<Float16, Adopt>(master, parameter, numel);
    }
    return 0;
}

size_t reconcile(float* master, const void* parameter, DType dtype, size_t numel, bool adopt) {
    return adopt ? reconcile_any<true>(master, parameter, dtype, numel)
                 : reconcile_any<false>(master, parameter, dtype, numel);
}

// sum + x * x. The square of a float is exact in double, so rounding it on its
// own or not gives the same bits.
LONGSHORE_INLINE double add_square(double sum, float x) {
    const double wide = static_cast<double>(x);
#if LONGSHORE_HAS_FMA
    return __builtin_fma(wide, wide, sum);
#else
    return sum + wide * wide;
#endif
}

template <class T, bool Scaled>
void squares_typed(double* lanes, const void* source, size_t first_lane, size_t numel, const float* scale) {
    const auto* from = static_cast<const typename T::Storage*>(source);
    const float scale0 = scale[0], scale1 = scale[1];
    const auto load = [=] [[gnu::always_inline]] (size_t i) {
        return Scaled ? T::load(from[i]) * scale0 * scale1 : T::load(from[i]);
    };
    size_t i = 0;
    for (size_t lane = first_lane; lane != 0 && lane < kNormLanes && i < numel; ++lane, ++i) {
        lanes[lane] = add_square(lanes[lane], load(i));
    }
    double sums[kNormLanes];
    for (size_t lane = 0; lane < kNormLanes; ++lane) sums[lane] = lanes[lane];
    for (; i + kNormLanes <= numel; i += kNormLanes) {
        LONGSHORE_VECTORIZE
        for (size_t lane = 0; lane < kNormLanes; ++lane) sums[lane] = add_square(sums[lane], load(i + lane));
    }
    for (size_t lane = 0; i < numel; ++lane, ++i) sums[lane] = add_square(sums[lane], load(i));
    for (size_t lane = 0; lane < kNormLanes; ++lane) lanes[lane] = sums[lane];
}

// Multiplying by 1 changes no bits, and most gradients are not scaled.
template <class T>
void squares_of(double* lanes, const void* source, size_t first_lane, size_t numel, const float* scale) {
    scale[0] == 1.0f && scale[1] == 1.0f ? squares_typed<T, false>(lanes, source, first_lane, numel, scale)
                                         : squares_typed<T, true>(lanes, source, first_lane, numel, scale);
}

void squares(double* lanes, const void* source, DType dtype, size_t first_lane, size_t numel,
             const float* scale) {
    switch (dtype) {
        case DType::none: return;
        case DType::float32: return squares_of<Float32>(lanes, source, first_lane, numel, scale);
        case DType::bfloat16: return squares_of<BFloat16>(lanes, source, first_lane, numel, scale);
        case DType::float16: return squares_of<Float16>(lanes, source, first_lane, numel, scale);
    }
}

}  // namespace

const KernelTable LONGSHORE_KERNEL_TABLE = {
    kRules, sizeof(kRules) / sizeof(kRules[0]), widen_any<true>, widen_any<false>, reconcile, squares,
};

}  // namespace longshore
