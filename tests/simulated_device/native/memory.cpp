#include "memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

namespace simulated {
namespace {

constexpr size_t SPACE = size_t{1} << 37;  // addresses of each device; memory is taken when it is written
constexpr size_t GRANULE = 4096;           // so that a block can be given back to the system
constexpr size_t ROUNDED_TO = 512;         // as the allocator of CUDA does

struct Arena {
  char *for_tensors, *for_kernels;
  int file;
  size_t used = 0;

  Arena() {
    file = memfd_create("simulated_device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, SPACE) == 0, "simulated: the system gives no memory");
    auto map = [&](int rights) {
      void* at = mmap(nullptr, SPACE, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "simulated: the system gives no address space");
      return static_cast<char*>(at);
    };
    for_tensors = map(PROT_NONE);
    for_kernels = map(PROT_READ | PROT_WRITE);
  }

  void* take(size_t num_bytes) {
    TORCH_CHECK(used + num_bytes < SPACE, "simulated: out of address space");
    void* at = for_tensors + used;
    used += (num_bytes + GRANULE - 1) / GRANULE * GRANULE;
    return at;
  }

  void give_back(void* at, size_t num_bytes) {
    auto offset = static_cast<char*>(at) - for_tensors;
    fallocate_hole(offset, (num_bytes + GRANULE - 1) / GRANULE * GRANULE);
  }

 private:
  void fallocate_hole(off_t offset, size_t num_bytes) { madvise(for_kernels + offset, num_bytes, MADV_REMOVE); }
};

Arena& arena(int device) {
  static auto& all = *new std::array<std::unique_ptr<Arena>, MOST_DEVICES>();
  static auto& mutex = *new std::mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!all[device]) all[device] = std::make_unique<Arena>();
  return *all[device];
}

struct Block {
  int device;
  int64_t stream;
  size_t num_bytes;
  std::set<int64_t> also_used_on;  // other streams, by record_stream
};

// A block that was freed while other streams may still use it.
struct Pending {
  void* at;
  Block block;
  std::vector<MarkPtr> until;
};

std::atomic<bool> poison{true};
std::atomic<int64_t> budget{int64_t{1} << 35};

// Caches freed blocks, and hands each to the next allocation of its size on its stream, at once: whoever still uses it
// from elsewhere reads poison, or another tensor's values.
class CachingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t asked) override {
    const int device = current_device();
    let_go_of_used_host_memory();
    if (asked == 0) return {nullptr, nullptr, &release, c10::Device(TYPE, device)};
    const size_t num_bytes = (asked + ROUNDED_TO - 1) / ROUNDED_TO * ROUNDED_TO;
    const int64_t stream = current_stream(device).id();
    std::lock_guard<std::mutex> lock(mutex_);
    cache_what_is_no_longer_used();
    void* at;
    auto& cached = cached_[{device, stream, num_bytes}];
    if (!cached.empty()) {
      at = cached.back();
      cached.pop_back();
      cached_bytes_[device] -= num_bytes;
    } else {
      make_room(device, num_bytes);
      at = arena(device).take(num_bytes);
    }
    live_[at] = {device, stream, num_bytes, {}};
    now_[device] += num_bytes;
    peak_[device] = std::max(peak_[device], now_[device]);
    return {at, at, &release, c10::Device(TYPE, device)};
  }

  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    void *target = address_for_kernels(to), *source = address_for_kernels(from);
    queue_of(current_stream(device_of(to))).put([=] { std::memcpy(target, source, num_bytes); });
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data.get());
    if (found != live_.end() && stream.id() != found->second.stream) found->second.also_used_on.insert(stream.id());
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int device = 0; device < device_count(); device++) empty_cache_of(device);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = now_[device];
    stats.allocated_bytes[0].peak = peak_[device];
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = now_[device] + cached_bytes_[device];
    return stats;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t taken = now_[device] + cached_bytes_[device], all = budget;
    return {all > taken ? all - taken : 0, all};
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_[device] = now_[device];
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  bool initialized() override { return true; }

 private:
  static void release(void* at) {
    if (at) static_cast<CachingAllocator&>(device_allocator()).free(at);
  }

  void free(void* at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(at);
    if (found == live_.end()) return;
    Block block = found->second;
    live_.erase(found);
    now_[block.device] -= block.num_bytes;
    if (block.also_used_on.empty()) return cache(at, block);
    Pending pending{at, block, {}};
    for (auto stream : block.also_used_on) pending.until.push_back(mark(stream_of(block.device, stream)));
    pending_.push_back(std::move(pending));
  }

  void cache_what_is_no_longer_used() {
    for (size_t i = 0; i < pending_.size();) {
      bool over = true;
      for (auto& each : pending_[i].until) over = over && each->reached();
      if (over) {
        cache(pending_[i].at, pending_[i].block);
        pending_[i] = std::move(pending_.back());
        pending_.pop_back();
      } else {
        i++;
      }
    }
  }

  void cache(void* at, const Block& block) {
    if (poison) {
      void* memory = address_for_kernels(at);
      queue_of(block.device, block.stream).put([memory, n = block.num_bytes] { std::memset(memory, 0xff, n); });
    }
    cached_[{block.device, block.stream, block.num_bytes}].push_back(at);
    cached_bytes_[block.device] += block.num_bytes;
  }

  void make_room(int device, size_t num_bytes) {
    auto fits = [&] { return now_[device] + cached_bytes_[device] + num_bytes <= static_cast<size_t>(budget); };
    if (!fits()) empty_cache_of(device);
    TORCH_CHECK_WITH(OutOfMemoryError, fits(), "simulated: out of memory. Tried to allocate ", num_bytes,
                     " bytes on device ", device, ", where ", now_[device], " of ", budget.load(), " are allocated");
  }

  void empty_cache_of(int device) {
    // As with CUDA, the host waits for the device: kernels under way may still use what is given back.
    for (int id = 0; id < ALL_STREAMS; id++)
      if (!queue_of(device, id).idle()) mark(stream_of(device, id))->wait();
    for (auto& [key, blocks] : cached_) {
      if (std::get<0>(key) != device) continue;
      for (void* at : blocks) arena(device).give_back(at, std::get<2>(key));
      blocks.clear();
    }
    cached_bytes_[device] = 0;
  }

  std::mutex mutex_;
  std::map<void*, Block> live_;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> cached_;  // by device, stream and size
  std::vector<Pending> pending_;
  std::array<size_t, MOST_DEVICES> now_{}, peak_{}, cached_bytes_{};
};

std::mutex& pinned_mutex = *new std::mutex;
std::map<char*, size_t>& pinned = *new std::map<char*, size_t>;

struct PinnedAllocator final : at::Allocator {
  static void release(void* at) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.erase(static_cast<char*>(at));
    }
    std::free(at);
  }

  c10::DataPtr allocate(size_t asked) override {
    void* at = nullptr;
    const size_t num_bytes = std::max<size_t>(asked, 1);
    TORCH_CHECK(posix_memalign(&at, GRANULE, num_bytes) == 0, "simulated: no host memory");
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(at)] = num_bytes;
    return {at, at, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
};

std::mutex& used_mutex = *new std::mutex;
std::vector<c10::Storage>& used_host_memory = *new std::vector<c10::Storage>;

}  // namespace

int device_of(const void* address) {
  for (int device = 0; device < device_count(); device++) {
    const char* start = arena(device).for_tensors;
    if (address >= start && address < start + SPACE) return device;
  }
  return -1;
}

void* address_for_kernels(const void* address) {
  const int device = device_of(address);
  TORCH_CHECK(device >= 0, "simulated: no device has memory at ", address);
  auto& found = arena(device);
  return found.for_kernels + (static_cast<const char*>(address) - found.for_tensors);
}

Mappings mappings(int device) {
  auto& found = arena(device);
  return {reinterpret_cast<uint64_t>(found.for_tensors), reinterpret_cast<uint64_t>(found.for_kernels), SPACE};
}

c10::DeviceAllocator& device_allocator() {
  static auto& allocator = *new CachingAllocator();
  return allocator;
}

at::Allocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator();
  return allocator;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == pinned.begin()) return false;
  auto& [start, num_bytes] = *--after;
  return static_cast<const char*>(address) < start + num_bytes;
}

int64_t pinned_bytes() {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  int64_t sum = 0;
  for (auto& each : pinned) sum += each.second;
  return sum;
}

void set_budget(int64_t num_bytes) { budget = num_bytes; }
void set_poison(bool on) { poison = on; }

void let_go_later(c10::Storage storage) {
  std::lock_guard<std::mutex> lock(used_mutex);
  used_host_memory.push_back(std::move(storage));
}

void let_go_of_used_host_memory() {
  std::vector<c10::Storage> gone;
  std::lock_guard<std::mutex> lock(used_mutex);
  gone.swap(used_host_memory);
}

static auto* const registered = &device_allocator();
REGISTER_ALLOCATOR(TYPE, registered)

}  // namespace simulated
