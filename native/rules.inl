// The arithmetic of each rule, over one block: the same operations, in the same
// order, as in src/longshore/kernels/reference.py. Part of kernels.inl.
#pragma once

#include "convert.h"
#include "kernels.h"

namespace longshore {
namespace {

// Elements of one block. A block is worked on in local arrays: nothing aliases
// them, so every compiler makes vector code of the loops below, and the caches
// see each line once. All of a block is read before any of it is written, which
// makes in-place use and an output over its own gradient sound.
constexpr size_t kBlock = 64;

// The gradient, and the page's arrays: the master first.
template <size_t Arrays>
struct Block {
    alignas(64) float g[kBlock];
    alignas(64) float a[Arrays][kBlock];
};

// What a call fixes is chosen bit by bit, so that no choice costs a loop its
// vector code. NaN and the sign of zero pass unchanged.
LONGSHORE_INLINE uint32_t mask_of(bool condition) { return condition ? ~0u : 0u; }
LONGSHORE_INLINE float choose(uint32_t mask, float yes, float no) {
    return float_of((bits_of(yes) & mask) | (bits_of(no) & ~mask));
}

template <bool L2>
struct Adam {
    using Scalars = AdamScalars;
    static constexpr size_t kArrays = 3;

    LONGSHORE_INLINE static void step(const AdamScalars& s, Block<kArrays>& b) {
        const float scale0 = s.scale[0], scale1 = s.scale[1];
        const float decay = s.decay, l2 = s.l2, lerp_weight = s.lerp_weight;
        const float beta2 = s.beta2, one_minus_beta2 = s.one_minus_beta2;
        const float root_correction = s.bias_correction2_sqrt, eps = s.eps, step_size = s.negative_step_size;
        const uint32_t from_gradient = mask_of(s.lerp_from_gradient);
        for (size_t i = 0; i < kBlock; ++i) {
            float g = b.g[i] * scale0 * scale1;
            float p = b.a[0][i];
            float m = b.a[1][i];
            float v = b.a[2][i];
            if constexpr (L2) {
                g = fma_once(p, l2, g);
            } else {
                p = p * decay;
            }
            m = fma_once(lerp_weight, g - m, choose(from_gradient, g, m));
            v = fma_once(one_minus_beta2 * g, g, v * beta2);
            const float denominator = __builtin_sqrtf(v) / root_correction + eps;
            b.a[0][i] = p + (step_size * m) / denominator;
            b.a[1][i] = m;
            b.a[2][i] = v;
        }
    }
};

struct Lion {
    using Scalars = LionScalars;
    static constexpr size_t kArrays = 2;

    LONGSHORE_INLINE static void step(const LionScalars& s, Block<kArrays>& b) {
        const float scale0 = s.scale[0], scale1 = s.scale[1];
        const float decay = s.decay, negative_lr = s.negative_lr;
        const float beta1 = s.beta1, one_minus_beta1 = s.one_minus_beta1;
        const float beta2 = s.beta2, one_minus_beta2 = s.one_minus_beta2;
        for (size_t i = 0; i < kBlock; ++i) {
            const float g = b.g[i] * scale0 * scale1;
            const float m = b.a[1][i];
            const float c = fma_once(one_minus_beta1, g, m * beta1);
            float sign = c > 0.0f ? 1.0f : 0.0f;
            sign = c < 0.0f ? -1.0f : sign;
            sign = c != c ? c : sign;
            b.a[0][i] = b.a[0][i] * decay + negative_lr * sign;
            b.a[1][i] = fma_once(one_minus_beta2, g, m * beta2);
        }
    }
};

struct Adagrad {
    using Scalars = AdagradScalars;
    static constexpr size_t kArrays = 2;

    LONGSHORE_INLINE static void step(const AdagradScalars& s, Block<kArrays>& b) {
        const float scale0 = s.scale[0], scale1 = s.scale[1];
        const float l2 = s.l2, eps = s.eps, step_size = s.negative_step_size;
        const uint32_t decays = mask_of(l2 != 0.0f);
        for (size_t i = 0; i < kBlock; ++i) {
            float g = b.g[i] * scale0 * scale1;
            const float p = b.a[0][i];
            g = choose(decays, fma_once(p, l2, g), g);
            const float sum = fma_once(g, g, b.a[1][i]);
            const float denominator = __builtin_sqrtf(sum) + eps;
            b.a[0][i] = p + (step_size * g) / denominator;
            b.a[1][i] = sum;
        }
    }
};

// Without a buffer the page is the master alone.
template <bool Buffer>
struct Sgd {
    using Scalars = SgdScalars;
    static constexpr size_t kArrays = Buffer ? 2 : 1;

    LONGSHORE_INLINE static void step(const SgdScalars& s, Block<kArrays>& b) {
        const float scale0 = s.scale[0], scale1 = s.scale[1];
        const float l2 = s.l2, momentum = s.momentum, one_minus_dampening = s.one_minus_dampening;
        const float negative_lr = s.negative_lr;
        const uint32_t decays = mask_of(l2 != 0.0f), keep = mask_of(s.keep_buffer);
        const uint32_t first = mask_of(s.first), nesterov = mask_of(s.nesterov);
        for (size_t i = 0; i < kBlock; ++i) {
            float g = b.g[i] * scale0 * scale1;
            const float p = b.a[0][i];
            g = choose(decays, fma_once(p, l2, g), g);
            if constexpr (Buffer) {
                const float old = b.a[1][i];
                const float next = choose(first, g, fma_once(one_minus_dampening, g, old * momentum));
                b.a[1][i] = choose(keep, old, next);
                g = choose(keep, g, choose(nesterov, fma_once(next, momentum, g), next));
            }
            b.a[0][i] = fma_once(g, negative_lr, p);
        }
    }
};

}  // namespace
}  // namespace longshore
