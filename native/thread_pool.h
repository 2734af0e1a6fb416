// A pool of threads that runs indexed pieces of one job at a time.
//
// Its size and its CPU set are the caller's: no OMP_NUM_THREADS that a launcher
// set to 1 for torch's sake can starve the host step. Idle threads sleep.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace longshore {

class ThreadPool {
  public:
    // `cpu_set`: logical CPUs that the threads may run on; empty: any. Throws
    // std::invalid_argument, or std::system_error where a CPU is not to be had.
    ThreadPool(int threads, const std::vector<int>& cpu_set);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Calls `piece(i)` once for each i in [0, pieces) and returns when all are
    // done. The first exception is rethrown here; pieces not yet begun are then
    // left out. Several callers take turns. In a forked child, where the
    // threads do not exist, it throws instead of waiting for ever.
    void run(std::size_t pieces, const std::function<void(std::size_t)>& piece);

    int threads() const { return static_cast<int>(threads_.size()); }

  private:
    void work();
    void take_pieces(std::unique_lock<std::mutex>& lock);

    std::mutex turn_;  // held by the caller whose job runs
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    const std::function<void(std::size_t)>* piece_ = nullptr;
    std::size_t pieces_ = 0, next_ = 0, running_ = 0;
    std::exception_ptr failure_;
    bool stop_ = false;
    std::int64_t owner_pid_;
    std::vector<std::thread> threads_;
};

}  // namespace longshore
