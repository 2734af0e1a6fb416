// step_tile(): tables of segments, threads, float modes, and what is refused.
// The rules themselves are in test_rules.cpp.
#include "step.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "step_support.h"
#include "support.h"
#include "thread_pool.h"

namespace longshore::testing {
namespace {

// A tile of many segments with gaps between them, of all dtypes and several
// rules, some longer than one piece and none on a round number.
struct ManySegments {
    struct Part {
        std::size_t offset, numel;
        std::int32_t rule;
        Expected values;
        DType output_dtype;
    };
    std::vector<AdamRule> rules;
    std::vector<Part> parts;
    std::size_t buffer_numel = 0;

    ManySegments() {
        rules = {kDecoupled, kL2, {0.1, 0.5, 0.95, 1e-6, 0.0, 7.0, true, true}};
        Random random(5);
        std::size_t offset = 3;
        const auto piece = static_cast<std::size_t>(kPieceNumel);
        for (std::size_t i = 0; i < 60; ++i) {
            std::size_t numel = 1 + static_cast<std::size_t>(random.below(i % 3 == 0 ? 5 : 900));
            if (i == 20) numel = 2 * piece + 17;
            if (i == 40) numel = piece - 1;
            const DType gradient = kDTypes[random.below(3)];
            const DType output = static_cast<DType>(random.below(4));
            parts.push_back({offset, numel, static_cast<std::int32_t>(random.below(3)),
                             ordinary(3, numel, gradient, 1000 + i), output});
            Part& part = parts.back();
            part.values.step(rules[static_cast<std::size_t>(part.rule)], kScale);
            offset += numel + static_cast<std::size_t>(i % 4 == 0 ? random.below(40) : 0);
        }
        buffer_numel = offset + 5;
    }

    void check(ThreadPool& pool, InstructionSet isa, bool in_place) {
        Buffer source(DType::float32, 3 * buffer_numel), target(DType::float32, 3 * buffer_numel);
        for (Part& part : parts) put_buffer(source, part.offset, part.values.a);
        Buffer expected_source = source, expected_target = target;
        std::vector<std::unique_ptr<Buffer>> outputs;
        TileStep tile{source.floats(), in_place ? source.floats() : target.floats(),
                      3, static_cast<std::int64_t>(buffer_numel), {}, AdamRule::kEntry, rows_of(rules, kScale)};
        for (Part& part : parts) {
            put_buffer(in_place ? expected_source : expected_target, part.offset, part.values.stepped);
            const bool none = part.output_dtype == DType::none;
            outputs.push_back(std::make_unique<Buffer>(none ? DType::float32 : part.output_dtype, none ? 0 : part.numel));
            tile.segments.push_back({static_cast<std::int64_t>(part.offset), static_cast<std::int64_t>(part.numel),
                                     part.values.gradient.at(0), none ? nullptr : outputs.back()->at(0), part.rule,
                                     part.values.gradient.dtype(), part.output_dtype});
        }
        step_tile(tile, pool, isa);
        const std::string context = text(longshore::name_of(isa), ", ", pool.threads(), " threads, in place: ", in_place);
        source.check_same(expected_source, "the source buffer, ", context);
        target.check_same(expected_target, "the target buffer, ", context);
        for (std::size_t i = 0; i < parts.size(); ++i) {
            if (parts[i].output_dtype == DType::none) continue;
            outputs[i]->check_same(parts[i].values.output(parts[i].output_dtype), "output ", i, ", ", context);
        }
    }
};

TEST(step_tile_of_many_segments_for_all_thread_counts) {
    ManySegments tile;
    for (const int threads : {1, 2, 3, 7}) {
        ThreadPool pool(threads, {});
        for (const InstructionSet isa : supported_instruction_sets()) {
            tile.check(pool, isa, true);
            tile.check(pool, isa, false);
        }
    }
}

// The same elements as one segment and in cuts at odd places.
TEST(step_tile_of_any_cut_into_segments_and_threads) {
    const std::size_t numel = 2 * static_cast<std::size_t>(kPieceNumel) + 12345;
    Expected values = ordinary(3, numel, DType::bfloat16, 6);
    values.step(kDecoupled, kScale);
    const Buffer expected_output = values.output(DType::bfloat16);
    ThreadPool pool(3, {});
    Random random(7);
    for (const std::int64_t longest : {std::int64_t{1} << 40, kPieceNumel + 1, kPieceNumel - 1, std::int64_t{997}}) {
        for (const InstructionSet isa : supported_instruction_sets()) {
            Buffer buffer(DType::float32, 3 * numel), expected = buffer, output(DType::bfloat16, numel);
            put_buffer(buffer, 0, values.a);
            put_buffer(expected, 0, values.stepped);
            TileStep tile{buffer.floats(), buffer.floats(), 3, static_cast<std::int64_t>(numel), {}, AdamRule::kEntry,
                          rows_of(std::vector{kDecoupled}, kScale)};
            for (std::size_t at = 0; at < numel;) {
                const auto count = std::min(longest > kPieceNumel ? longest : 1 + random.below(longest),
                                            static_cast<std::int64_t>(numel - at));
                tile.segments.push_back({static_cast<std::int64_t>(at), count, values.gradient.at(at), output.at(at), 0,
                                         DType::bfloat16, DType::bfloat16});
                at += static_cast<std::size_t>(count);
            }
            step_tile(tile, pool, isa);
            buffer.check_same(expected, longshore::name_of(isa), ", segments of at most ", longest);
            output.check_same(expected_output, longshore::name_of(isa), ", segments of at most ", longest);
        }
    }
}

// Two parameters that are their own masters: the buffer has their states alone, which
// SGD without momentum has none of.
template <class Rule>
void check_own_masters(std::size_t arrays, const Rule& rule, ThreadPool& pool, InstructionSet isa, bool in_place) {
    const std::size_t numel = static_cast<std::size_t>(kPieceNumel) + 77, behind = 5, buffer_numel = 2 * numel + behind;
    const std::size_t states = arrays - 1;
    Buffer source(DType::float32, states * buffer_numel), target(DType::float32, in_place ? 0 : states * buffer_numel);
    Buffer expected_source = source, expected_target = target;
    TileStep tile{source.floats(), in_place ? source.floats() : target.floats(), static_cast<std::int64_t>(states),
                  static_cast<std::int64_t>(buffer_numel), {}, Rule::kEntry, rows_of(std::vector{rule}, kScale),
                  Outputs::masters};
    std::vector<Expected> values;
    std::vector<std::unique_ptr<Buffer>> parameters;
    for (std::size_t i = 0; i < 2; ++i) values.push_back(ordinary(arrays, numel, DType::bfloat16, 30 + i));
    for (std::size_t i = 0; i < 2; ++i) {
        Expected& each = values[i];
        each.step(rule, kScale);
        const std::size_t at = i * (numel + behind);
        parameters.push_back(std::make_unique<Buffer>(DType::float32, numel));
        parameters.back()->write(0, each.a[0].data(), numel);
        if (states > 0) {
            const Arrays before(each.a.begin() + 1, each.a.end()), after(each.stepped.begin() + 1, each.stepped.end());
            put_buffer(source, at, before);
            if (!in_place) put_buffer(expected_source, at, before);
            put_buffer(in_place ? expected_source : expected_target, at, after);
        }
        tile.segments.push_back({static_cast<std::int64_t>(at), static_cast<std::int64_t>(numel), each.gradient.at(0),
                                 parameters.back()->at(0), 0, DType::bfloat16, DType::float32});
    }
    step_tile(tile, pool, isa);
    const std::string context = text(longshore::name_of(isa), ", ", arrays, " arrays, in place: ", in_place);
    source.check_same(expected_source, "the source buffer, ", context);
    target.check_same(expected_target, "the target buffer, ", context);
    for (std::size_t i = 0; i < 2; ++i) parameters[i]->check_same(values[i].output(DType::float32), "parameter, ", context);
}

TEST(step_tile_of_parameters_that_are_their_own_masters) {
    ThreadPool pool(2, {});
    for (const InstructionSet isa : supported_instruction_sets()) {
        for (const bool in_place : {true, false}) {
            check_own_masters(3, kDecoupled, pool, isa, in_place);
            check_own_masters(3, kL2, pool, isa, in_place);
            check_own_masters(2, LionRule{}, pool, isa, in_place);
            check_own_masters(1, SgdRule{}, pool, isa, in_place);
        }
    }
}

TEST(step_tile_of_no_segments_writes_nothing) {
    ThreadPool pool(2, {});
    Buffer buffer(DType::float32, 30), expected = buffer;
    const auto rows = rows_of(std::vector{kDecoupled}, Scale{});
    step_tile({buffer.floats(), buffer.floats(), 3, 10, {}, AdamRule::kEntry, rows}, pool, InstructionSet::baseline);
    step_tile({buffer.floats(), buffer.floats(), 3, 10, {}, AdamRule::kEntry, {}}, pool, InstructionSet::baseline);
    buffer.check_same(expected);
}

// Denormals in, denormals out, and scalars that are denormal themselves, while
// the caller and the threads that it made flush them.
TEST(step_tile_keeps_denormals_under_flush_to_zero_on_all_threads) {
    if (!FlushToZero::known()) return;
    const AdamRule rule = {1e-41, 0.9, 0.999, 1e-40, 0.0, 1.0, true, false};
    const Scale scale = {0x1p-130, 1.0};
    for (const std::size_t numel : {std::size_t{100}, 3 * static_cast<std::size_t>(kPieceNumel)}) {  // one piece; several
        Expected values(3, numel, DType::float32);
        Random random(8);
        for (std::size_t i = 0; i < numel; ++i) {
            values.a[0][i] = random.ordinary() * 0x1p-127f;
            values.a[1][i] = random.ordinary() * 0x1p-127f;
            values.a[2][i] = i % 3 == 0 ? 0.0f : std::fabs(random.ordinary()) * 0x1p-127f;
            values.gradient.set(i, random.ordinary());
        }
        values.step(rule, scale);
        const auto denormal = [](float x) { return x != 0.0f && std::fabs(x) < 0x1p-126f; };
        CHECK(std::count_if(values.stepped[0].begin(), values.stepped[0].end(), denormal) > static_cast<std::int64_t>(numel) / 2);
        CHECK(std::count_if(values.stepped[1].begin(), values.stepped[1].end(), denormal) > static_cast<std::int64_t>(numel) / 2);
        CHECK(!flushes());
        FlushToZero mode;
        CHECK(flushes());
        ThreadPool pool(2, {});
        check_in_place(values, rule, scale, pool);
        CHECK(FlushToZero::active() && flushes(), "the caller lost its own mode");
    }
}

// A tile of two segments that step_tile() takes, for a refusal to spoil.
struct RefusedTile {
    Buffer source{DType::float32, 60}, target{DType::float32, 60}, gradient{DType::bfloat16, 20},
        output{DType::bfloat16, 20};
    TileStep tile{source.floats(), target.floats(), 3, 20, {}, AdamRule::kEntry,
                  rows_of(std::vector{kDecoupled, kL2}, Scale{})};

    RefusedTile() {
        tile.segments = {{0, 10, gradient.at(0), output.at(0), 0, DType::bfloat16, DType::bfloat16},
                         {10, 10, gradient.at(10), output.at(10), 1, DType::bfloat16, DType::bfloat16}};
    }
};

void check_refused(const char* part, const std::function<void(RefusedTile&)>& spoil,
                   InstructionSet isa = InstructionSet::baseline) {
    ThreadPool pool(2, {});
    RefusedTile refused;
    const Buffer source = refused.source, target = refused.target, gradient = refused.gradient, output = refused.output;
    spoil(refused);
    CHECK_THROWS(std::invalid_argument, part, step_tile(refused.tile, pool, isa));
    refused.source.check_same(source, part);
    refused.target.check_same(target, part);
    refused.gradient.check_same(gradient, part);
    refused.output.check_same(output, part);
}

TEST(step_tile_refuses_before_it_writes) {
    {
        ThreadPool pool(2, {});
        RefusedTile accepted;
        const Buffer before = accepted.target;
        step_tile(accepted.tile, pool, InstructionSet::baseline);
        CHECK(std::memcmp(before.at(0), accepted.target.at(0), 60 * sizeof(float)) != 0, "unspoiled, the tile is stepped");
    }
    // The second segment is spoiled, so that a check made too late would find the first one stepped.
    const auto second = [](RefusedTile& t) -> Segment& { return t.tile.segments[1]; };
    const auto unaligned = [](void* address) { return static_cast<void*>(static_cast<char*>(address) + 1); };
    check_refused("a buffer of negative size", [](RefusedTile& t) { t.tile.buffer_numel = -1; });
    check_refused("the source buffer is a null address", [](RefusedTile& t) { t.tile.source_buffer = nullptr; });
    check_refused("the target buffer is a null address", [](RefusedTile& t) { t.tile.target_buffer = nullptr; });
    check_refused("the source buffer is not aligned", [&](RefusedTile& t) {
        t.tile.source_buffer = static_cast<const float*>(unaligned(t.source.at(0)));
    });
    check_refused("the target buffer is not aligned",
                  [&](RefusedTile& t) { t.tile.target_buffer = static_cast<float*>(unaligned(t.target.at(0))); });
    check_refused("buffers overlap", [](RefusedTile& t) { t.tile.target_buffer = t.source.floats(1); });
    check_refused("buffers overlap", [](RefusedTile& t) {
        t.tile.source_buffer = t.source.floats(20);
        t.tile.target_buffer = t.source.floats(0);
        t.tile.buffer_numel = 7;
    });
    check_refused("a tile of unknown rule -1", [](RefusedTile& t) { t.tile.rule = -1; });
    check_refused("a tile of unknown rule 6", [](RefusedTile& t) { t.tile.rule = 6; });
    check_refused("Adam has 10 scalars, not 9", [](RefusedTile& t) { t.tile.scalars[1].pop_back(); });
    check_refused("Adam has 10 scalars, not 0", [](RefusedTile& t) { t.tile.scalars[0].clear(); });
    check_refused("a buffer of 0 arrays", [](RefusedTile& t) { t.tile.buffer_arrays = 0; });
    check_refused("a buffer of 4 arrays", [](RefusedTile& t) { t.tile.buffer_arrays = 4; });
    check_refused("a buffer of 2 arrays, and Adam has 3", [](RefusedTile& t) { t.tile.buffer_arrays = 2; });
    check_refused("a buffer of 1 arrays, and Adam has 2", [](RefusedTile& t) {
        t.tile.outputs = Outputs::masters;
        t.tile.buffer_arrays = 1;
    });
    check_refused("segment 0 of the tile has its master in an output that is not float32", [](RefusedTile& t) {
        t.tile.outputs = Outputs::masters;
        t.tile.buffer_arrays = 2;
    });
    check_refused("outputs of an unknown kind", [](RefusedTile& t) { t.tile.outputs = static_cast<Outputs>(3); });
    const auto by = [](const auto& rule) {
        return [rule](RefusedTile& t) {
            t.tile.rule = rule.kEntry;
            t.tile.scalars = rows_of(std::vector{rule, rule}, Scale{});
        };
    };
    check_refused("a buffer of 3 arrays, and Lion has 2", by(LionRule{}));
    check_refused("a buffer of 3 arrays, and Adagrad has 2", by(AdagradRule{}));
    check_refused("a buffer of 3 arrays, and SGD has 1 or 2", by(SgdRule{}));
    check_refused("segment 1 of the tile has no elements", [&](RefusedTile& t) { second(t).numel = 0; });
    check_refused("segment 1 of the tile has no elements", [&](RefusedTile& t) { second(t).numel = -3; });
    check_refused("begins before the one ahead of it ends", [&](RefusedTile& t) { second(t).buffer_offset = 9; });
    check_refused("segment 0 of the tile begins before", [](RefusedTile& t) { t.tile.segments[0].buffer_offset = -1; });
    check_refused("segment 1 of the tile begins before",
                  [](RefusedTile& t) { std::swap(t.tile.segments[0], t.tile.segments[1]); });
    check_refused("past the end of the buffer", [&](RefusedTile& t) { second(t).numel = 11; });
    check_refused("past the end of the buffer", [&](RefusedTile& t) { second(t).buffer_offset = 21; });
    check_refused("past the end of the buffer", [&](RefusedTile& t) { second(t).buffer_offset = INT64_MAX; });
    check_refused("past the end of the buffer", [&](RefusedTile& t) { second(t).numel = INT64_MAX; });
    check_refused("names a rule that the tile does not have", [&](RefusedTile& t) { second(t).row = 2; });
    check_refused("names a rule that the tile does not have", [&](RefusedTile& t) { second(t).row = -1; });
    check_refused("the gradient is a null address", [&](RefusedTile& t) { second(t).gradient = nullptr; });
    check_refused("the gradient is not aligned",
                  [&](RefusedTile& t) { second(t).gradient = unaligned(t.gradient.at(0)); });
    check_refused("unknown dtype 0", [&](RefusedTile& t) { second(t).gradient_dtype = DType::none; });
    check_refused("unknown dtype 4", [&](RefusedTile& t) { second(t).gradient_dtype = static_cast<DType>(4); });
    check_refused("unknown dtype -1", [&](RefusedTile& t) { second(t).output_dtype = static_cast<DType>(-1); });
    check_refused("the output is a null address", [&](RefusedTile& t) { second(t).output = nullptr; });
    check_refused("the output is not aligned", [&](RefusedTile& t) { second(t).output = unaligned(t.output.at(0)); });
    check_refused("has an output address but no output dtype",
                  [&](RefusedTile& t) { second(t).output_dtype = DType::none; });
    check_refused("overlaps its gradient", [&](RefusedTile& t) { second(t).output = t.gradient.at(9); });
    check_refused("overlaps its gradient", [&](RefusedTile& t) {  // its place, but not its size
        second(t).numel = 4;
        second(t).output = t.gradient.at(10);
        second(t).output_dtype = DType::float32;
    });
    check_refused("unknown instruction set", [](RefusedTile&) {}, static_cast<InstructionSet>(99));
    check_refused("unknown instruction set", [](RefusedTile&) {}, static_cast<InstructionSet>(-1));
}

}  // namespace
}  // namespace longshore::testing
