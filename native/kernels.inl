// The kernels, written once. Each kernels_*.cpp includes this file under its
// own instruction set and names the table that it fills.
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

struct NoOutput {
    using Storage = uint16_t;
};

template <class A, class B>
inline constexpr bool same_type = false;
template <class A>
inline constexpr bool same_type<A, A> = true;

// Elements of one block. A block is worked on in local arrays: nothing aliases
// them, so every compiler makes vector code of the loops below, and the caches
// see each line once. All of a block is read before any of it is written, which
// makes in-place use and an output over its own gradient sound.
constexpr size_t kBlock = 64;

struct Block {
    alignas(64) float g[kBlock], p[kBlock], m[kBlock], v[kBlock];
};

// The arithmetic of a step: the same operations, in the same order, as in
// src/longshore/kernels/reference.py.
template <bool L2>
inline void adam_block(const AdamScalars& s, Block& b) {
    const float scale0 = s.scale[0], scale1 = s.scale[1];
    const float decay = s.decay, l2 = s.l2, lerp_weight = s.lerp_weight;
    const float beta2 = s.beta2, one_minus_beta2 = s.one_minus_beta2;
    const float root_correction = s.bias_correction2_sqrt, eps = s.eps, step_size = s.negative_step_size;
    const uint32_t from_gradient = s.lerp_from_gradient ? ~0u : 0u;
    for (size_t i = 0; i < kBlock; ++i) {
        float g = b.g[i] * scale0 * scale1;
        float p = b.p[i];
        float m = b.m[i];
        float v = b.v[i];
        if constexpr (L2) {
            g = fma_once(p, l2, g);
        } else {
            p = p * decay;
        }
        const float lerp_base = float_of((bits_of(g) & from_gradient) | (bits_of(m) & ~from_gradient));
        m = fma_once(lerp_weight, g - m, lerp_base);
        v = fma_once(one_minus_beta2 * g, g, v * beta2);
        const float denominator = __builtin_sqrtf(v) / root_correction + eps;
        b.p[i] = p + (step_size * m) / denominator;
        b.m[i] = m;
        b.v[i] = v;
    }
}

// Non-temporal stores write whole lines without reading them first.
template <bool Stream>
inline void store(float* target, const float* source, size_t numel) {
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

// One pass over `count` elements, at most a block, from element `at` on.
template <class Gradient, class Output, bool L2, bool Stream>
inline void adam_step_block(const AdamScalars& s, const AdamSpan& span, size_t at, size_t count) {
    const auto* gradient = static_cast<const typename Gradient::Storage*>(span.gradient) + at;
    Block b;
    for (size_t i = 0; i < count; ++i) b.g[i] = Gradient::load(gradient[i]);
    for (size_t i = 0; i < count; ++i) b.p[i] = span.master_in[at + i];
    for (size_t i = 0; i < count; ++i) b.m[i] = span.exp_avg_in[at + i];
    for (size_t i = 0; i < count; ++i) b.v[i] = span.exp_avg_sq_in[at + i];
    for (size_t i = count; i < kBlock; ++i) b.g[i] = b.p[i] = b.m[i] = b.v[i] = 0.0f;
    adam_block<L2>(s, b);
    store<Stream>(span.master_out + at, b.p, count);
    store<Stream>(span.exp_avg_out + at, b.m, count);
    store<Stream>(span.exp_avg_sq_out + at, b.v, count);
    if constexpr (!same_type<Output, NoOutput>) {
        auto* output = static_cast<typename Output::Storage*>(span.output) + at;
        for (size_t i = 0; i < count; ++i) output[i] = Output::round(b.p[i]);
    }
}

template <class Gradient, class Output, bool L2, bool Stream>
void adam_span(const AdamScalars& s, const AdamSpan& span) {
    size_t at = 0;
    // The count is a constant here, and the loops over it need no tails.
    for (; at + kBlock <= span.numel; at += kBlock) adam_step_block<Gradient, Output, L2, Stream>(s, span, at, kBlock);
    if (at < span.numel) adam_step_block<Gradient, Output, L2, Stream>(s, span, at, span.numel - at);
#if defined(__SSE2__)
    // Streaming stores are not ordered with the lock that publishes them.
    if constexpr (Stream) _mm_sfence();
#endif
}

template <class Gradient, class Output>
void adam_typed(const AdamScalars& s, const AdamSpan& span, bool stream) {
    if (s.l2 != 0.0f) {
        stream ? adam_span<Gradient, Output, true, true>(s, span) : adam_span<Gradient, Output, true, false>(s, span);
    } else {
        stream ? adam_span<Gradient, Output, false, true>(s, span) : adam_span<Gradient, Output, false, false>(s, span);
    }
}

template <class Gradient>
void adam_from(const AdamScalars& s, DType output, const AdamSpan& span, bool stream) {
    switch (output) {
        case DType::none: return adam_typed<Gradient, NoOutput>(s, span, stream);
        case DType::float32: return adam_typed<Gradient, Float32>(s, span, stream);
        case DType::bfloat16: return adam_typed<Gradient, BFloat16>(s, span, stream);
        case DType::float16: return adam_typed<Gradient, Float16>(s, span, stream);
    }
}

void adam(const AdamScalars& s, DType gradient, DType output, const AdamSpan& span, bool stream) {
    switch (gradient) {
        case DType::none: return;
        case DType::float32: return adam_from<Float32>(s, output, span, stream);
        case DType::bfloat16: return adam_from<BFloat16>(s, output, span, stream);
        case DType::float16: return adam_from<Float16>(s, output, span, stream);
    }
}

template <class T, bool Accumulate>
void widen_typed(float* target, const void* source, size_t numel) {
    const auto* from = static_cast<const typename T::Storage*>(source);
    LONGSHORE_VECTORIZE
    for (size_t i = 0; i < numel; ++i) {
        if constexpr (Accumulate) {
            target[i] = target[i] + T::load(from[i]);
        } else {
            target[i] = T::load(from[i]);
        }
    }
}

template <bool Accumulate>
void widen_any(float* target, const void* source, DType dtype, size_t numel) {
    switch (dtype) {
        case DType::none: return;
        case DType::float32: return widen_typed<Float32, Accumulate>(target, source, numel);
        case DType::bfloat16: return widen_typed<BFloat16, Accumulate>(target, source, numel);
        case DType::float16: return widen_typed<Float16, Accumulate>(target, source, numel);
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
        if constexpr (Adopt) master[i] = differs ? T::load(from[i]) : master[i];
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

template <class T>
void squares_typed(double* lanes, const void* source, size_t first_lane, size_t numel, float scale0,
                   float scale1) {
    const auto* from = static_cast<const typename T::Storage*>(source);
    size_t i = 0;
    for (size_t lane = first_lane; lane != 0 && lane < kNormLanes && i < numel; ++lane, ++i) {
        const double x = static_cast<double>(T::load(from[i]) * scale0 * scale1);
        lanes[lane] += x * x;
    }
    double sums[kNormLanes];
    for (size_t lane = 0; lane < kNormLanes; ++lane) sums[lane] = lanes[lane];
    for (; i + kNormLanes <= numel; i += kNormLanes) {
        LONGSHORE_VECTORIZE
        for (size_t lane = 0; lane < kNormLanes; ++lane) {
            const double x = static_cast<double>(T::load(from[i + lane]) * scale0 * scale1);
            sums[lane] += x * x;
        }
    }
    for (size_t lane = 0; i < numel; ++lane, ++i) {
        const double x = static_cast<double>(T::load(from[i]) * scale0 * scale1);
        sums[lane] += x * x;
    }
    for (size_t lane = 0; lane < kNormLanes; ++lane) lanes[lane] = sums[lane];
}

void squares(double* lanes, const void* source, DType dtype, size_t first_lane, size_t numel,
             const float* scale) {
    switch (dtype) {
        case DType::none: return;
        case DType::float32: return squares_typed<Float32>(lanes, source, first_lane, numel, scale[0], scale[1]);
        case DType::bfloat16: return squares_typed<BFloat16>(lanes, source, first_lane, numel, scale[0], scale[1]);
        case DType::float16: return squares_typed<Float16>(lanes, source, first_lane, numel, scale[0], scale[1]);
    }
}

}  // namespace

const KernelTable LONGSHORE_KERNEL_TABLE = {
    adam, widen_any<true>, widen_any<false>, reconcile, squares,
};

}  // namespace longshore
