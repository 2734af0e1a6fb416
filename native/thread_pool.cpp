#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "float_mode.h"

namespace longshore {
namespace {

cpu_set_t mask_of(const std::vector<int>& cpu_set) {
    cpu_set_t mask, allowed;
    CPU_ZERO(&mask);
    CPU_ZERO(&allowed);
    if (cpu_set.empty()) return mask;  // nor fail where there are more CPUs than CPU_SETSIZE
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

// The caller may run on `mask` alone while this exists, and so may the threads
// that it starts for as long as they live. (pthread_setaffinity_np has another
// version since glibc 2.34, and what uses it does not load where that is older.)
class OnlyOn {
  public:
    explicit OnlyOn(const cpu_set_t& mask) {
        if (sched_getaffinity(0, sizeof before_, &before_) != 0 || sched_setaffinity(0, sizeof mask, &mask) != 0) {
            throw std::system_error(errno, std::generic_category(), "sched_setaffinity");
        }
    }
    ~OnlyOn() { sched_setaffinity(0, sizeof before_, &before_); }
    OnlyOn(const OnlyOn&) = delete;
    OnlyOn& operator=(const OnlyOn&) = delete;

  private:
    cpu_set_t before_;
};

// std::condition_variable without its wait(), which has another version since
// GCC 12: what uses that does not load where libstdc++ is older.
class Condition {
  public:
    Condition() = default;
    ~Condition() { pthread_cond_destroy(&condition_); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;

    void notify_all() { pthread_cond_broadcast(&condition_); }

    template <class Predicate>
    void wait(std::unique_lock<std::mutex>& lock, Predicate holds) {
        while (!holds()) pthread_cond_wait(&condition_, lock.mutex()->native_handle());
    }

  private:
    pthread_cond_t condition_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace

struct ThreadPool::Shared {
    std::mutex turn;  // held by the caller whose job runs
    std::mutex mutex;
    Condition wake, finished;
    const std::function<void(std::size_t)>* piece = nullptr;
    std::size_t pieces = 0, running = 0;
    std::exception_ptr failure;
    // Taken without the mutex: pieces are microseconds long. Everything else of
    // a job changes under it, and only while no thread runs.
    std::atomic<std::size_t> next{0};
    bool stop = false;
    bool caller_works = false;  // fixed at the start
    std::vector<std::thread> threads;

    void start(int count, const std::vector<int>& cpu_set);
    void join();
    void run(std::size_t count, const std::function<void(std::size_t)>& call);
    void work();
    void take_pieces(std::unique_lock<std::mutex>& lock);
};

void ThreadPool::Shared::start(int count, const std::vector<int>& cpu_set) {
    const cpu_set_t mask = mask_of(cpu_set);
    caller_works = cpu_set.empty();
    std::optional<OnlyOn> pinned;
    if (!cpu_set.empty()) pinned.emplace(mask);
    for (int i = caller_works ? 1 : 0; i < count; ++i) threads.emplace_back([this] { work(); });
}

void ThreadPool::Shared::join() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stop = true;
    }
    wake.notify_all();
    for (std::thread& thread : threads) thread.join();
}

void ThreadPool::Shared::run(std::size_t count, const std::function<void(std::size_t)>& call) {
    std::lock_guard<std::mutex> mine(turn);
    std::unique_lock<std::mutex> lock(mutex);
    piece = &call;
    pieces = count;
    next = 0;
    failure = nullptr;
    wake.notify_all();
    if (caller_works) take_pieces(lock);
    finished.wait(lock, [this] { return next >= pieces && running == 0; });
    piece = nullptr;
    pieces = 0;
    next = 0;
    if (failure) std::rethrow_exception(failure);
}

void ThreadPool::Shared::work() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        wake.wait(lock, [this] { return stop || next < pieces; });
        if (stop) return;
        take_pieces(lock);
    }
}

void ThreadPool::Shared::take_pieces(std::unique_lock<std::mutex>& lock) {
    ++running;
    lock.unlock();
    std::exception_ptr caught;
    try {
        for (std::size_t mine = next++; mine < pieces; mine = next++) {
            // A thread inherits flush-to-zero from whoever made it; set the mode
            // for each piece rather than trust it.
            StandardFloatMode mode;
            (*piece)(mine);
        }
    } catch (...) {
        caught = std::current_exception();
        next = pieces;
    }
    lock.lock();
    --running;
    if (caught && !failure) failure = caught;
    if (running == 0) finished.notify_all();
}

ThreadPool::ThreadPool(int threads, const std::vector<int>& cpu_set)
    : shared_(std::make_unique<Shared>()), thread_count_(threads), owner_pid_(getpid()) {
    if (threads < 1 || threads > 4096) {
        throw std::invalid_argument("a thread pool has 1 to 4096 threads, not " + std::to_string(threads));
    }
    try {
        shared_->start(threads, cpu_set);
    } catch (...) {
        shared_->join();
        throw;
    }
}

ThreadPool::~ThreadPool() {
    if (getpid() != owner_pid_) {
        static_cast<void>(shared_.release());
        return;
    }
    shared_->join();
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
    shared_->run(pieces, piece);
}

}  // namespace longshore
