// Operators of the simulated devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

namespace simulated {

// A tensor on the CPU over the memory of one on a device, at the address that kernels use. Only for what runs on one of
// the device's streams.
at::Tensor for_kernels(const at::Tensor& tensor);

bool on_device(const at::Tensor& tensor);
at::Tensor& resize_to(at::Tensor& self, c10::IntArrayRef size);

void launch(const c10::Stream& stream, std::function<void()> work);
// Runs work on the stream and waits for it. Its own errors are raised here.
void run_and_wait(const c10::Stream& stream, const std::function<void()>& work);

// How often each operator ran, and how often it made the host wait since its result depends on values.
struct Calls {
  int64_t all = 0, waited = 0;
};
std::map<std::string, Calls> calls();

}  // namespace simulated
