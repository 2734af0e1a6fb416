// What one build of the kernels offers, as plain data.
//
// The files that are compiled for a raised instruction set include this and
// convert.h only. No standard C++ header: an inline function from one would be
// emitted with AVX-512 inside and could be the copy that the linker keeps for
// the whole library.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace longshore {

enum class DType : int32_t { none = 0, float32 = 1, bfloat16 = 2, float16 = 3 };

// Everything that the inner loop reads, computed in double and rounded once.
struct AdamScalars {
    float decay;           // 1 - lr * weight_decay (decoupled; otherwise 1)
    float l2;              // weight_decay (Adam; 0: no term at all)
    float lerp_weight;     // weight of (g - m)
    bool lerp_from_gradient;
    float beta2, one_minus_beta2;
    float bias_correction2_sqrt, eps;
    float negative_step_size;
    // Multiplied into the gradient one after the other. Multiplying by 1 changes
    // no bits, so a missing factor is 1. `maximize` is the sign of the first.
    float scale[2];
};

struct LionScalars {
    float decay;  // 1 - lr * weight_decay
    float beta1, one_minus_beta1, beta2, one_minus_beta2;
    float negative_lr;
    float scale[2];
};

struct AdagradScalars {
    float l2;  // weight_decay (0: no term at all)
    float eps;
    float negative_step_size;
    float scale[2];
};

struct SgdScalars {
    float l2;  // weight_decay (0: no term at all)
    float momentum, one_minus_dampening;
    float negative_lr;
    bool keep_buffer;  // no momentum: a buffer that the page has stays as it is
    bool first;        // the buffer becomes the gradient
    bool nesterov;
    float scale[2];
};

// The arrays of the largest page: master and two moments.
inline constexpr size_t kMostArrays = 3;

// A run of consecutive elements of one segment: the same run of each of the
// page's arrays, the master first. Source and target arrays are the same (in
// place) or do not overlap; the output may be the gradient.
struct Span {
    const float* in[kMostArrays];
    float* out[kMostArrays];
    size_t arrays;
    const void* gradient;
    void* output;
    size_t numel;
};

template <class Scalars>
using StepKernel = void (*)(const Scalars&, DType gradient, DType output, const Span&, bool stream);

// Lanes of the partial sums of squares. An element's lane is its offset in the
// parameter modulo this, so that no cut of the parameter changes the sum.
inline constexpr size_t kNormLanes = 16;

struct KernelTable {
    StepKernel<AdamScalars> adam;
    StepKernel<LionScalars> lion;
    StepKernel<AdagradScalars> adagrad;
    StepKernel<SgdScalars> sgd;
    // target += source, in float
    void (*add)(float* target, const void* source, DType, size_t numel);
    // target = source, in float
    void (*widen)(float* target, const void* source, DType, size_t numel);
    // How many elements of `parameter` are not the rounded master; `adopt` makes
    // each of those the new master.
    size_t (*reconcile)(float* master, const void* parameter, DType, size_t numel, bool adopt);
    // Adds the square of each (scaled) element to its lane.
    void (*squares)(double* lanes, const void* source, DType, size_t first_lane, size_t numel,
                    const float* scale);
};

// One table a translation unit, each compiled for its own instruction set.
extern const KernelTable kBaselineKernels;
#if defined(LONGSHORE_X86_64)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace longshore
