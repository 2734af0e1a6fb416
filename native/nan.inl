// One NaN. The sign and the payload of a NaN that arithmetic makes are the processor's, and
// of two that it takes, one or the other is passed on: here every NaN that a rule writes
// becomes the same one, with a positive sign and the upper bit of the payload alone. Where
// there is none, that costs half a comparison for a vector. Part of kernels.inl.
#pragma once

namespace longshore {
namespace {

constexpr uint32_t kNanBits = 0x7fc00000u;

// Whether there was NaN among numbers, or perhaps was; which is seen two vectors at a time.
class NanSeen {
  public:
    LONGSHORE_INLINE bool any() const {
#if defined(__AVX512BW__)
        return numbers_ != 0xffff;
#elif defined(__AVX2__)
        return _mm256_movemask_ps(_mm256_cmp_ps(sum_, sum_, _CMP_UNORD_Q)) != 0;
#elif defined(__SSE2__)
        return _mm_movemask_ps(nan_) != 0;
#else
        uint32_t found = 0;
        for (size_t i = 0; i < kLanes; ++i) found |= nan_[i];
        return found != 0;
#endif
    }

    // `count` numbers at one place, and as many at the other.
    LONGSHORE_INLINE void see(const float* first, const float* second, size_t count) {
#if defined(__AVX512BW__)
        for (size_t i = 0; i < count; i += 16) see(_mm512_loadu_ps(first + i), _mm512_loadu_ps(second + i));
#elif defined(__AVX2__)
        for (size_t i = 0; i < count; i += 8) {
            sum_ = _mm256_fmadd_ps(_mm256_loadu_ps(first + i), _mm256_loadu_ps(second + i), sum_);
        }
#elif defined(__SSE2__)
        for (size_t i = 0; i < count; i += 4) {
            nan_ = _mm_or_ps(nan_, _mm_cmpunord_ps(_mm_loadu_ps(first + i), _mm_loadu_ps(second + i)));
        }
#else
        for (size_t i = 0; i < count; i += kLanes) {
            for (size_t lane = 0; lane < kLanes; ++lane) {
                nan_[lane] |= mask_of(__builtin_isunordered(first[i + lane], second[i + lane]));
            }
        }
#endif
    }
    LONGSHORE_INLINE void see(const float (&block)[kBlock]) { see(block, block + kBlock / 2, kBlock / 2); }

#if defined(__AVX512BW__)
    LONGSHORE_INLINE void see(__m512 first, __m512 second) {
        numbers_ = _mm512_mask_cmp_ps_mask(numbers_, first, second, _CMP_ORD_Q);
    }
#endif

  private:
#if defined(__AVX512BW__)
    __mmask16 numbers_ = 0xffff;
#elif defined(__AVX2__)
    // Of products, which are NaN where a factor is, and perhaps where none is: comparisons
    // would have to be combined, with as many instructions again.
    __m256 sum_ = _mm256_setzero_ps();
#elif defined(__SSE2__)
    __m128 nan_ = _mm_setzero_ps();
#else
    static constexpr size_t kLanes = 4;
    uint32_t nan_[kLanes] = {};
#endif
};

// Whether NaN is looked for behind a block's stores. With fewer registers than AVX-512 has,
// the block would have to be kept in memory for it.
#if defined(__AVX512BW__)
constexpr bool kSeenLast = true;
#else
constexpr bool kSeenLast = false;
#endif

template <class Rule>
LONGSHORE_INLINE bool master_shows_nan(const float* s) {
    if constexpr (requires { Rule::master_shows_nan(s); }) {
        return Rule::master_shows_nan(s);
    } else {
        return false;
    }
}

// What the step of a block has left to be written. `master_shows`: as the rule says.
template <class Rule, size_t Arrays>
LONGSHORE_INLINE void see_written(NanSeen& nan, const Block<Arrays>& b, bool master_shows) {
    if constexpr (outputs_gradient<Rule>) {
        for (size_t k = 0; k < Arrays; ++k) nan.see(b.g, b.a[k], kBlock);
    } else if constexpr (Arrays == 1) {
        nan.see(b.a[0]);
    } else if (master_shows) {
        nan.see(b.a[0]);
    } else {
        for (size_t k = 1; k < Arrays; ++k) nan.see(b.a[0], b.a[k], kBlock);
    }
}

template <class T>
void make_canonical_typed(void* values, size_t count, typename T::Storage nan) {
    auto* const at = static_cast<typename T::Storage*>(values);
    for (size_t i = 0; i < count; ++i) {
        const float value = T::load(at[i]);
        if (value != value) at[i] = nan;
    }
}

void make_canonical(void* values, DType dtype, size_t count) {
    switch (dtype) {
        case DType::none: return;
        case DType::float32: return make_canonical_typed<Float32>(values, count, float_of(kNanBits));
        case DType::bfloat16: return make_canonical_typed<BFloat16>(values, count, 0x7fc0);
        case DType::float16: return make_canonical_typed<Float16>(values, count, 0x7e00);
    }
}

// What the steps of blocks have written, in memory. Encoded states have one NaN already.
[[gnu::cold, gnu::noinline]] void make_canonical(const Span& span, DType output, size_t at, size_t count) {
    const size_t arrays = span.states.format == StateFormat::fp32 ? span.arrays : 1;
    for (size_t k = 0; k < arrays; ++k) make_canonical(span.out[k] + at, DType::float32, count);
    const size_t item = output == DType::float32 ? 4 : 2;
    make_canonical(static_cast<char*>(span.output) + at * item, output, count);
}

// Calls `whole(at, nan)` for the blocks of a span, and `part(at, count, nan)` for what is left. What is written is looked at again where
// it has NaN, after so many blocks that looking for NaN costs no branch, and so few that
// they are in a cache.
template <class Whole, class Part>
LONGSHORE_INLINE void step_blocks(const Span& span, DType output, const Whole& whole, const Part& part) {
    constexpr size_t kLookedAt = 256 * kBlock;
    for (size_t at = 0; at < span.numel;) {
        const size_t begin = at, end = span.numel - at < kLookedAt ? span.numel : at + kLookedAt;
        NanSeen nan;
        for (; at + kBlock <= end; at += kBlock) whole(at, nan);
        if (at < end) part(at, end - at, nan);
        at = end;
        if (nan.any()) [[unlikely]] make_canonical(span, output, begin, end - begin);
    }
}

}  // namespace
}  // namespace longshore
