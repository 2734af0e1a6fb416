// Operators that make tensors, views of them, and copies.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>

#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace simulated {

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

void launch(const c10::Stream& stream, std::function<void()> work) {
  count_launch();
  auto& queue = queue_of(stream);
  queue.put([&queue, most_us = delays().kernel_us, work = std::move(work)] {
    queue.delay(most_us);
    work();
  });
}

void run_and_wait(const c10::Stream& stream, const std::function<void()>& work) {
  std::exception_ptr failed;
  queue_of(stream).put([&] {
    try {
      work();
    } catch (...) {
      failed = std::current_exception();
    }
  });
  wait_for(mark(stream));
  if (failed) std::rethrow_exception(failed);
}

at::Tensor& resize_to(at::Tensor& self, c10::IntArrayRef size) {
  if (self.sizes() == size) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = (self.numel() + self.storage_offset()) * self.itemsize();
  if (needed > self.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

namespace {

char* start_of(const at::Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.storage().data())) + tensor.storage_offset() * tensor.itemsize();
}

// ---- new tensors, views and storages ----------------------------------------

c10::Device device_or_current(std::optional<c10::Device> device) {
  const auto given = c10::device_or_default(device);
  return {TYPE, static_cast<c10::DeviceIndex>(given.index() < 0 ? current_device() : given.index())};
}

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), KEYS, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  return resize_to(const_cast<at::Tensor&>(self), size);
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor& set_to_part_of_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                                   c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, at::Storage storage) {
  const int64_t numel = storage.nbytes() / self.itemsize();
  return set_to_part_of_storage(self, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_to_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_to_part_of_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---- copies -----------------------------------------------------------------

at::Scalar local_scalar(const at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Scalar found;
  count_copy(false, self.itemsize());
  run_and_wait(current_stream(self.device().index()), [&] { found = for_kernels(self).item(); });
  return found;
}

void copy_between_devices(const at::Tensor& from, const at::Tensor& to) {
  const auto stream = current_stream(from.device().index()), other = current_stream(to.device().index());
  const bool two = stream.device_index() != other.device_index();
  if (two) wait_on(stream, mark(other));
  launch(stream, [from = for_kernels(from), to = for_kernels(to)] { to.copy_(from); });
  if (two) wait_on(other, mark(stream));
}

// As cudaMemcpyAsync: a source in pageable memory has been read when this returns, and a target there been written.
void copy_with_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool to_device = on_device(to);
  const auto& host = to_device ? from : to;
  const auto stream = current_stream((to_device ? to : from).device().index());
  auto& queue = queue_of(stream);
  count_copy(to_device, from.numel() * from.itemsize());
  const auto copy = [&queue, most_us = delays().copy_us](const at::Tensor& source, const at::Tensor& target) {
    queue.delay(most_us);
    target.copy_(source);
  };
  if (non_blocking && is_pinned(host.storage().data())) {
    queue.put([copy, from = for_kernels(from), to = for_kernels(to), kept = host.storage()]() mutable {
      copy(from, to);
      let_go_later(std::move(kept));
    });
  } else if (non_blocking && to_device) {
    queue.put([copy, from = from.contiguous().clone(), to = for_kernels(to)] { copy(from, to); });
  } else {
    run_and_wait(stream, [&] { copy(for_kernels(from), for_kernels(to)); });
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  c10::DeviceGuard guard(on_device(from) ? from.device() : to.device());
  if (on_device(from) && on_device(to))
    copy_between_devices(from, to);
  else
    copy_with_host(from, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (on_device(to))
    resize_to(const_cast<at::Tensor&>(to), from.sizes());
  else
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

}  // namespace

at::Tensor for_kernels(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.numel() == 0 || !tensor.storage().data())
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  void* start = start_of(tensor);
  return at::from_blob(on_device(tensor) ? address_for_kernels(start) : start, tensor.sizes(), tensor.strides(),
                       options);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("as_strided", as_strided);
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("set_.source_Storage_storage_offset", set_to_part_of_storage);
  library.impl("set_.source_Storage", set_to_storage);
  library.impl("set_.source_Tensor", set_to_tensor);
  library.impl("record_stream", record_stream);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

using namespace at::autocast;  // the macros below name what is in it

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(pow, Tensor_Scalar, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32_set_opt_dtype)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32_set_opt_dtype)
}

}  // namespace simulated
