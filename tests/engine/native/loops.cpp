// The thread pool in a library of its own, with turns that are made to show which threads run them.

#include "parallel.h"

#include <set>

extern "C" {

int64_t threads_for_loop(int64_t count, double nanoseconds, int64_t num_threads) { return threads_for(count, nanoseconds, num_threads); }

// A loop whose every turn waits until `num_wanted` threads are in it, or a minute has passed. Returns how many threads have been.
int64_t threads_that_meet(int64_t count, double nanoseconds, int64_t num_threads, int64_t num_wanted) {
    omp_set_num_threads(static_cast<int>(num_threads));
    std::mutex mutex;
    std::set<std::thread::id> met;
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    const auto num_met = [&] {
        const std::lock_guard<std::mutex> lock(mutex);
        met.insert(std::this_thread::get_id());
        return static_cast<int64_t>(met.size());
    };
    parallel_for(count, nanoseconds / count, [&](int64_t) {
        while (num_met() < num_wanted && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
    return num_met();
}

void place(const int32_t* cpus, int64_t num_cpus, int64_t is_pinned) { Pool::instance().place(cpus, num_cpus, is_pinned); }
}
