#include "adam.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "float_mode.h"
#include "thread_pool.h"

namespace longshore {

// Not inlined: the compiler knows nothing of float modes, and would be free to
// move these roundings out of the scope of the caller's StandardFloatMode.
[[gnu::noinline]] AdamScalars scalars_of(const AdamRule& rule, const Scale& scale) {
    const double bias_correction1 = 1.0 - std::pow(rule.beta1, rule.step);
    const double bias_correction2 = 1.0 - std::pow(rule.beta2, rule.step);
    const float lerp_weight = static_cast<float>(1.0 - rule.beta1);
    AdamScalars s{};
    s.decay = rule.decoupled ? static_cast<float>(1.0 - rule.lr * rule.weight_decay) : 1.0f;
    s.l2 = rule.decoupled ? 0.0f : static_cast<float>(rule.weight_decay);
    // torch's lerp counts from the nearer end, so that a weight of 1 gives the
    // gradient exactly.
    s.lerp_from_gradient = !(lerp_weight < 0.5f);
    s.lerp_weight = s.lerp_from_gradient ? lerp_weight - 1.0f : lerp_weight;
    s.beta2 = static_cast<float>(rule.beta2);
    s.one_minus_beta2 = static_cast<float>(1.0 - rule.beta2);
    s.bias_correction2_sqrt = static_cast<float>(std::sqrt(bias_correction2));
    s.eps = static_cast<float>(rule.eps);
    s.negative_step_size = static_cast<float>(-(rule.lr / bias_correction1));
    s.scale[0] = static_cast<float>(rule.maximize ? -scale.first : scale.first);
    s.scale[1] = static_cast<float>(scale.second);
    return s;
}

namespace {

[[noreturn]] void refuse(std::size_t segment, const std::string& why) {
    throw std::invalid_argument("segment " + std::to_string(segment) + " of the tile " + why);
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
    return first < second + b_bytes && second < first + a_bytes;
}

void check_output(const Segment& segment, std::size_t index) {
    if (segment.output_dtype == DType::none) {
        if (segment.output != nullptr) refuse(index, "has an output address but no output dtype");
        return;
    }
    check_address(segment.output, segment.output_dtype, "the output");
    const std::size_t numel = static_cast<std::size_t>(segment.numel);
    const std::size_t gradient_bytes = item_bytes(segment.gradient_dtype), output_bytes = item_bytes(segment.output_dtype);
    const bool over_gradient = segment.output == segment.gradient && gradient_bytes == output_bytes;
    if (!over_gradient && overlap(segment.gradient, numel * gradient_bytes, segment.output, numel * output_bytes)) {
        refuse(index, "has an output that overlaps its gradient; it may only take its place exactly");
    }
}

void check_tile(const TileStep& tile) {
    if (tile.page_numel < 0) throw std::invalid_argument("a page of negative size");
    check_address(tile.source_page, DType::float32, "the source page");
    check_address(tile.target_page, DType::float32, "the target page");
    const std::size_t page_bytes = 3 * sizeof(float) * static_cast<std::size_t>(tile.page_numel);
    if (tile.source_page != tile.target_page && overlap(tile.source_page, page_bytes, tile.target_page, page_bytes)) {
        throw std::invalid_argument("the source and target pages overlap without being the same");
    }
    for (const AdamRule& rule : tile.rules) {
        if (!(rule.step >= 1.0)) throw std::invalid_argument("a step count below 1");
    }
    std::int64_t end = 0;
    for (std::size_t i = 0; i < tile.segments.size(); ++i) {
        const Segment& segment = tile.segments[i];
        if (segment.numel <= 0) refuse(i, "has no elements");
        if (segment.page_offset < end) refuse(i, "begins before the one ahead of it ends");
        if (segment.numel > tile.page_numel - segment.page_offset) refuse(i, "reaches past the end of the page");
        if (segment.rule < 0 || static_cast<std::size_t>(segment.rule) >= tile.rules.size()) {
            refuse(i, "names a rule that the tile does not have");
        }
        check_address(segment.gradient, segment.gradient_dtype, "the gradient");
        check_output(segment, i);
        end = segment.page_offset + segment.numel;
    }
}

// Steps elements [begin, begin + count) of one segment.
void step_span(const TileStep& tile, const Segment& segment, const AdamScalars& scalars, std::int64_t begin,
               std::int64_t count, const KernelTable& kernels) {
    const std::int64_t at = segment.page_offset + begin, stride = tile.page_numel;
    const std::size_t offset = static_cast<std::size_t>(begin);
    AdamSpan span{};
    span.master_in = tile.source_page + at;
    span.exp_avg_in = tile.source_page + stride + at;
    span.exp_avg_sq_in = tile.source_page + 2 * stride + at;
    span.master_out = tile.target_page + at;
    span.exp_avg_out = tile.target_page + stride + at;
    span.exp_avg_sq_out = tile.target_page + 2 * stride + at;
    span.gradient = static_cast<const char*>(segment.gradient) + offset * item_bytes(segment.gradient_dtype);
    if (segment.output_dtype != DType::none) {
        span.output = static_cast<char*>(segment.output) + offset * item_bytes(segment.output_dtype);
    }
    span.numel = static_cast<std::size_t>(count);
    kernels.adam(scalars, segment.gradient_dtype, segment.output_dtype, span,
                 tile.source_page != tile.target_page);
}

}  // namespace

void step_tile(const TileStep& tile, ThreadPool& pool, InstructionSet isa) {
    check_tile(tile);
    const KernelTable& kernels = kernels_for(isa);
    std::vector<AdamScalars> scalars;
    scalars.reserve(tile.rules.size());
    {
        StandardFloatMode mode;  // or flush-to-zero would make a denormal eps zero
        for (const AdamRule& rule : tile.rules) scalars.push_back(scalars_of(rule, tile.scale));
    }

    // Cut the run of all segments into pieces of equal size, so that a tile of
    // a thousand biases is shared out like a tile of one matrix.
    std::vector<std::int64_t> ends;
    ends.reserve(tile.segments.size());
    std::int64_t total = 0;
    for (const Segment& segment : tile.segments) ends.push_back(total += segment.numel);
    const std::size_t pieces = static_cast<std::size_t>((total + kPieceNumel - 1) / kPieceNumel);
    pool.run(pieces, [&](std::size_t piece) {
        std::int64_t at = static_cast<std::int64_t>(piece) * kPieceNumel;
        const std::int64_t end = std::min(at + kPieceNumel, total);
        std::size_t index = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), at) - ends.begin());
        for (; at < end; ++index) {
            const Segment& segment = tile.segments[index];
            const std::int64_t begin = at - (ends[index] - segment.numel);
            const std::int64_t count = std::min(end, ends[index]) - at;
            step_span(tile, segment, scalars[static_cast<std::size_t>(segment.rule)], begin, count, kernels);
            at += count;
        }
    });
}

}  // namespace longshore
