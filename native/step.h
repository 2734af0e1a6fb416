// One tile, and the call that steps it by any of the rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "buffers.h"
#include "dispatch.h"
#include "rules.h"

namespace longshore {

class ThreadPool;

// One parameter's part of a tile. `page_offset` counts elements from the start
// of each of the page's arrays.
struct Segment {
    std::int64_t page_offset;
    std::int64_t numel;
    const void* gradient;
    void* output;  // null exactly when output_dtype is none
    std::int32_t rule;
    DType gradient_dtype;
    DType output_dtype;
};

// The rules of one call are of one kind, which fixes what a page holds.
using Rules = std::variant<std::vector<AdamRule>, std::vector<LionRule>, std::vector<AdagradRule>, std::vector<SgdRule>>;

// A page holds `page_arrays` float arrays, each `page_numel` elements long, one
// behind the other: the master, then the rule's states (Adam: both moments;
// Lion: one; Adagrad: the sum; SGD: the momentum buffer, or nothing).
struct TileStep {
    const float* source_page;
    float* target_page;  // the same as source_page: in place
    std::int64_t page_arrays;
    std::int64_t page_numel;
    std::vector<Segment> segments;
    Rules rules;
    Scale scale;
};

// Steps every segment of the tile. Throws std::invalid_argument before the
// first byte is written when the table is not one that a tile can have.
void step_tile(const TileStep& tile, ThreadPool& pool, InstructionSet isa);

}  // namespace longshore
