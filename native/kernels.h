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

// How the states behind the master are kept, as in longshore/kernels/buffers.py.
enum class StateFormat : int32_t { fp32 = 0, bf16 = 1, eight_bit = 2 };

// Elements that share a scale among states of 8 bits: a block of the kernels.
inline constexpr size_t kScaleBlock = 64;

// The arrays of the largest buffer: master and two moments.
inline constexpr size_t kMostArrays = 3;

// The states of a span that are not float32. The scales are those of eight_bit, one for
// each kScaleBlock elements, and a span then has whole blocks.
struct EncodedStates {
    StateFormat format;
    const void* in[kMostArrays - 1];
    void* out[kMostArrays - 1];
    const float* scales_in[kMostArrays - 1];
    float* scales_out[kMostArrays - 1];
    uint64_t key;    // of the random bits of this parameter's step
    uint64_t place;  // of the first element in the whole parameter; no span crosses a multiple of 2^32
};

// A run of consecutive elements of one segment: the same run of each of the
// buffer's arrays, the master first. Source and target arrays are the same (in
// place) or do not overlap; the output may be the gradient.
struct Span {
    const float* in[kMostArrays];
    float* out[kMostArrays];
    size_t arrays;
    const void* gradient;
    void* output;
    size_t numel;
    bool adopt;  // the output holds the parameter: see TileStep
    EncodedStates states;  // unless its format is fp32, `in` and `out` are the master alone
};

// Steps one span. `scalars` is one row of a call's rules, rounded to float.
using StepKernel = void (*)(const float* scalars, DType gradient, DType output, const Span&, bool stream);

// The first scalars of every row: what the gradient is multiplied by, one after
// the other. Multiplying by 1 changes no bits, so a missing factor is 1.
inline constexpr size_t kScaleFactors = 2;

// One rule, as rules.inl lists it. The number of arrays includes the master.
struct RuleEntry {
    const char* name;
    size_t scalars;  // of a row, with the gradient's factors
    size_t least_arrays, most_arrays;
    StepKernel step;
};

// Lanes of the partial sums of squares. An element's lane is its offset in the
// parameter modulo this, so that no cut of the parameter changes the sum.
inline constexpr size_t kNormLanes = 16;

struct KernelTable {
    const RuleEntry* rules;  // the same rules in the same order in every table
    size_t rule_count;
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
