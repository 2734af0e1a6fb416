// The arithmetic of each rule, over one block: the same operations, in the same
// order, as in the rule's file in src/longshore/optim/rules/. That file also
// computes the scalars, whose order is that of its scalars(). Part of kernels.inl.
//
// To add a rule, write its struct and list it in kRules. `kNeverNegative` is the one
// array, if there is any, whose elements are sums of squares. `kInHalves`: a step is one of
// the states, and one of the master behind it; both take vectors as well as numbers.
// `master_shows_nan`, if it is there: whether with these scalars a state is NaN after a step
// only beside a master that is, so that looking for NaN in the master is enough.
#pragma once

namespace longshore {
namespace {

template <bool L2>
struct Adam {
    static constexpr size_t kArrays = 3;
    static constexpr size_t kNeverNegative = 2;
    static constexpr bool kInHalves = true;

    LONGSHORE_INLINE static bool master_shows_nan(const float*) { return true; }

    LONGSHORE_INLINE static void step(const float* s, Block<kArrays>& b) {
        for (size_t i = 0; i < kBlock; ++i) {
            step_states(s, b.a[0][i], b.g[i], b.a[1][i], b.a[2][i]);
            b.a[0][i] = stepped_master(s, b.a[0][i], b.a[1][i], b.a[2][i]);
        }
    }

    template <class T>
    LONGSHORE_INLINE static void step_states(const float* s, T p, T g, T& m, T& v) {
        const float l2 = s[3], one_minus_beta1 = s[4], beta2 = s[5], one_minus_beta2 = s[6];
        // torch's lerp counts from the nearer end, so that a weight of 1 gives
        // the gradient exactly.
        const uint32_t from_moment = mask_of(one_minus_beta1 < 0.5f);
        const float lerp_weight = choose(from_moment, one_minus_beta1, one_minus_beta1 - 1.0f);
        if constexpr (L2) g = fma_once(p, like(g, l2), g);
        m = fma_once(like(g, lerp_weight), g - m, choose(from_moment, m, g));
        v = fma_once(like(g, one_minus_beta2) * g, g, v * like(g, beta2));
    }

    template <class T>
    LONGSHORE_INLINE static T stepped_master(const float* s, T p, T m, T v) {
        const float decay = s[2], root_correction = s[7], eps = s[8], step_size = s[9];
        if constexpr (!L2) p = p * like(p, decay);
        const T denominator = root_of(v) / like(v, root_correction) + like(v, eps);
        return p + (like(m, step_size) * m) / denominator;
    }
};

void adam(const float* s, DType gradient, DType output, const Span& span, bool stream) {
    s[3] != 0.0f ? step_by<Adam<true>>(s, gradient, output, span, stream)
                 : step_by<Adam<false>>(s, gradient, output, span, stream);
}

struct Lion {
    static constexpr size_t kArrays = 2;

    // Infinities that cancel in the moment then cancel in what moves the master, too.
    LONGSHORE_INLINE static bool master_shows_nan(const float* s) {
        return s[3] >= 0.0f && s[4] >= 0.0f && s[5] > 0.0f && s[6] > 0.0f;
    }

    LONGSHORE_INLINE static void step(const float* s, Block<kArrays>& b) {
        const float decay = s[2], beta1 = s[3], one_minus_beta1 = s[4];
        const float beta2 = s[5], one_minus_beta2 = s[6], negative_lr = s[7];
        for (size_t i = 0; i < kBlock; ++i) {
            const float g = b.g[i];
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
    static constexpr size_t kArrays = 2;
    static constexpr size_t kNeverNegative = 1;

    LONGSHORE_INLINE static bool master_shows_nan(const float*) { return true; }

    LONGSHORE_INLINE static void step(const float* s, Block<kArrays>& b) {
        const float l2 = s[2], eps = s[3], step_size = s[4];
        const uint32_t decays = mask_of(l2 != 0.0f);
        for (size_t i = 0; i < kBlock; ++i) {
            float g = b.g[i];
            const float p = b.a[0][i];
            g = choose(decays, fma_once(p, l2, g), g);
            const float sum = fma_once(g, g, b.a[1][i]);
            const float denominator = __builtin_sqrtf(sum) + eps;
            b.a[0][i] = p + (step_size * g) / denominator;
            b.a[1][i] = sum;
        }
    }
};

// A state buffer without momentum is the master alone. A momentum that is there
// stays as it is in a group without one.
template <bool Buffer>
struct Sgd {
    static constexpr size_t kArrays = Buffer ? 2 : 1;

    // Without momentum, the buffer that is there may have any.
    LONGSHORE_INLINE static bool master_shows_nan(const float* s) { return s[6] != 0.0f; }

    LONGSHORE_INLINE static void step(const float* s, Block<kArrays>& b) {
        const float l2 = s[2], momentum = s[3], one_minus_dampening = s[4], negative_lr = s[5];
        const uint32_t decays = mask_of(l2 != 0.0f), moves = mask_of(s[6] != 0.0f);
        const uint32_t first = mask_of(s[7] != 0.0f), nesterov = mask_of(s[8] != 0.0f);
        for (size_t i = 0; i < kBlock; ++i) {
            float g = b.g[i];
            const float p = b.a[0][i];
            g = choose(decays, fma_once(p, l2, g), g);
            if constexpr (Buffer) {
                const float old = b.a[1][i];
                const float next = choose(first, g, fma_once(one_minus_dampening, g, old * momentum));
                b.a[1][i] = choose(moves, next, old);
                g = choose(moves, choose(nesterov, fma_once(next, momentum, g), next), g);
            }
            b.a[0][i] = fma_once(g, negative_lr, p);
        }
    }
};

void sgd(const float* s, DType gradient, DType output, const Span& span, bool stream) {
    span.arrays == 2 ? step_by<Sgd<true>>(s, gradient, output, span, stream)
                     : step_by<Sgd<false>>(s, gradient, output, span, stream);
}

// The first half of a step of Muon. Its buffer is the momentum alone, and the output
// is what will be made orthogonal: the momentum, or Nesterov's.
struct MuonMomentum {
    static constexpr size_t kArrays = 1;
    static constexpr bool kOutputsGradient = true;

    LONGSHORE_INLINE static void step(const float* s, Block<kArrays>& b) {
        const float one_minus_momentum = s[2], momentum = s[3];
        const uint32_t nesterov = mask_of(s[4] != 0.0f);
        // torch's lerp, as in Adam.
        const uint32_t from_buffer = mask_of(one_minus_momentum < 0.5f), from_gradient = mask_of(momentum < 0.5f);
        const float toward_gradient = choose(from_buffer, one_minus_momentum, one_minus_momentum - 1.0f);
        const float toward_buffer = choose(from_gradient, momentum, momentum - 1.0f);
        for (size_t i = 0; i < kBlock; ++i) {
            const float g = b.g[i];
            const float old = b.a[0][i];
            const float next = fma_once(toward_gradient, g - old, choose(from_buffer, old, g));
            const float ahead = fma_once(toward_buffer, next - g, choose(from_gradient, g, next));
            b.a[0][i] = next;
            b.g[i] = choose(nesterov, ahead, next);
        }
    }
};

// The second half: the gradient is the orthogonal matrix, and the buffer the master.
struct MuonUpdate {
    static constexpr size_t kArrays = 1;

    LONGSHORE_INLINE static void step(const float* s, Block<kArrays>& b) {
        const float decay = s[2], negative_lr = s[3];
        for (size_t i = 0; i < kBlock; ++i) {
            b.a[0][i] = fma_once(b.g[i], negative_lr, b.a[0][i] * decay);
        }
    }
};

// Name, scalars of a row, least and most arrays of a buffer, and what steps.
constexpr RuleEntry kRules[] = {
    {"Adam", 10, 3, 3, adam},
    {"Lion", 8, 2, 2, step_by<Lion>},
    {"Adagrad", 5, 2, 2, step_by<Adagrad>},
    {"SGD", 9, 1, 2, sgd},
    {"MuonMomentum", 5, 1, 1, step_by<MuonMomentum>},
    {"MuonUpdate", 4, 1, 1, step_by<MuonUpdate>},
};

}  // namespace
}  // namespace longshore
