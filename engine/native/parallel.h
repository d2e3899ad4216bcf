// Loops over several threads that never wait for a thread which has not begun.
//
// A step runs hundreds of short loops. OpenMP ends each by waiting for all of its threads, so that on cores which do other things as well every
// loop takes as long as a thread waits for its turn. Here every running thread takes the next piece of work, and a thread that is late finds
// the loop over. The number of threads is OpenMP's, so that it is set in one place.

#pragma once

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define PENSTOCK_APART __attribute__((noinline))
#else
#define PENSTOCK_APART __attribute__((noipa))
#endif

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // takes about as long as x86's pause; yield does nothing on most processors
#endif
}

class Pool {
  public:
    // Lives as long as the process: its threads may be anywhere when that ends.
    static Pool& instance() {
        static Pool* const pool = new Pool;
        return *pool;
    }

    // Calls function(context, i) for each i below `count`, in any order and any thread, and returns when all calls have.
    void run(int64_t count, void (*function)(const void*, int64_t), const void* context) {
        const int num_threads = omp_get_max_threads();
        const std::unique_lock<std::mutex> mine(callers_, std::try_to_lock);
        if (num_threads < 2 || count < 2 || !mine.owns_lock()) {
            for (int64_t i = 0; i < count; ++i) function(context, i);
            return;
        }
        while (static_cast<int>(workers_.size()) < num_threads - 1) {
            workers_.push_back(std::thread(&Pool::work, this));
            pthread_setname_np(workers_.back().native_handle(), "penstock-worker");
            callers_cpu_ = -1;
        }
        keep_off(sched_getcpu());
        count_ = count;
        function_ = function;
        context_ = context;
        share_ = 2 * num_threads;
        next_.store(0, std::memory_order_relaxed);
        // No loop is running here, so no other thread changes the state.
        state_.store(((state_.load() / EPOCH + 1) * EPOCH) | IS_OPEN);
        if (num_asleep_.load() > 0) {
            const std::lock_guard<std::mutex> lock(sleepers_);
            wake_.notify_all();
        }
        drain();
        state_.fetch_and(~IS_OPEN);
        for (int64_t i = 0; (state_.load(std::memory_order_acquire) & NUM_AT_WORK) != 0; ++i) {
            pause();
            if (i > SPINS_BEFORE_YIELD) std::this_thread::yield();
        }
    }

  private:
    // A worker that is woken while the other cores are busy for a moment may be put where the caller runs. There the two take turns, one spinning
    // while the other should work, until the system finds that a core is idle, which takes it as long as a whole step.
    void keep_off(int cpu) {
        if (cpu == callers_cpu_) return;
        callers_cpu_ = cpu;
        cpu_set_t others;
        if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(getpid(), sizeof others, &others) != 0) return;
        CPU_CLR(cpu, &others);
        if (CPU_COUNT(&others) == 0) return;
        for (std::thread& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
    }

    // The state is the number of the loop, whether it can be joined, and how many workers are at it.
    static constexpr uint64_t NUM_AT_WORK = 0xffff, IS_OPEN = 0x10000, EPOCH = 0x20000;
    static constexpr int64_t SPINS_BEFORE_YIELD = 2000;
    static constexpr auto AWAKE = std::chrono::microseconds(200);  // longer than from one loop of a step to the next

    void work() {
        for (uint64_t seen = 0;;) {
            uint64_t state = next_state(seen);
            while (state & IS_OPEN) {
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
            for (int64_t i = first; i < first + size; ++i) function_(context_, i);
            first = next_.load(std::memory_order_relaxed);
        }
    }

    std::mutex callers_, sleepers_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    int callers_cpu_ = -1;
    int64_t count_ = 0, share_ = 1;
    void (*function_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::atomic<int> num_asleep_{0};
};

// One turn of a loop, in machine code of its own, shared by all loops. Compiled into several loops, the same sums might be added up in
// another order in each, and what a row gives would depend on how many rows there are.
template <typename Function>
PENSTOCK_APART void turn(const void* function, int64_t i) {
    (*static_cast<const Function*>(function))(i);
}

// function(i) for each i below `count`.
template <typename Function>
inline void parallel_for(int64_t count, const Function& function) {
    Pool::instance().run(count, &turn<Function>, &function);
}

// The same in this thread alone.
template <typename Function>
inline void serial_for(int64_t count, const Function& function) {
    for (int64_t i = 0; i < count; ++i) turn<Function>(&function, i);
}

}  // namespace
