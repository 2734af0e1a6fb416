// What torch asks of a device: guards, streams, events, generators and hooks.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <thread>

#include "memory.h"
#include "streams.h"

namespace simulated {
namespace {

struct Event {
  MarkPtr at;
};

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

MarkPtr mark_of(void* event) { return event ? static_cast<Event*>(event)->at : nullptr; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device getDevice() const override { return {TYPE, static_cast<c10::DeviceIndex>(current_device())}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return stream_from_pool(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    return stream_from_pool(index_of(device), priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    set_current_stream(stream);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for_stream(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->at = mark(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto at = mark_of(event)) wait_on(stream, at);
  }
  bool queryEvent(void* event) const override {
    auto at = mark_of(event);
    return !at || at->reached();
  }
  void synchronizeEvent(void* event) const override {
    auto at = mark_of(event);
    while (at && !at->reached()) std::this_thread::yield();  // as CUDA's does, which keeps a CPU busy
    if (at) wait_for(at);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto begin = mark_of(first), end = mark_of(second);
    TORCH_CHECK(begin && end && begin->reached() && end->reached(), "simulated: both events have to be completed");
    return std::chrono::duration<double, std::milli>(end->when - begin->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(int device) {
    device_ = c10::Device(TYPE, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return {TYPE, static_cast<c10::DeviceIndex>(device_of(data))};
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto& all = *[] {
      auto* made = new std::vector<at::Generator>();
      for (int each = 0; each < MOST_DEVICES; each++) made->push_back(at::make_generator<Generator>(each));
      return made;
    }();
    return all[device < 0 ? current_device() : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto grown = device_allocator().allocate(num_bytes);
    const size_t kept = std::min(num_bytes, storage.nbytes());
    if (kept > 0) device_allocator().copy_data(grown.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(grown));
    storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace simulated
