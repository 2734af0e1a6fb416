#include "thread_pool.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "support.h"

namespace longshore::testing {
namespace {

void check_runs_each_piece_once(ThreadPool& pool, std::size_t pieces) {
    std::vector<std::atomic<int>> times(pieces);
    pool.run(pieces, [&](std::size_t piece) { ++times.at(piece); });
    for (std::size_t piece = 0; piece < pieces; ++piece) CHECK_EQUAL(times[piece].load(), 1, "piece ", piece);
}

TEST(thread_pool_runs_each_piece_once) {
    for (const int threads : {1, 2, 3, 7}) {
        ThreadPool pool(threads, {});
        CHECK_EQUAL(pool.threads(), threads);
        for (const std::size_t pieces : {0, 1, 2, 3, 7, 8, 1000}) check_runs_each_piece_once(pool, pieces);
    }
}

// What a piece wrote is seen by the caller, without atomics: run() orders them.
TEST(thread_pool_runs_many_tiny_jobs) {
    ThreadPool pool(3, {});
    std::vector<int> values(3);
    const int jobs = kSanitized ? 3000 : 20000;
    for (int job = 0; job < jobs; ++job) {
        pool.run(values.size(), [&](std::size_t piece) { ++values[piece]; });
        CHECK_EQUAL(values[0] + values[1] + values[2], 3 * (job + 1));
    }
}

TEST(thread_pool_uses_all_its_threads_at_once) {
    ThreadPool pool(3, {});
    std::atomic<int> arrived{0};
    pool.run(3, [&](std::size_t) {  // returns only if three threads are in here together
        ++arrived;
        while (arrived.load() < 3) std::this_thread::yield();
    });
    CHECK_EQUAL(arrived.load(), 3);
}

TEST(thread_pool_caller_is_one_of_its_threads) {
    ThreadPool pool(2, {});
    std::atomic<int> arrived{0}, mine{0};
    const auto caller = std::this_thread::get_id();
    pool.run(2, [&](std::size_t) {  // one piece for each thread
        if (std::this_thread::get_id() == caller) ++mine;
        ++arrived;
        while (arrived.load() < 2) std::this_thread::yield();
    });
    CHECK_EQUAL(mine.load(), 1);
}

TEST(thread_pool_rethrows_and_stays_usable) {
    for (const int threads : {1, 3}) {
        ThreadPool pool(threads, {});
        for (int round = 0; round < 50; ++round) {
            std::atomic<int> begun{0};
            CHECK_THROWS(std::runtime_error, "piece 13", pool.run(100, [&](std::size_t piece) {
                ++begun;
                if (piece == 13) throw std::runtime_error("piece 13");
            }));
            if (threads == 1) CHECK_EQUAL(begun.load(), 14, "pieces not yet begun are left out");
            CHECK_THROWS(std::logic_error, "only one", pool.run(1, [](std::size_t) { throw std::logic_error("only one"); }));
            CHECK_THROWS(std::runtime_error, "all", pool.run(20, [](std::size_t) { throw std::runtime_error("all"); }));
            check_runs_each_piece_once(pool, 50);
        }
        int caught = 0;
        try {
            pool.run(5, [](std::size_t) { throw 7; });
        } catch (int value) {
            caught = value;
        }
        CHECK_EQUAL(caught, 7, "what is thrown need not be a std::exception");
    }
}

TEST(thread_pool_callers_take_turns) {
    constexpr int kCallers = 4, kJobs = 200;
    ThreadPool pool(3, {});
    std::atomic<int> inside[kCallers] = {};
    std::atomic<int> mixed{0}, done{0}, caught{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < kCallers; ++caller) {
        callers.emplace_back([&, caller] {
            for (int job = 0; job < kJobs; ++job) {
                try {
                    pool.run(5, [&](std::size_t piece) {
                        ++inside[caller];
                        for (int other = 0; other < kCallers; ++other) {
                            if (other != caller && inside[other].load() != 0) ++mixed;
                        }
                        ++done;
                        --inside[caller];
                        if (caller == 0 && piece == 4) throw std::runtime_error("the last piece of caller 0");
                    });
                } catch (const std::runtime_error&) {
                    caught += caller == 0 ? 1 : 1000000;
                }
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK_EQUAL(mixed.load(), 0, "pieces of two jobs ran at once");
    CHECK_EQUAL(done.load(), kCallers * kJobs * 5);
    CHECK_EQUAL(caught.load(), kJobs, "a failure goes to the caller whose piece failed, and to no other");
}

TEST(thread_pool_is_made_and_destroyed_many_times) {
    for (int i = 0; i < (kSanitized ? 100 : 500); ++i) {
        ThreadPool pool(1 + i % 4, {});
        if (i % 2 == 0) check_runs_each_piece_once(pool, 5);
    }
}

TEST(thread_pool_refuses_bad_arguments) {
    using Bad = std::invalid_argument;
    for (const int threads : {0, -1, 4097}) CHECK_THROWS(Bad, std::to_string(threads), ThreadPool(threads, {}));
#if defined(__linux__)
    for (const int cpu : {-1, CPU_SETSIZE, 1 << 30}) {
        CHECK_THROWS(Bad, "CPU " + std::to_string(cpu), ThreadPool(1, {cpu}));
    }
    cpu_set_t all, one;
    CHECK_EQUAL(sched_getaffinity(0, sizeof all, &all), 0);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK_EQUAL(sched_setaffinity(0, sizeof one, &one), 0);
    for (int other = 0; other < CPU_SETSIZE; ++other) {  // one that exists and is denied to this process
        if (other == first || !CPU_ISSET(other, &all)) continue;
        CHECK_THROWS(Bad, "not among those", ThreadPool(2, {first, other}));
        break;
    }
    CHECK_EQUAL(sched_setaffinity(0, sizeof all, &all), 0);
#endif
}

#if defined(__linux__)
TEST(thread_pool_runs_on_its_cpu_set) {
    cpu_set_t allowed;
    CHECK_EQUAL(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        ThreadPool pool(2, {cpu});
        cpu_set_t callers;
        CHECK_EQUAL(sched_getaffinity(0, sizeof callers, &callers), 0);
        CHECK(CPU_EQUAL(&callers, &allowed), "the caller stays on the CPUs that it had, beside ", cpu);
        pool.run(50, [&](std::size_t) {
            cpu_set_t mine;
            CHECK_EQUAL(sched_getaffinity(0, sizeof mine, &mine), 0);
            CHECK(CPU_COUNT(&mine) == 1 && CPU_ISSET(cpu, &mine), "CPU ", cpu);
        });
    }
}
#endif

TEST(thread_pool_pieces_run_in_the_standard_mode) {
    if (!FlushToZero::known()) return;
    FlushToZero mode;
    ThreadPool pool(2, {});
    for (const std::size_t pieces : {1, 2, 40}) {
        pool.run(pieces, [](std::size_t) { CHECK(!flushes() && !FlushToZero::active()); });
        CHECK(FlushToZero::active() && flushes(), "the caller lost its own mode");
        CHECK_THROWS(std::runtime_error, "", pool.run(pieces, [](std::size_t) { throw std::runtime_error(""); }));
        CHECK(FlushToZero::active() && flushes(), "the caller lost its own mode to an exception");
    }
}

#if !defined(LONGSHORE_TSAN)  // which does not support threads after a fork of a process with threads
// The exit status of `body` in a forked child; a child that hangs is killed.
int forked(const std::function<int()>& body) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        int status = 99;
        try {
            status = body();
        } catch (...) {
        }
        _exit(status);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

TEST(thread_pool_in_a_forked_child_throws_and_does_not_hang) {
    auto pool = std::make_unique<ThreadPool>(3, std::vector<int>{});
    check_runs_each_piece_once(*pool, 20);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until the threads wait for work
    const int status = forked([&] {
        try {
            pool->run(2, [](std::size_t) {});
            return 1;
        } catch (const std::runtime_error& error) {
            if (std::string(error.what()).find("forked") == std::string::npos) return 2;
        }
        pool->run(1, [](std::size_t) {});  // needs no other thread
        ThreadPool mine(2, {});            // may take the memory of the threads that are not here
        pool.reset();
        check_runs_each_piece_once(mine, 20);
        return 0;
    });
    CHECK_EQUAL(status, 0, "of the child; -14: it hung");
    check_runs_each_piece_once(*pool, 20);
}

TEST(thread_pool_in_a_child_forked_during_a_job) {
    ThreadPool pool(2, {});
    std::atomic<int> arrived{0};
    std::atomic<bool> leave{false};
    std::thread caller([&] {
        pool.run(2, [&](std::size_t) {
            ++arrived;
            while (!leave.load()) std::this_thread::yield();
        });
    });
    while (arrived.load() < 2) std::this_thread::yield();
    const int status = forked([&] {
        try {
            pool.run(2, [](std::size_t) {});
        } catch (const std::runtime_error&) {
            return 0;
        }
        return 1;
    });
    leave = true;
    caller.join();
    CHECK_EQUAL(status, 0, "of the child; -14: it hung");
}
#endif

}  // namespace
}  // namespace longshore::testing
