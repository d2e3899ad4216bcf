// Loops over several threads that never wait for a thread which has not begun.
//
// A step runs hundreds of short loops. OpenMP ends each by waiting for all of its threads, so that on cores which do other things as well every
// loop takes as long as a thread waits for its turn. Here every running thread takes the next piece of work, and a thread that is late finds
// the loop over. The number of threads is OpenMP's, so that it is set in one place; a loop with little work takes fewer.

#pragma once

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "amx.h"
#include "common.h"

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // takes about as long as x86's pause; yield does nothing on most processors
#endif
}

// How long a core takes for such work, in nanoseconds and roughly. It only has to tell short loops from long ones.
inline double reading(int64_t bytes) { return bytes / 10.0; }            // from memory
inline double multiplying(int64_t products) { return products / 64.0; }  // and adding them up
inline double elementwise(int64_t elements) { return elements / 8.0; }   // simple sums of what is in the core's cache

// How many runs of calls a thread takes at first, at most: of what is left, each is the share of one thread, or half of it. Long runs are read from
// memory without a break; short ones even out what takes unequally long.
enum Calls : int64_t { ALIKE = 1, UNEQUAL = 2 };

// What each thread adds to a loop, as measured with two: to join, to take its pieces of work and to leave, the threads wait for each other
// at the same counters.
constexpr double JOINING = 200;

// How many of the threads a loop gets that takes one thread so many nanoseconds: W / n + JOINING * n is least for n = sqrt(W / JOINING).
inline int64_t threads_for(int64_t count, double nanoseconds, int64_t num_threads) {
    const int64_t most = std::max<int64_t>(std::min(count, num_threads), 1);
    return static_cast<int64_t>(std::clamp<double>(std::sqrt(nanoseconds / JOINING), 1, most));
}

// How a loop was divided.
struct LoopRecord {
    int64_t count, num_threads, nanoseconds;
};

class Pool {
  public:
    // Lives as long as the process: its threads may be anywhere when that ends.
    static Pool& instance() {
        static Pool* const pool = new Pool;
        return *pool;
    }

    // Calls function(context, first, last) for runs of numbers, from `first` to before `last`, which together are all those below `count`, in any order
    // and any thread, and returns when all calls have. Each number takes about `nanoseconds`.
    void run(int64_t count, double nanoseconds, Calls calls, void (*function)(const void*, int64_t, int64_t), const void* context) {
        const std::unique_lock<std::mutex> mine(callers_, std::try_to_lock);
        const int64_t num_threads = mine.owns_lock() ? threads_for(count, count * nanoseconds, omp_get_max_threads()) : 1;
        if (mine.owns_lock() && num_records_ < capacity_)
            records_[num_records_++] = {count, num_threads, static_cast<int64_t>(count * nanoseconds)};
        if (num_threads < 2) {
            if (count > 0) function(context, 0, count);
            return amx::release();
        }
        while (static_cast<int64_t>(workers_.size()) < num_threads - 1) add_worker();
        follow(sched_getcpu(), num_threads);
        count_ = count;
        function_ = function;
        context_ = context;
        share_ = calls * num_threads;
        next_.store(0, std::memory_order_relaxed);
        max_at_work_.store(num_threads - 1, std::memory_order_relaxed);
        // No loop is running here, so no other thread changes the state.
        state_.store(((state_.load() / EPOCH + 1) * EPOCH) | IS_OPEN);
        wake_up(num_threads - 1);
        drain();
        amx::release();
        state_.fetch_and(~IS_OPEN);
        for (int64_t i = 0; (state_.load(std::memory_order_acquire) & NUM_AT_WORK) != 0; ++i) {
            pause();
            if (i > SPINS_BEFORE_YIELD) std::this_thread::yield();
        }
    }

    // The caller's thread runs on these CPUs, and so do the workers from now on. Pinned, each has one, and none has the caller's.
    void place(const int32_t* cpus, int64_t num_cpus, bool is_pinned) {
        const std::lock_guard<std::mutex> mine(callers_);
        cpus_.assign(cpus, cpus + num_cpus);
        is_pinned_ = is_pinned;
        callers_cpu_ = -1;
        for (size_t worker = 0; worker < workers_.size(); ++worker) place_worker(worker);
    }

    // Records the loops from now on, up to `capacity` of them; returns how many have been recorded since the last call.
    int64_t record(LoopRecord* records, int64_t capacity) {
        const std::lock_guard<std::mutex> mine(callers_);
        records_ = records;
        capacity_ = capacity;
        return std::exchange(num_records_, 0);
    }

  private:
    void add_worker() {
        workers_.push_back(std::thread(&Pool::work, this));
        pthread_setname_np(workers_.back().native_handle(), "penstock-worker");
        place_worker(workers_.size() - 1);
        callers_cpu_ = -1;
    }

    // The first of the CPUs is the caller's, the next is the first worker's, and so on.
    void place_worker(size_t worker) {
        cpu_set_t set = placed_on();
        if (is_pinned_ && worker + 1 < cpus_.size()) {
            CPU_ZERO(&set);
            CPU_SET(cpus_[worker + 1], &set);
        }
        pthread_setaffinity_np(workers_[worker].native_handle(), sizeof set, &set);
    }

    // All CPUs that the threads may use.
    cpu_set_t placed_on() const {
        cpu_set_t set;
        CPU_ZERO(&set);
        if (cpus_.empty()) sched_getaffinity(getpid(), sizeof set, &set);
        for (const int32_t cpu : cpus_) CPU_SET(cpu, &set);
        return set;
    }

    // Keeps the workers off the caller's CPU, where the two would take turns, one spinning while the other should work.
    void follow(int cpu, int64_t num_threads) {
        if (cpu == callers_cpu_) return;
        callers_cpu_ = cpu;
        // The caller itself is free to move: threads that it starts, such as OpenMP's, would all be pinned to its CPU as well. Where it
        // moves to a worker's CPU, that worker takes the one that it has left.
        if (is_pinned_) {
            const auto place = std::find(cpus_.begin(), cpus_.end(), cpu);
            if (place == cpus_.begin() || place == cpus_.end()) return;
            std::swap(*cpus_.begin(), *place);
            const size_t worker = place - cpus_.begin() - 1;
            if (worker < workers_.size()) place_worker(worker);
            return;
        }
        // A worker that is woken while all other CPUs are busy for a moment may be put here, until the system finds that one is idle, which
        // takes it as long as a whole step.
        cpu_set_t others = placed_on();
        if (cpu < 0 || cpu >= CPU_SETSIZE || CPU_COUNT(&others) > num_threads) return;
        CPU_CLR(cpu, &others);
        if (CPU_COUNT(&others) == 0) return;
        for (std::thread& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
    }

    // No more of the sleeping workers than the loop has use for.
    void wake_up(int64_t num_wanted) {
        const int64_t num_asleep = num_asleep_.load(), num_missing = num_wanted - (static_cast<int64_t>(workers_.size()) - num_asleep);
        if (num_missing <= 0) return;
        const std::lock_guard<std::mutex> lock(sleepers_);
        if (num_missing >= num_asleep) return wake_.notify_all();
        for (int64_t i = 0; i < num_missing; ++i) wake_.notify_one();
    }

    // The state is the number of the loop, whether it can be joined, and how many workers are at it.
    static constexpr uint64_t NUM_AT_WORK = 0xffff, IS_OPEN = 0x10000, EPOCH = 0x20000;
    static constexpr int64_t SPINS_BEFORE_YIELD = 2000;
    static constexpr auto AWAKE = std::chrono::microseconds(200);  // longer than from one loop of a step to the next

    void work() {
        for (uint64_t seen = 0;;) {
            uint64_t state = next_state(seen);
            while ((state & IS_OPEN) && static_cast<int64_t>(state & NUM_AT_WORK) < max_at_work_.load(std::memory_order_relaxed)) {
                if (state_.compare_exchange_weak(state, state + 1)) {
                    drain();
                    state_.fetch_sub(1, std::memory_order_release);
                    break;
                }
            }
            seen = state / EPOCH;
        }
    }

    // Waits for another loop than `seen`, awake at first, but without delaying other threads.
    uint64_t next_state(uint64_t seen) {
        const auto end = std::chrono::steady_clock::now() + AWAKE;
        do {
            for (int i = 0; i < 64; ++i) {
                const uint64_t state = state_.load(std::memory_order_acquire);
                if (state / EPOCH != seen) return state;
                pause();
            }
            std::this_thread::yield();
        } while (std::chrono::steady_clock::now() < end);
        amx::release();
        std::unique_lock<std::mutex> lock(sleepers_);
        num_asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return state_.load() / EPOCH != seen; });
        num_asleep_.fetch_sub(1);
        return state_.load();
    }

    // Takes smaller and smaller runs of what is left: neighbours lie side by side in memory.
    void drain() {
        int64_t first = next_.load(std::memory_order_relaxed);
        while (first < count_) {
            const int64_t size = std::max<int64_t>((count_ - first) / share_, 1);
            if (!next_.compare_exchange_weak(first, first + size)) continue;
            function_(context_, first, first + size);
            first = next_.load(std::memory_order_relaxed);
        }
    }

    std::mutex callers_, sleepers_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::vector<int32_t> cpus_;  // empty: those of the process
    bool is_pinned_ = false;
    int callers_cpu_ = -1;
    LoopRecord* records_ = nullptr;
    int64_t num_records_ = 0, capacity_ = 0;
    int64_t count_ = 0, share_ = 1;
    void (*function_)(const void*, int64_t, int64_t) = nullptr;
    const void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> state_{0};
    std::atomic<int64_t> max_at_work_{0}, num_asleep_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

// One turn of a loop, in machine code of its own, shared by all loops. Compiled into several loops, the same sums might be added up in
// another order in each, and what a row gives would depend on how many rows there are.
template <typename Function>
PENSTOCK_APART void turn(const void* function, int64_t i) {
    (*static_cast<const Function*>(function))(i);
}

// function(first, last) for runs of the numbers below `count`, each of which one thread goes through in order. A number takes about `nanoseconds`, on
// average.
template <typename Function>
inline void parallel_for_runs(int64_t count, double nanoseconds, Calls calls, const Function& function) {
    const auto run = [](const void* context, int64_t first, int64_t last) { (*static_cast<const Function*>(context))(first, last); };
    Pool::instance().run(count, nanoseconds, calls, run, &function);
}

// function(i) for each i below `count`.
template <Calls CALLS = ALIKE, typename Function>
inline void parallel_for(int64_t count, double nanoseconds, const Function& function) {
    parallel_for_runs(count, nanoseconds, CALLS, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) turn<Function>(&function, i);
    });
}

}  // namespace
