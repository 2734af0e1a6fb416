// The Python face: addresses and numbers in, nothing kept. The typed wrappers in
// longshore.kernels check the tensors and hold them while a call runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
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
// buffer_offset, numel, gradient, output, row of scalars, gradient dtype, output dtype
using SegmentRow = std::tuple<std::int64_t, std::int64_t, Address, Address, std::int32_t, std::int32_t, std::int32_t>;
// address, dtype, numel
using RangeRow = std::tuple<Address, std::int32_t, std::int64_t>;
using ScalePair = std::tuple<double, double>;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

Scale scale_of(const ScalePair& pair) { return {std::get<0>(pair), std::get<1>(pair)}; }

// One buffer that is stepped into another, or into itself.
using BufferRow = std::tuple<Address, Address, std::int64_t, std::int64_t>;  // source, target, arrays, numel

TileStep tile_of(std::int32_t rule, const BufferRow& buffer, const std::vector<SegmentRow>& segments,
                 std::vector<std::vector<double>> scalars, bool adopt) {
    const auto [source, target, arrays, numel] = buffer;
    TileStep tile{pointer<const float>(source), pointer<float>(target), arrays, numel, {}, rule, std::move(scalars), adopt};
    tile.segments.reserve(segments.size());
    for (const auto& [offset, count, gradient, output, row, gradient_dtype, output_dtype] : segments) {
        tile.segments.push_back({offset, count, pointer<const void>(gradient), pointer<void>(output), row,
                                 static_cast<DType>(gradient_dtype), static_cast<DType>(output_dtype)});
    }
    return tile;
}

void py_check(std::int32_t rule, const BufferRow& buffer, const std::vector<SegmentRow>& segments,
              std::vector<std::vector<double>> scalars, bool adopt) {
    check_tile(tile_of(rule, buffer, segments, std::move(scalars), adopt));
}

void py_step(ThreadPool& pool, std::int32_t rule, const BufferRow& buffer, const std::vector<SegmentRow>& segments,
             std::vector<std::vector<double>> scalars, bool adopt, InstructionSet isa) {
    const TileStep tile = tile_of(rule, buffer, segments, std::move(scalars), adopt);
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
    m.doc() = "Native kernels of longshore. Use longshore.kernels.";

    nb::enum_<InstructionSet>(m, "InstructionSet", "One build of the kernels; all give the same bits.")
        .value("BASELINE", InstructionSet::baseline)
        .value("AVX2", InstructionSet::avx2)
        .value("AVX512", InstructionSet::avx512);
    m.def("supported_instruction_sets", &supported_instruction_sets, "What this CPU runs, the best last.");

    nb::class_<ThreadPool>(m, "ThreadPool", "Threads that share out one native call at a time.",
                           nb::is_weak_referenceable())
        .def(nb::init<int, const std::vector<int>&>(), nb::arg("threads"), nb::arg("cpu_set"))
        .def_prop_ro("threads", &ThreadPool::threads);

    m.def("rules", &py_rules, "The names of the rules; step() takes a place in this list.");
    m.def("check", &py_check, nb::arg("rule"), nb::arg("buffer"), nb::arg("segments"), nb::arg("scalars"),
          nb::arg("adopt"), "The checks of step() alone, which read no memory.");
    m.def("step", &py_step, nb::arg("pool"), nb::arg("rule"), nb::arg("buffer"), nb::arg("segments"), nb::arg("scalars"),
          nb::arg("adopt"), nb::arg("isa"));
    m.def("accumulate", &py_accumulate, nb::arg("pool"), nb::arg("target"), nb::arg("source"), nb::arg("dtype"),
          nb::arg("numel"), nb::arg("add"), nb::arg("isa"), nb::call_guard<nb::gil_scoped_release>());
    m.def("reconcile", &py_reconcile, nb::arg("pool"), nb::arg("master"), nb::arg("parameter"), nb::arg("dtype"),
          nb::arg("numel"), nb::arg("adopt"), nb::arg("isa"), nb::call_guard<nb::gil_scoped_release>());
    m.def("block_sums", &py_block_sums, nb::arg("pool"), nb::arg("parameters"), nb::arg("scale"), nb::arg("isa"));
}
