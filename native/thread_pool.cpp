#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

#include "float_mode.h"

namespace longshore {
namespace {

#if defined(__linux__)
cpu_set_t mask_of(const std::vector<int>& cpu_set) {
    cpu_set_t mask, allowed;
    CPU_ZERO(&mask);
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        throw std::system_error(errno, std::generic_category(), "sched_getaffinity");
    }
    for (int cpu : cpu_set) {
        if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)) {
            throw std::invalid_argument("CPU " + std::to_string(cpu) + " is not among those that this process may use");
        }
        CPU_SET(cpu, &mask);
    }
    return mask;
}
#endif

}  // namespace

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpu_set) : owner_pid_(getpid()) {
    if (threads < 1 || threads > 4096) {
        throw std::invalid_argument("a thread pool has 1 to 4096 threads, not " + std::to_string(threads));
    }
#if defined(__linux__)
    const cpu_set_t mask = mask_of(cpu_set);
#else
    if (!cpu_set.empty()) throw std::invalid_argument("a CPU set can be chosen on Linux only");
#endif
    try {
        for (int i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { work(); });
#if defined(__linux__)
            if (!cpu_set.empty()) {
                const int error = pthread_setaffinity_np(threads_.back().native_handle(), sizeof mask, &mask);
                if (error != 0) throw std::system_error(error, std::generic_category(), "pthread_setaffinity_np");
            }
#endif
        }
    } catch (...) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (getpid() != owner_pid_) {
        // The threads were never copied into this child: there is nobody to
        // join, and letting go of them is all that can be done.
        for (std::thread& thread : threads_) thread.detach();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(std::size_t pieces, const std::function<void(std::size_t)>& piece) {
    if (pieces == 0) return;
    if (pieces == 1) {  // waking a thread costs more than a small piece does
        StandardFloatMode mode;
        piece(0);
        return;
    }
    if (getpid() != owner_pid_) {
        throw std::runtime_error(
            "this process was forked from the one that owns the host threads, which do not exist here; "
            "build the optimizer after the fork");
    }
    std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    piece_ = &piece;
    pieces_ = pieces;
    next_ = 0;
    failure_ = nullptr;
    wake_.notify_all();
    finished_.wait(lock, [this] { return next_ == pieces_ && running_ == 0; });
    piece_ = nullptr;
    pieces_ = next_ = 0;
    if (failure_) std::rethrow_exception(failure_);
}

void ThreadPool::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        wake_.wait(lock, [this] { return stop_ || next_ < pieces_; });
        if (stop_) return;
        take_pieces(lock);
    }
}

void ThreadPool::take_pieces(std::unique_lock<std::mutex>& lock) {
    while (next_ < pieces_) {
        const std::size_t mine = next_++;
        const auto* piece = piece_;
        ++running_;
        lock.unlock();
        std::exception_ptr failure;
        try {
            // A thread inherits flush-to-zero from whoever made it; set the mode
            // for each piece rather than trust it.
            StandardFloatMode mode;
            (*piece)(mine);
        } catch (...) {
            failure = std::current_exception();
        }
        lock.lock();
        --running_;
        if (failure && !failure_) failure_ = failure;
        if (failure_) next_ = pieces_;
        if (next_ == pieces_ && running_ == 0) finished_.notify_all();
    }
}

}  // namespace longshore
