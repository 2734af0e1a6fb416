// Streams of the simulated accelerator: each is a thread that runs what was put on it, in order, later.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

namespace simulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;
// As on CUDA, the streams of each priority are those of a pool, handed out in turn and again: whoever asks for more gets
// one that somebody else has. The default stream is number 0.
constexpr int POOL_STREAMS = 32, PRIORITIES = 4, ALL_STREAMS = 1 + POOL_STREAMS * PRIORITIES;

int device_count();
void check_device(int device);  // raises for a number that there is not

// A position of a stream, reached once everything before it has run.
class Mark {
 public:
  void set();
  bool reached();
  void wait();
  std::chrono::steady_clock::time_point when;  // it was reached

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  void put(std::function<void()> task);
  bool idle();
  // Sleeps up to so many microseconds. The sequence of delays follows from the seed alone.
  void delay(int most_us);
  void seed(uint64_t seed);

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool started_ = false, busy_ = false;
  std::minstd_rand dice_;
};

Queue& queue_of(int device, int64_t stream);
Queue& queue_of(const c10::Stream& stream);

// What is current belongs to a thread, as with every accelerator.
int current_device();
void set_current_device(int device);
c10::Stream current_stream(int device);
void set_current_stream(const c10::Stream& stream);
c10::Stream stream_of(int device, int64_t id);
c10::Stream stream_from_pool(int device, int priority = 0);

MarkPtr mark(const c10::Stream& stream);
void wait_for(const MarkPtr& at);  // the host does; counted; raises the errors of kernels
void wait_for_stream(const c10::Stream& stream);
void wait_for_device(int device);
void wait_on(const c10::Stream& stream, const MarkPtr& at);  // the stream does

// Kernels that failed are reported at the next wait of the host.
void report_failure(const std::string& what);
void check_failures();

// Random delays before kernels and copies, in microseconds at most.
struct Delays {
  int kernel_us = 0, copy_us = 0;
};
Delays delays();
void set_delays(uint64_t seed, int kernel_us, int copy_us);

// Counted over all devices since they were reset.
struct Counts {
  int64_t launches = 0, copies_to_device = 0, copies_to_host = 0, bytes_to_device = 0, bytes_to_host = 0,
          host_waits = 0;
};
Counts counts();
void reset_counts();
void count_launch();
void count_wait();
void count_copy(bool to_device, int64_t num_bytes);

}  // namespace simulated
