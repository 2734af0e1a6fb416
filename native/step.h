// One tile, and the call that steps it by any of the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffers.h"
#include "dispatch.h"

namespace longshore {

class ThreadPool;

// One parameter's part of a tile. `buffer_offset` counts elements from the start
// of each of the buffer's arrays.
struct Segment {
    std::int64_t buffer_offset;
    std::int64_t numel;
    const void* gradient;
    void* output;  // null exactly when output_dtype is none
    std::int32_t row;  // of the tile's scalars
    DType gradient_dtype;
    DType output_dtype;
    // For states that are not float32: the number of the parameter's random bits, and the
    // place of the first element in the whole parameter.
    std::uint64_t stream = 0;
    std::int64_t place = 0;
};

// What the outputs of a tile hold before the step.
enum class Outputs : std::int32_t {
    // Nothing that is read.
    written = 0,
    // The parameters as they are now. An element that is not its rounded master was
    // written by somebody, and is the master that the rule reads.
    compared = 1,
    // The masters: float32 parameters, stepped where they are.
    masters = 2,
};

// A buffer holds `buffer_arrays` arrays, each `buffer_numel` elements long, one behind the
// other: the master (unless the outputs are the masters), then the states of the rule,
// each in whole words of 4 bytes, and behind them the scales of states of 8 bits. All but
// the states are float.
struct TileStep {
    const float* source_buffer;
    float* target_buffer;  // the same as source_buffer: in place
    std::int64_t buffer_arrays;
    std::int64_t buffer_numel;
    std::vector<Segment> segments;
    std::int32_t rule;  // index into a kernel table's rules
    // One row for each set of hyper-parameters, in double and as long as the rule
    // says; rounded to float once.
    std::vector<std::vector<double>> scalars;
    Outputs outputs = Outputs::written;
    StateFormat format = StateFormat::fp32;
    std::vector<std::int64_t> steps{};  // the step count of each row, unless the format is fp32
};

// The key of a parameter's random bits in one step: splitmix64 of the stream, `step`
// numbers further.
std::uint64_t rounding_key(std::uint64_t stream, std::int64_t step);

// Throws std::invalid_argument when the table is not one that a tile can have.
// Reads no memory, so that the addresses may be those of a device.
void check_tile(const TileStep& tile);

// Steps every segment of the tile, which check_tile() checks before the first
// byte is written.
void step_tile(const TileStep& tile, ThreadPool& pool, InstructionSet isa);

}  // namespace longshore
