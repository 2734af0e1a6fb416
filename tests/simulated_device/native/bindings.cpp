// What Python sees of the simulated devices, besides torch's own names.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/extension.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace py = pybind11;

namespace {

std::function<void()> work_of(py::object function) {
  auto* kept = new py::object(std::move(function));
  return [kept] {
    py::gil_scoped_acquire gil;
    std::unique_ptr<py::object> owned(kept);
    try {
      (*owned)();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error(error.what());  // that of Python may not leave this block
    }
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  module.def("device_count", &device_count);
  module.def("set_delays", &set_delays, py::arg("seed"), py::arg("kernel_us"), py::arg("copy_us"));
  module.def("set_poison", &set_poison);
  module.def("set_budget", &set_budget);
  module.def("pinned_bytes", &pinned_bytes);
  module.def("reset_counts", &reset_counts);
  module.def("counts", [] {
    const Counts now = counts();
    py::dict found;
    found["launches"] = now.launches;
    found["copies_to_device"] = now.copies_to_device;
    found["copies_to_host"] = now.copies_to_host;
    found["bytes_to_device"] = now.bytes_to_device;
    found["bytes_to_host"] = now.bytes_to_host;
    found["host_waits"] = now.host_waits;
    return found;
  });
  module.def("calls", [] {
    py::dict found;
    for (auto& [name, made] : calls()) found[py::str(name)] = py::make_tuple(made.all, made.waited);
    return found;
  });
  module.def("default_generator", [](int device) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
  });
  module.def("for_kernels", &for_kernels);
  module.def("mappings", [](int device) {
    auto found = mappings(device);
    return py::make_tuple(found.for_tensors, found.for_kernels, found.num_bytes);
  });
  module.def("sleep_us", [](int64_t us) {
    queue_of(current_stream(current_device())).put([us] {
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    });
  });
  // Functions of Python that a stream runs: at once when it gets there, as collectives do, or as kernels run.
  module.def("call_on_stream", [](int device, int64_t stream, py::object function) {
    queue_of(device, stream).put(work_of(std::move(function)));
  });
  module.def("launch", [](int device, int64_t stream, py::object function) {
    launch(stream_of(device, stream), work_of(std::move(function)));
  });
}
