// Element-wise passes over host buffers that are not steps: accumulate, reload
// a master, sum squares. Each splits its work over the pool; none keeps state.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "dispatch.h"

namespace longshore {

class ThreadPool;

// Elements that one thread takes at a time: a few microseconds of work, small
// enough to balance two noisy cores, a multiple of every vector width.
inline constexpr std::int64_t kPieceNumel = 1 << 16;

std::size_t item_bytes(DType dtype);

// Throws std::invalid_argument, naming `what`, for a null or misaligned address.
void check_address(const void* address, DType dtype, const char* what);

// What a gradient is multiplied by in float: `first`, then `second`, each
// rounded. Two factors are needed where the loss scale is no power of two, so
// that unscaling and clipping round as they do apart.
struct Scale {
    double first = 1.0;
    double second = 1.0;
};

// Consecutive elements of one parameter's gradient, somewhere in host memory.
struct GradientRange {
    const void* address;
    DType dtype;
    std::int64_t numel;
};

// Elements that one thread takes at a time, of so many: four turns for each thread, so that
// all are busy and none waits long for the last one, but no more than a cache holds, and no
// fewer than are worth taking.
std::int64_t piece_numel(std::int64_t numel, int threads);

// target[i] (+)= float(source[i])
void accumulate(float* target, const void* source, DType dtype, std::int64_t numel, bool add, ThreadPool& pool,
                InstructionSet isa);

// target[i] = float(first[i]) + float(second[i])
void sum_of_two(float* target, const void* first, const void* second, DType dtype, std::int64_t numel,
                ThreadPool& pool, InstructionSet isa);

// Counts the elements of `parameter` that differ from the rounded master; with
// `adopt`, those become the master.
std::int64_t reconcile(float* master, const void* parameter, DType dtype, std::int64_t numel, bool adopt,
                       ThreadPool& pool, InstructionSet isa);

// The sums of squares of the scaled elements in double: for each parameter, one
// for each of its blocks of kPieceNumel elements. The order of addition depends
// on offsets in the parameters alone, so the bits do not depend on how they are
// cut into pieces, on the number of threads or on the instruction set.
std::vector<std::vector<double>> block_sums(const std::vector<std::vector<GradientRange>>& parameters, Scale scale,
                                            ThreadPool& pool, InstructionSet isa);

}  // namespace longshore
