// The Python face: addresses and numbers in, nothing kept. The typed wrappers in
// longshore.kernels check the tensors and hold them while a call runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "buffers.h"
#include "dispatch.h"
#include "step.h"
#include "thread_pool.h"

namespace nb = nanobind;
using namespace longshore;

namespace {

using Address = std::uintptr_t;
// buffer_offset, numel, gradient, output, row of scalars, gradient dtype, output dtype, stream, place
using SegmentRow = std::tuple<std::int64_t, std::int64_t, Address, Address, std::int32_t, std::int32_t, std::int32_t,
                              std::uint64_t, std::int64_t>;
// address, dtype, numel
using RangeRow = std::tuple<Address, std::int32_t, std::int64_t>;
using ScalePair = std::tuple<double, double>;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

Scale scale_of(const ScalePair& pair) { return {std::get<0>(pair), std::get<1>(pair)}; }

// One buffer that is stepped into another, or into itself: source, target, arrays, numel, format of the states.
using BufferRow = std::tuple<Address, Address, std::int64_t, std::int64_t, std::int32_t>;
// The scalars of each rule, and its step count.
using RuleRows = std::pair<std::vector<std::vector<double>>, std::vector<std::int64_t>>;

TileStep tile_of(std::int32_t rule, const BufferRow& buffer, const std::vector<SegmentRow>& segments, RuleRows rules,
                 Outputs outputs) {
    const auto [source, target, arrays, numel, format] = buffer;
    TileStep tile{pointer<const float>(source),    pointer<float>(target), arrays, numel, {}, rule, std::move(rules.first),
                  outputs, static_cast<StateFormat>(format), std::move(rules.second)};
    tile.segments.reserve(segments.size());
    for (const auto& [offset, count, gradient, output, row, gradient_dtype, output_dtype, stream, place] : segments) {
        tile.segments.push_back({offset, count, pointer<const void>(gradient), pointer<void>(output), row,
                                 static_cast<DType>(gradient_dtype), static_cast<DType>(output_dtype), stream, place});
    }
    return tile;
}

void py_check(std::int32_t rule, const BufferRow& buffer, const std::vector<SegmentRow>& segments, RuleRows rules,
              Outputs outputs) {
    check_tile(tile_of(rule, buffer, segments, std::move(rules), outputs));
}

void py_step(ThreadPool& pool, std::int32_t rule, const BufferRow& buffer, const std::vector<SegmentRow>& segments,
             RuleRows rules, Outputs outputs, InstructionSet isa) {
    const TileStep tile = tile_of(rule, buffer, segments, std::move(rules), outputs);
    nb::gil_scoped_release release;
    step_tile(tile, pool, isa);
}

// The rows of a tile's table that are the same in each step: everything but the
// addresses of the parameters' gradients and outputs, to which a row adds where in
// them its segment begins.
class SegmentTable {
  public:
    // buffer_offset, numel, first byte in the gradient and in the output, gradient dtype, output dtype, stream, place
    using Row = std::tuple<std::int64_t, std::int64_t, Address, Address, std::int32_t, std::int32_t, std::uint64_t,
                           std::int64_t>;

    explicit SegmentTable(std::vector<Row> rows) : rows_(std::move(rows)) {}

    // One entry of each argument for each row; no address of a gradient: the segment is not stepped.
    std::vector<Segment> at(const std::vector<Address>& gradients, const std::vector<Address>& outputs,
                            const std::vector<std::int32_t>& scalar_rows) const {
        if (gradients.size() != rows_.size() || outputs.size() != rows_.size() || scalar_rows.size() != rows_.size()) {
            throw std::invalid_argument("a table of " + std::to_string(rows_.size()) + " segments with " +
                                        std::to_string(gradients.size()) + " gradients, " +
                                        std::to_string(outputs.size()) + " outputs and " +
                                        std::to_string(scalar_rows.size()) + " rules");
        }
        std::vector<Segment> segments;
        segments.reserve(rows_.size());
        for (std::size_t i = 0; i < rows_.size(); ++i) {
            if (gradients[i] == 0) continue;
            const auto& [offset, numel, gradient, output, gradient_dtype, output_dtype, stream, place] = rows_[i];
            segments.push_back({offset, numel, pointer<const void>(gradients[i] + gradient),
                                pointer<void>(outputs[i] + output), scalar_rows[i], static_cast<DType>(gradient_dtype),
                                static_cast<DType>(output_dtype), stream, place});
        }
        return segments;
    }

  private:
    std::vector<Row> rows_;
};

void py_step_table(ThreadPool& pool, std::int32_t rule, const BufferRow& buffer, const SegmentTable& table,
                   const std::tuple<std::vector<Address>, std::vector<Address>, std::vector<std::int32_t>>& places,
                   RuleRows rules, Outputs outputs, InstructionSet isa) {
    TileStep tile = tile_of(rule, buffer, {}, std::move(rules), outputs);
    tile.segments = std::apply([&](const auto&... each) { return table.at(each...); }, places);
    nb::gil_scoped_release release;
    step_tile(tile, pool, isa);
}

std::vector<std::string> py_rules() {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < kBaselineKernels.rule_count; ++i) names.emplace_back(kBaselineKernels.rules[i].name);
    return names;
}

void py_accumulate(ThreadPool& pool, Address target, Address source, std::int32_t dtype, std::int64_t numel, bool add,
                   InstructionSet isa) {
    accumulate(pointer<float>(target), pointer<const void>(source), static_cast<DType>(dtype), numel, add, pool, isa);
}

void py_sum_of_two(ThreadPool& pool, Address target, Address first, Address second, std::int32_t dtype,
                   std::int64_t numel, InstructionSet isa) {
    sum_of_two(pointer<float>(target), pointer<const void>(first), pointer<const void>(second),
               static_cast<DType>(dtype), numel, pool, isa);
}

std::int64_t py_reconcile(ThreadPool& pool, Address master, Address parameter, std::int32_t dtype, std::int64_t numel,
                          bool adopt, InstructionSet isa) {
    return reconcile(pointer<float>(master), pointer<const void>(parameter), static_cast<DType>(dtype), numel, adopt,
                     pool, isa);
}

std::vector<std::vector<GradientRange>> ranges_of(const std::vector<std::vector<RangeRow>>& parameters) {
    std::vector<std::vector<GradientRange>> ranges;
    ranges.reserve(parameters.size());
    for (const auto& parameter : parameters) {
        auto& row = ranges.emplace_back();
        row.reserve(parameter.size());
        for (const auto& [address, dtype, numel] : parameter) {
            row.push_back({pointer<const void>(address), static_cast<DType>(dtype), numel});
        }
    }
    return ranges;
}

std::vector<std::vector<double>> py_block_sums(ThreadPool& pool, const std::vector<std::vector<RangeRow>>& parameters,
                                               ScalePair scale, InstructionSet isa) {
    const auto ranges = ranges_of(parameters);
    nb::gil_scoped_release release;
    return block_sums(ranges, scale_of(scale), pool, isa);
}

}  // namespace

NB_MODULE(_native, m) {
#ifdef NDEBUG
    // What an ended program still refers to, as a traceback does, is no leak, and a list
    // of it would bury the error.
    nb::set_leak_warnings(false);
#endif
    m.doc() = "Native kernels of longshore. Use longshore.kernels.";

    nb::enum_<InstructionSet>(m, "InstructionSet", "One build of the kernels; all give the same bits.")
        .value("BASELINE", InstructionSet::baseline)
        .value("AVX2", InstructionSet::avx2)
        .value("AVX512", InstructionSet::avx512);
    m.def("supported_instruction_sets", &supported_instruction_sets, "What this CPU runs, the best last.");

    nb::enum_<Outputs>(m, "Outputs", "What the outputs of a step hold before it.")
        .value("WRITTEN", Outputs::written, "nothing that is read")
        .value("COMPARED", Outputs::compared,
               "the parameters as they are now: elements whose bits differ from the rounded master were written by "
               "somebody else, and replace their masters before the rule is applied")
        .value("MASTERS", Outputs::masters,
               "the masters: float32 parameters, which are stepped where they are. The buffer has the states only.");

    nb::class_<ThreadPool>(m, "ThreadPool", "Threads that share out one native call at a time.",
                           nb::is_weak_referenceable())
        .def(nb::init<int, const std::vector<int>&>(), nb::arg("threads"), nb::arg("cpu_set"))
        .def_prop_ro("threads", &ThreadPool::threads);

    nb::class_<SegmentTable>(m, "SegmentTable", "The rows of a tile's table that are the same in each step.")
        .def(nb::init<std::vector<SegmentTable::Row>>(), nb::arg("rows"));

    m.def("rules", &py_rules, "The names of the rules; step() takes a place in this list.");
    m.def("check", &py_check, nb::arg("rule"), nb::arg("buffer"), nb::arg("segments"), nb::arg("rules"),
          nb::arg("outputs"), "The checks of step() alone, which read no memory.");
    m.def("step", &py_step, nb::arg("pool"), nb::arg("rule"), nb::arg("buffer"), nb::arg("segments"), nb::arg("rules"),
          nb::arg("outputs"), nb::arg("isa"));
    m.def("step_table", &py_step_table, nb::arg("pool"), nb::arg("rule"), nb::arg("buffer"), nb::arg("table"),
          nb::arg("places"), nb::arg("rules"), nb::arg("outputs"), nb::arg("isa"),
          "step(), given gradients, outputs and rows of scalars for each row of a SegmentTable.");
    m.def("accumulate", &py_accumulate, nb::arg("pool"), nb::arg("target"), nb::arg("source"), nb::arg("dtype"),
          nb::arg("numel"), nb::arg("add"), nb::arg("isa"), nb::call_guard<nb::gil_scoped_release>());
    m.def("sum_of_two", &py_sum_of_two, nb::arg("pool"), nb::arg("target"), nb::arg("first"), nb::arg("second"),
          nb::arg("dtype"), nb::arg("numel"), nb::arg("isa"), nb::call_guard<nb::gil_scoped_release>());
    m.def("reconcile", &py_reconcile, nb::arg("pool"), nb::arg("master"), nb::arg("parameter"), nb::arg("dtype"),
          nb::arg("numel"), nb::arg("adopt"), nb::arg("isa"), nb::call_guard<nb::gil_scoped_release>());
    m.def("block_sums", &py_block_sums, nb::arg("pool"), nb::arg("parameters"), nb::arg("scale"), nb::arg("isa"));
}
