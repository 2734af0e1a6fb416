// States that are not float: every instruction set gives the bits of the baseline, in
// place or not, however the elements are cut, and not one byte is written elsewhere.
// What the bits are is compared in tests/kernels/test_encoded.py.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "step.h"
#include "step_support.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {
namespace {

constexpr AdamRule kRule = {1e-3, 0.9, 0.999, 1e-8, 0.01, 3.0, true, false};
constexpr std::size_t kAround = kScaleBlock;  // elements of the buffer before and behind the segments

// A buffer with master and two states, of which elements [kAround, kAround + numel) are stepped.
struct Encoded {
    StateFormat format;
    std::size_t numel, buffer_numel, words;
    Buffer buffer;

    Encoded(StateFormat kind, std::size_t count)
        : format(kind), numel(count), buffer_numel(count + 2 * kAround), words(words_of(kind, buffer_numel)),
          buffer(DType::float32, words) {
        Random random(numel);
        std::vector<std::uint8_t> bytes(words * sizeof(float));
        for (auto& byte : bytes) byte = static_cast<std::uint8_t>(1 + random.below(125));  // finite in each code
        for (std::size_t i = 0; i < bytes.size() && kind == StateFormat::bf16; i += 2) bytes[i + 1] = 0x3a;
        buffer.write(0, bytes.data(), words);
        for (std::size_t i = 0; i < buffer_numel; ++i) *buffer.floats(i) = random.ordinary();
        const std::size_t scales = kind == StateFormat::eight_bit ? 2 * ((buffer_numel + kScaleBlock - 1) / kScaleBlock) : 0;
        for (std::size_t i = words - scales; i < words; ++i) *buffer.floats(i) = 0x1p-9f;
    }

    static std::size_t words_of(StateFormat kind, std::size_t count) {
        const std::size_t per_word = kind == StateFormat::bf16 ? 2 : 4;
        const std::size_t scales = kind == StateFormat::eight_bit ? (count + kScaleBlock - 1) / kScaleBlock : 0;
        return count + 2 * ((count + per_word - 1) / per_word + scales);
    }
};

// Steps elements from `place` on in segments of at most `longest` elements.
void step(const Encoded& source, Buffer& target, const Buffer& gradient, Buffer& output, std::int64_t place,
          std::size_t longest, ThreadPool& pool, InstructionSet isa) {
    TileStep tile{source.buffer.floats(), target.floats(), 3, static_cast<std::int64_t>(source.buffer_numel), {},
                  AdamRule::kEntry, rows_of(std::vector{kRule}, kScale)};
    tile.format = source.format;
    tile.steps = {3};
    for (std::size_t at = 0; at < source.numel; at += longest) {
        const std::size_t count = std::min(longest, source.numel - at);
        tile.segments.push_back({static_cast<std::int64_t>(kAround + at), static_cast<std::int64_t>(count),
                                 gradient.at(at), output.at(at), 0, DType::bfloat16, DType::bfloat16, 77,
                                 place + static_cast<std::int64_t>(at)});
    }
    step_tile(tile, pool, isa);
}

void check(StateFormat format, std::size_t numel, std::int64_t place, std::size_t longest) {
    const Encoded source(format, numel);
    Random random(numel + 1);
    Buffer gradient(DType::bfloat16, numel);
    for (std::size_t i = 0; i < numel; ++i) gradient.set(i, random.ordinary());
    ThreadPool one(1, {}), three(3, {});
    Encoded first(format, numel);
    Buffer first_output(DType::bfloat16, numel);
    step(first, first.buffer, gradient, first_output, place, numel, one, InstructionSet::baseline);
    CHECK(std::memcmp(first.buffer.at(0), source.buffer.at(0), first.words * sizeof(float)) != 0, "nothing was stepped");
    for (const InstructionSet isa : supported_instruction_sets()) {
        const std::string context = text(longshore::name_of(isa), ", format ", static_cast<int>(format), ", numel ", numel,
                                         ", place ", place, ", segments of at most ", longest);
        Encoded in_place(format, numel);
        Buffer output(DType::bfloat16, numel), target = source.buffer, other_output(DType::bfloat16, numel);
        step(in_place, in_place.buffer, gradient, output, place, longest, three, isa);
        in_place.buffer.check_same(first.buffer, "in place, ", context);
        output.check_same(first_output, "the output, ", context);
        Encoded unchanged(format, numel);
        step(unchanged, target, gradient, other_output, place, longest, three, isa);
        target.check_same(first.buffer, "out of place, ", context);
        other_output.check_same(first_output, "the other output, ", context);
        unchanged.buffer.check_same(source.buffer, "the source, ", context);
    }
}

TEST(bfloat16_states_of_every_numel) {
    for (std::size_t numel = 1; numel < 3 * kScaleBlock; ++numel) check(StateFormat::bf16, numel, 5, numel);
}

TEST(states_in_segments) {
    for (const std::size_t longest : {std::size_t{1} << 30, std::size_t{1024}, std::size_t{192}}) {
        check(StateFormat::bf16, static_cast<std::size_t>(kPieceNumel) + 77, 3, longest);
        check(StateFormat::eight_bit, static_cast<std::size_t>(kPieceNumel) + 3 * kScaleBlock, 0, longest);
    }
}

TEST(eight_bit_states_of_every_number_of_blocks) {
    for (std::size_t blocks = 1; blocks < 20; ++blocks) {
        check(StateFormat::eight_bit, blocks * kScaleBlock, 2 * kScaleBlock, blocks * kScaleBlock);
    }
}

// A kernel adds to the lower half of a place alone, so that a call is cut where it overflows.
TEST(places_beyond_four_gibi) {
    constexpr std::int64_t edge = std::int64_t{1} << 32;
    check(StateFormat::bf16, 200, edge - 70, 70);
    check(StateFormat::eight_bit, 4 * kScaleBlock, edge - 2 * static_cast<std::int64_t>(kScaleBlock), 2 * kScaleBlock);
}

TEST(segments_of_parts_of_blocks_are_refused) {
    Encoded source(StateFormat::eight_bit, 2 * kScaleBlock);
    Buffer gradient(DType::bfloat16, 2 * kScaleBlock), output(DType::bfloat16, 2 * kScaleBlock);
    ThreadPool pool(1, {});
    const auto refused = [&](std::int64_t place, std::size_t longest) {
        step(source, source.buffer, gradient, output, place, longest, pool, InstructionSet::baseline);
    };
    CHECK_THROWS(std::invalid_argument, "does not begin and end with blocks", refused(1, 2 * kScaleBlock));
    CHECK_THROWS(std::invalid_argument, "does not begin and end with blocks", refused(0, 100));
    CHECK_THROWS(std::invalid_argument, "begins before its parameter does", refused(-64, 2 * kScaleBlock));
}

}  // namespace
}  // namespace longshore::testing
