#include "streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "memory.h"

namespace simulated {

// Objects of this file are never destroyed: threads of streams use them until the process ends.

int device_count() {
  static const int count = [] {
    const char* given = std::getenv("SIMULATED_DEVICES");
    return given ? std::min(std::atoi(given), MOST_DEVICES) : 2;
  }();
  return count;
}

void check_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "simulated: there is no device ", device);
}

// ---- marks and queues

void Mark::set() {
  std::lock_guard<std::mutex> lock(mutex_);
  when = std::chrono::steady_clock::now();
  reached_ = true;
  changed_.notify_all();
}

bool Mark::reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}

void Queue::put(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  changed_.notify_all();
}

bool Queue::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Queue::seed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(mutex_);
  dice_.seed(static_cast<uint32_t>(seed % 2147483646 + 1));
}

void Queue::delay(int most_us) {
  if (most_us <= 0) return;
  int us;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    us = dice_() % most_us;
  }
  std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void Queue::run() {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
    }
    // Kernels of the CPU add in another order with another number of threads, which each thread of OpenMP and MKL has a
    // setting for: as many as torch.set_num_threads() said last.
    at::init_num_threads();
    try {
      task();
    } catch (const c10::Error& error) {
      report_failure(error.what_without_backtrace());
    } catch (const std::exception& error) {
      report_failure(error.what());
    }
    task = nullptr;  // what it kept is let go of before the stream is idle
  }
}

Queue& queue_of(int device, int64_t stream) {
  static auto& all = *new std::array<std::array<Queue, ALL_STREAMS>, MOST_DEVICES>();
  return all[device][stream];
}

Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

// ---- what is current

static thread_local int device_now = 0;
static thread_local std::array<int64_t, MOST_DEVICES> stream_now{};

int current_device() { return device_now; }

void set_current_device(int device) {
  check_device(device);
  device_now = device;
}

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

c10::Stream current_stream(int device) { return stream_of(device, stream_now[device]); }

void set_current_stream(const c10::Stream& stream) { stream_now[stream.device_index()] = stream.id(); }

c10::Stream stream_from_pool(int device, int priority) {
  static std::array<std::array<std::atomic<int>, PRIORITIES>, MOST_DEVICES> next{};
  check_device(device);
  const int pool = std::clamp(-priority, 0, PRIORITIES - 1);
  return stream_of(device, 1 + pool * POOL_STREAMS + next[device][pool]++ % POOL_STREAMS);
}

// ---- waits

MarkPtr mark(const c10::Stream& stream) {
  auto here = std::make_shared<Mark>();
  queue_of(stream).put([here] { here->set(); });
  return here;
}

void wait_for(const MarkPtr& at) {
  count_wait();
  at->wait();
  let_go_of_used_host_memory();
  check_failures();
}

void wait_for_stream(const c10::Stream& stream) { wait_for(mark(stream)); }

void wait_for_device(int device) {
  std::vector<MarkPtr> all;
  for (int id = 0; id < ALL_STREAMS; id++)
    if (!queue_of(device, id).idle()) all.push_back(mark(stream_of(device, id)));
  count_wait();
  for (auto& each : all) each->wait();
  let_go_of_used_host_memory();
  check_failures();
}

void wait_on(const c10::Stream& stream, const MarkPtr& at) {
  queue_of(stream).put([at] { at->wait(); });
}

// ---- failures, delays and counts

static std::mutex& state_mutex = *new std::mutex;
static std::string& failure = *new std::string;
static Delays delays_now;
static Counts counts_now;

void report_failure(const std::string& what) {
  std::lock_guard<std::mutex> lock(state_mutex);
  if (failure.empty()) failure = what;
}

void check_failures() {
  std::string said;
  {
    std::lock_guard<std::mutex> lock(state_mutex);
    said.swap(failure);
  }
  TORCH_CHECK(said.empty(), "simulated: a kernel failed: ", said);
}

Delays delays() {
  std::lock_guard<std::mutex> lock(state_mutex);
  return delays_now;
}

void set_delays(uint64_t seed, int kernel_us, int copy_us) {
  for (int device = 0; device < device_count(); device++)
    for (int id = 0; id < ALL_STREAMS; id++) queue_of(device, id).seed(seed * 1000 + device * 100 + id);
  std::lock_guard<std::mutex> lock(state_mutex);
  delays_now = {kernel_us, copy_us};
}

Counts counts() {
  std::lock_guard<std::mutex> lock(state_mutex);
  return counts_now;
}

void reset_counts() {
  std::lock_guard<std::mutex> lock(state_mutex);
  counts_now = {};
}

void count_launch() {
  std::lock_guard<std::mutex> lock(state_mutex);
  counts_now.launches++;
}

void count_wait() {
  std::lock_guard<std::mutex> lock(state_mutex);
  counts_now.host_waits++;
}

void count_copy(bool to_device, int64_t num_bytes) {
  std::lock_guard<std::mutex> lock(state_mutex);
  (to_device ? counts_now.copies_to_device : counts_now.copies_to_host)++;
  (to_device ? counts_now.bytes_to_device : counts_now.bytes_to_host) += num_bytes;
}

}  // namespace simulated
