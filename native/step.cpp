#include "step.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include "float_mode.h"
#include "thread_pool.h"

namespace longshore {

namespace {

[[noreturn]] void refuse(std::size_t segment, const std::string& why) {
    throw std::invalid_argument("segment " + std::to_string(segment) + " of the tile " + why);
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
    return first < second + b_bytes && second < first + a_bytes;
}

void check_output(const Segment& segment, std::size_t index, Outputs outputs) {
    if (outputs == Outputs::masters && segment.output_dtype != DType::float32) {
        refuse(index, "has its master in an output that is not float32");
    }
    if (segment.output_dtype == DType::none) {
        if (segment.output != nullptr) refuse(index, "has an output address but no output dtype");
        return;
    }
    check_address(segment.output, segment.output_dtype, "the output");
    const std::size_t numel = static_cast<std::size_t>(segment.numel);
    const std::size_t gradient_bytes = item_bytes(segment.gradient_dtype), output_bytes = item_bytes(segment.output_dtype);
    const bool over_gradient =
        outputs == Outputs::written && segment.output == segment.gradient && gradient_bytes == output_bytes;
    if (!over_gradient && overlap(segment.gradient, numel * gradient_bytes, segment.output, numel * output_bytes)) {
        refuse(index, "has an output that overlaps its gradient; it may only take its place exactly");
    }
}

void check_scalars(const TileStep& tile, const RuleEntry& rule) {
    for (const auto& row : tile.scalars) {
        if (row.size() != rule.scalars) {
            throw std::invalid_argument(std::string(rule.name) + " has " + std::to_string(rule.scalars) +
                                        " scalars, not " + std::to_string(row.size()));
        }
    }
    const std::int64_t elsewhere = tile.outputs == Outputs::masters ? 1 : 0;
    const auto least = static_cast<std::int64_t>(rule.least_arrays) - elsewhere;
    const auto most = static_cast<std::int64_t>(rule.most_arrays) - elsewhere;
    if (tile.scalars.empty() || (tile.buffer_arrays >= least && tile.buffer_arrays <= most)) return;
    throw std::invalid_argument("a buffer of " + std::to_string(tile.buffer_arrays) + " arrays, and " + rule.name +
                                " has " + std::to_string(least) + (least == most ? "" : " or " + std::to_string(most)));
}

std::size_t in_words(std::int64_t numel, std::int64_t per_word) {
    return static_cast<std::size_t>((numel + per_word - 1) / per_word);
}

// Words of 4 bytes of one state, without scales.
std::size_t state_words(const TileStep& tile) {
    switch (tile.format) {
        case StateFormat::fp32: return in_words(tile.buffer_numel, 1);
        case StateFormat::bf16: return in_words(tile.buffer_numel, 2);
        case StateFormat::eight_bit: return in_words(tile.buffer_numel, 4);
    }
    throw std::invalid_argument("states of unknown format " + std::to_string(static_cast<int>(tile.format)));
}

// Words of the scales of one state.
std::size_t scale_words(const TileStep& tile) {
    return tile.format == StateFormat::eight_bit ? in_words(tile.buffer_numel, kScaleBlock) : 0;
}

std::size_t master_words(const TileStep& tile) {
    return tile.outputs == Outputs::masters ? 0 : static_cast<std::size_t>(tile.buffer_numel);
}

std::int64_t states_of(const TileStep& tile) {
    return tile.buffer_arrays - (tile.outputs == Outputs::masters ? 0 : 1);
}

std::size_t buffer_bytes(const TileStep& tile) {
    const std::size_t states = static_cast<std::size_t>(states_of(tile));
    return sizeof(float) * (master_words(tile) + states * (state_words(tile) + scale_words(tile)));
}

void check_coding(const TileStep& tile, const Segment& segment, std::size_t index) {
    if (segment.place < 0) refuse(index, "begins before its parameter does");
    constexpr auto unit = static_cast<std::int64_t>(kScaleBlock);
    const std::int64_t unaligned = (segment.buffer_offset | segment.numel | segment.place) % unit;
    if (tile.format == StateFormat::eight_bit && unaligned != 0) {
        refuse(index, "does not begin and end with blocks of " + std::to_string(unit) + " elements, as states of 8 bits do");
    }
}

void check_table(const TileStep& tile, const RuleEntry& rule) {
    if (tile.buffer_numel < 0) throw std::invalid_argument("a buffer of negative size");
    if (tile.outputs < Outputs::written || tile.outputs > Outputs::masters) {
        throw std::invalid_argument("outputs of an unknown kind");
    }
    const std::int64_t arrays = tile.buffer_arrays + (tile.outputs == Outputs::masters ? 1 : 0);
    if (tile.buffer_arrays < 0 || arrays < 1 || arrays > static_cast<std::int64_t>(kMostArrays)) {
        throw std::invalid_argument("a buffer of " + std::to_string(tile.buffer_arrays) + " arrays");
    }
    if (tile.buffer_arrays > 0) {
        check_address(tile.source_buffer, DType::float32, "the source buffer");
        check_address(tile.target_buffer, DType::float32, "the target buffer");
    }
    check_scalars(tile, rule);
    if (tile.format != StateFormat::fp32 && tile.steps.size() != tile.scalars.size()) {
        throw std::invalid_argument(std::to_string(tile.scalars.size()) + " rows of scalars with " +
                                    std::to_string(tile.steps.size()) + " step counts");
    }
    const std::size_t num_bytes = buffer_bytes(tile);
    if (tile.source_buffer != tile.target_buffer && overlap(tile.source_buffer, num_bytes, tile.target_buffer, num_bytes)) {
        throw std::invalid_argument("the source and target buffers overlap without being the same");
    }
    std::int64_t end = 0;
    for (std::size_t i = 0; i < tile.segments.size(); ++i) {
        const Segment& segment = tile.segments[i];
        if (segment.numel <= 0) refuse(i, "has no elements");
        if (segment.buffer_offset < end) refuse(i, "begins before the one ahead of it ends");
        if (segment.numel > tile.buffer_numel - segment.buffer_offset) refuse(i, "reaches past the end of the buffer");
        if (segment.row < 0 || static_cast<std::size_t>(segment.row) >= tile.scalars.size()) {
            refuse(i, "names a rule that the tile does not have");
        }
        check_address(segment.gradient, segment.gradient_dtype, "the gradient");
        check_output(segment, i, tile.outputs);
        check_coding(tile, segment, i);
        end = segment.buffer_offset + segment.numel;
    }
}

constexpr std::int64_t kPlaces = std::int64_t{1} << 32;

// Not inlined: the compiler knows nothing of float modes, and would be free to
// move these roundings out of the scope of the caller's StandardFloatMode.
[[gnu::noinline]] std::vector<float> rounded(const TileStep& tile) {
    std::vector<float> scalars;
    for (const auto& row : tile.scalars) {
        for (const double value : row) scalars.push_back(static_cast<float>(value));
    }
    return scalars;
}

// The states of one span, which begins at element `at` of the buffer.
EncodedStates encoded_states(const TileStep& tile, const Segment& segment, std::int64_t begin, std::int64_t at) {
    EncodedStates found{};
    found.format = tile.format;
    found.key = rounding_key(segment.stream, tile.steps[static_cast<std::size_t>(segment.row)]);
    found.place = static_cast<std::uint64_t>(segment.place + begin);
    const std::size_t words = state_words(tile), states = static_cast<std::size_t>(states_of(tile));
    const std::size_t first = static_cast<std::size_t>(at), item = tile.format == StateFormat::bf16 ? 2 : 1;
    for (std::size_t k = 0; k < states; ++k) {
        const std::size_t word = master_words(tile) + k * words;
        found.in[k] = reinterpret_cast<const char*>(tile.source_buffer + word) + first * item;
        found.out[k] = reinterpret_cast<char*>(tile.target_buffer + word) + first * item;
        const std::size_t scale = master_words(tile) + states * words + k * scale_words(tile) + first / kScaleBlock;
        found.scales_in[k] = tile.source_buffer + scale;
        found.scales_out[k] = tile.target_buffer + scale;
    }
    return found;
}

// Steps elements [begin, begin + count) of one segment.
void step_span(const TileStep& tile, const Segment& segment, const RuleEntry& rule, const float* scalars,
               std::int64_t begin, std::int64_t count) {
    const std::int64_t at = segment.buffer_offset + begin;
    const std::size_t offset = static_cast<std::size_t>(begin);
    Span span{};
    const bool own_master = tile.outputs == Outputs::masters;
    if (own_master) span.in[0] = span.out[0] = static_cast<float*>(segment.output) + offset;
    span.arrays = own_master ? 1 : 0;
    const bool encoded = tile.format != StateFormat::fp32 && states_of(tile) > 0;
    const std::int64_t floats = !encoded ? tile.buffer_arrays : own_master ? 0 : 1;
    for (std::int64_t k = 0; k < floats; ++k, ++span.arrays) {
        const std::int64_t row = k * tile.buffer_numel;
        span.in[span.arrays] = tile.source_buffer + row + at;
        span.out[span.arrays] = tile.target_buffer + row + at;
    }
    if (encoded) {
        span.states = encoded_states(tile, segment, begin, at);
        span.arrays += static_cast<std::size_t>(states_of(tile));
    }
    span.gradient = static_cast<const char*>(segment.gradient) + offset * item_bytes(segment.gradient_dtype);
    if (segment.output_dtype != DType::none) {
        span.output = static_cast<char*>(segment.output) + offset * item_bytes(segment.output_dtype);
    }
    span.numel = static_cast<std::size_t>(count);
    span.adopt = tile.outputs == Outputs::compared;
    const DType output_dtype = own_master ? DType::none : segment.output_dtype;
    rule.step(scalars, segment.gradient_dtype, output_dtype, span, tile.source_buffer != tile.target_buffer);
}

// Whether a segment's gradient is in the memory of another segment's output, as after
// `p.grad = q.data`: then what it reads depends on which of them is stepped first.
bool reads_another_output(const TileStep& tile) {
    struct Range {
        std::uintptr_t begin, end;
        std::size_t segment;
    };
    std::vector<Range> outputs;
    outputs.reserve(tile.segments.size());
    for (std::size_t i = 0; i < tile.segments.size(); ++i) {
        const Segment& segment = tile.segments[i];
        if (segment.output_dtype == DType::none) continue;
        const auto begin = reinterpret_cast<std::uintptr_t>(segment.output);
        const std::size_t num_bytes = static_cast<std::size_t>(segment.numel) * item_bytes(segment.output_dtype);
        outputs.push_back({begin, begin + num_bytes, i});
    }
    const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
    if (!std::is_sorted(outputs.begin(), outputs.end(), before)) std::sort(outputs.begin(), outputs.end(), before);
    for (std::size_t i = 0; i < tile.segments.size(); ++i) {
        const Segment& segment = tile.segments[i];
        const auto begin = reinterpret_cast<std::uintptr_t>(segment.gradient);
        const std::uintptr_t end = begin + static_cast<std::size_t>(segment.numel) * item_bytes(segment.gradient_dtype);
        // Outputs do not overlap each other, so at most one that begins before the gradient reaches into it.
        auto found = std::upper_bound(outputs.begin(), outputs.end(), Range{begin, 0, 0}, before);
        if (found != outputs.begin() && std::prev(found)->end > begin) --found;
        for (; found != outputs.end() && found->begin < end; ++found) {
            if (found->segment != i) return true;
        }
    }
    return false;
}

void run_pieces(const TileStep& tile, const RuleEntry& rule, const std::vector<float>& scalars, ThreadPool& pool) {
    // Cut the elements of all segments into pieces of equal size, so that a tile of
    // a thousand biases is shared out like a tile of one matrix.
    std::vector<std::int64_t> ends;
    ends.reserve(tile.segments.size());
    std::int64_t total = 0;
    for (const Segment& segment : tile.segments) ends.push_back(total += segment.numel);
    const std::int64_t each = piece_numel(total, pool.threads());
    const std::size_t pieces = static_cast<std::size_t>((total + each - 1) / each);
    pool.run(pieces, [&](std::size_t piece) {
        std::int64_t at = static_cast<std::int64_t>(piece) * each;
        const std::int64_t end = std::min(at + each, total);
        std::size_t index = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
        for (; at < end; ++index) {
            const Segment& segment = tile.segments[index];
            std::int64_t begin = at - (ends[index] - segment.numel);
            const float* row = scalars.data() + static_cast<std::size_t>(segment.row) * rule.scalars;
            for (std::int64_t left = std::min(end, ends[index]) - at; left > 0;) {
                // The kernels add to the lower half of a place alone.
                const std::int64_t count = std::min(left, kPlaces - (segment.place + begin) % kPlaces);
                step_span(tile, segment, rule, row, begin, count);
                begin += count, left -= count, at += count;
            }
        }
    });
}

}  // namespace

std::uint64_t rounding_key(std::uint64_t stream, std::int64_t step) {
    std::uint64_t x = stream + static_cast<std::uint64_t>(step) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

void check_tile(const TileStep& tile) {
    if (tile.rule < 0 || static_cast<std::size_t>(tile.rule) >= kBaselineKernels.rule_count) {
        throw std::invalid_argument("a tile of unknown rule " + std::to_string(tile.rule));
    }
    check_table(tile, kBaselineKernels.rules[tile.rule]);
}

void step_tile(const TileStep& tile, ThreadPool& pool, InstructionSet isa) {
    check_tile(tile);
    const RuleEntry& rule = kernels_for(isa).rules[tile.rule];
    std::vector<float> scalars;
    {
        StandardFloatMode mode;  // or flush-to-zero would make a denormal eps zero
        scalars = rounded(tile);
    }

    if (!reads_another_output(tile)) return run_pieces(tile, rule, scalars, pool);
    TileStep alone = tile;
    for (const Segment& segment : tile.segments) {  // one after the other, as torch does
        alone.segments = {segment};
        run_pieces(alone, rule, scalars, pool);
    }
}

}  // namespace longshore
