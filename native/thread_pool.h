// A pool of threads that runs indexed pieces of one job at a time.
//
// Its size and its CPU set are the caller's: no OMP_NUM_THREADS that a launcher
// set to 1 for torch's sake can starve the host step. Idle threads sleep, and
// waking one takes tens of microseconds; so the caller is one of the threads,
// and begins at once. With a CPU set it only waits: it may run elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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

    int threads() const { return thread_count_; }

  private:
    struct Shared;  // what the threads work on
    // In a forked child it is left behind: its threads are not there to be
    // joined, and a condition variable that they wait on cannot be destroyed.
    std::unique_ptr<Shared> shared_;
    int thread_count_;
    std::int64_t owner_pid_;
};

}  // namespace longshore
