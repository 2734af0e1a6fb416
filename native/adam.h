// Adam and AdamW over one tile: the types, and the call that steps it.
//
// The arithmetic is stated in src/longshore/kernels/reference.py, in plain
// torch; every kernel here gives the same bits as that oracle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffers.h"
#include "dispatch.h"

namespace longshore {

class ThreadPool;

// The hyper-parameters of one parameter group at one step count. `step` is the
// count after this step: 1 the first time.
struct AdamRule {
    double lr, beta1, beta2, eps, weight_decay;
    double step;
    bool decoupled;  // AdamW's decay; otherwise Adam's L2 term in the gradient
    bool maximize;
};

// One parameter's part of a tile. `page_offset` counts elements from the start
// of each of the page's three arrays.
struct Segment {
    std::int64_t page_offset;
    std::int64_t numel;
    const void* gradient;
    void* output;  // null exactly when output_dtype is none
    std::int32_t rule;
    DType gradient_dtype;
    DType output_dtype;
};

// A page holds master, first and second moment as three float arrays, each
// `page_numel` elements long, one behind the other.
struct TileStep {
    const float* source_page;
    float* target_page;  // the same as source_page: in place
    std::int64_t page_numel;
    std::vector<Segment> segments;
    std::vector<AdamRule> rules;
    Scale scale;
};

AdamScalars scalars_of(const AdamRule& rule, const Scale& scale);

// Steps every segment of the tile. Throws std::invalid_argument before the
// first byte is written when the table is not one that a tile can have.
void step_tile(const TileStep& tile, ThreadPool& pool, InstructionSet isa);

}  // namespace longshore
