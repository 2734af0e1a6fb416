// Memory of the simulated devices, and pinned memory of the host.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>

#include "streams.h"

namespace c10 {
struct DeviceAllocator;
}

namespace simulated {

// Device memory is mapped twice. Tensors have addresses of the first mapping, which nobody may read or write: a host
// that does ends with a segmentation fault, as it deserves. Kernels use the second one.
void* address_for_kernels(const void* address);
int device_of(const void* address);  // -1: none

struct Mappings {
  uint64_t for_tensors, for_kernels, num_bytes;
};
Mappings mappings(int device);

c10::DeviceAllocator& device_allocator();
at::Allocator& pinned_allocator();
bool is_pinned(const void* address);
int64_t pinned_bytes();

// Bytes that tensors may take on each device. Beyond it, an allocation raises torch.OutOfMemoryError.
void set_budget(int64_t num_bytes);

// Memory that is freed is overwritten with 0xff (NaN in every float) by the stream that it was allocated on, before
// anything that is allocated there next.
void set_poison(bool on);

// Copies keep host memory until they have run. It may belong to Python objects, so it is let go of by the host's next
// wait or allocation, and not on the thread of a stream.
void let_go_later(c10::Storage storage);
void let_go_of_used_host_memory();

}  // namespace simulated
