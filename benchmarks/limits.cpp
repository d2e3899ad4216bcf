// What a processor does at most, beside which roofline.py puts the kernels: reading memory, and multiplying and adding bytes or bfloat16.

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t SUMS = 14;  // in turn, so that none waits for the one before; twice as many registers and two factors are all that there are
constexpr int64_t LINE = 64, AHEAD = 4096;

// Sixteen sums of products, over and over. Returns how many products that makes, of which each step has `products`.
template <typename Sum, typename Step>
int64_t repeat(int64_t rounds, int64_t products, const Step& step) {
    Sum kept[SUMS] = {}, sums[SUMS];
    asm volatile("" : "+m"(kept));  // as the compiler must not know that all of them are equal: it would compute one
#pragma GCC unroll 14
    for (int64_t i = 0; i < SUMS; ++i) sums[i] = kept[i];
    for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 14
        for (int64_t i = 0; i < SUMS; ++i) sums[i] = step(sums[i]);
#pragma GCC unroll 14
    for (int64_t i = 0; i < SUMS; ++i) kept[i] = sums[i];
    asm volatile("" : : "m"(kept));
    return rounds * SUMS * products;
}

int64_t byte_products(int64_t rounds) {
#if defined(__AVX512VNNI__)
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2);
    return repeat<__m512i>(rounds, 64, [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, b); });
#elif defined(__AVXVNNI__)
    const __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(2);
    return repeat<__m256i>(rounds, 32, [&](__m256i sum) { return _mm256_dpbusd_avx_epi32(sum, a, b); });
#elif defined(__AVX2__)
    const __m256i a = _mm256_set1_epi8(3);  // times the sums themselves, as the product of two constants would be computed once
    // In 16 bits, which kernels add to sums in 32 bits now and then.
    return repeat<__m256i>(rounds, 32, [&](__m256i sum) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, sum)); });
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(2);
    return repeat<int32x4_t>(rounds, 16, [&](int32x4_t sum) { return vdotq_s32(sum, a, b); });
#else
    return 0;
#endif
}

int64_t number_products(int64_t rounds) {
#ifdef PENSTOCK_BFLOAT16_PRODUCTS
    const BFloat16 numbers[2 * LANES] = {};
    const Pairs pairs = load_pairs(numbers);
    return repeat<Vector>(rounds, 2 * LANES, [&](const Vector& sum) { return add_products(sum, pairs, pairs); });
#else
    const Vector a = broadcast(0.5f);
    return repeat<Vector>(rounds, LANES, [&](const Vector& sum) { return multiply_add(a, a, sum); });
#endif
}

// The sum of what function(i) returns in each of so many threads. They end with it: those of OpenMP would wait for more, spinning on the CPUs of what
// is timed next.
template <typename Function>
int64_t in_threads(int64_t num_threads, const Function& function) {
    std::atomic<int64_t> total{0};
    std::vector<std::thread> threads;
    for (int64_t i = 1; i < num_threads; ++i) threads.emplace_back([&, i] { total += function(i); });
    total += function(0);
    for (std::thread& thread : threads) thread.join();
    return total;
}

}  // namespace

extern "C" {

// Reads `num_bytes`, each thread a part of its own.
int64_t limits_read(const char* memory, int64_t num_bytes, int64_t num_threads) {
    const int64_t num_lines = num_bytes / LINE;
    return in_threads(num_threads, [=](int64_t thread) {
        int64_t found = 0;
        for (int64_t line = num_lines * thread / num_threads; line < num_lines * (thread + 1) / num_threads; ++line) {
            const auto* numbers = reinterpret_cast<const int64_t*>(memory + line * LINE);
            __builtin_prefetch(memory + line * LINE + AHEAD);
            for (int64_t i = 0; i < LINE / 8; ++i) found ^= numbers[i];
        }
        return found;
    });
}

// Both return how many products there were.
int64_t limits_multiply_bytes(int64_t rounds, int64_t num_threads) { return in_threads(num_threads, [&](int64_t) { return byte_products(rounds); }); }

int64_t limits_multiply_numbers(int64_t rounds, int64_t num_threads) { return in_threads(num_threads, [&](int64_t) { return number_products(rounds); }); }
}
