// What a processor does at most, beside which roofline.py puts the kernels: reading memory, and multiplying and adding bytes or bfloat16.

#include <cstdint>

#include "vector.h"

namespace {

constexpr int64_t SUMS = 14;  // in turn, so that none waits for the one before; twice as many registers and two factors are all that there are
constexpr int64_t LINE = 64, AHEAD = 4096;

// Sixteen sums of products, over and over. Returns how many products that makes, of which each step has `products`.
template <typename Sum, typename Step>
int64_t repeat(int64_t rounds, int64_t products, const Step& step) {
    Sum sums[SUMS] = {};
    // As the compiler must not know that all of them are equal: it would compute one.
    for (Sum& sum : sums) asm volatile("" : "+m"(sum));
    for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 14
        for (int64_t i = 0; i < SUMS; ++i) sums[i] = step(sums[i]);
    for (const Sum& sum : sums) asm volatile("" : : "m"(sum));
    return rounds * SUMS * products;
}

int64_t byte_products(int64_t rounds) {
#if defined(__AVX512VNNI__)
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(2);
    return repeat<__m512i>(rounds, 64, [&](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, b); });
#elif defined(__AVX2__)
    __m256i a = _mm256_set1_epi8(3);
    const __m256i b = _mm256_set1_epi8(2), ones = _mm256_set1_epi16(1);
    return repeat<__m256i>(rounds, 32, [&](__m256i sum) {
        asm volatile("" : "+x"(a));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    });
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

template <typename Function>
int64_t in_threads(int64_t num_threads, const Function& function) {
    int64_t total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(+ : total) schedule(static)
    for (int64_t i = 0; i < num_threads; ++i) total += function();
    return total;
}

}  // namespace

extern "C" {

// Reads `num_bytes`, each thread a part of its own.
int64_t limits_read(const char* memory, int64_t num_bytes, int64_t num_threads) {
    int64_t found = 0;
#pragma omp parallel for num_threads(num_threads) reduction(^ : found) schedule(static)
    for (int64_t line = 0; line < num_bytes / LINE; ++line) {
        const auto* numbers = reinterpret_cast<const int64_t*>(memory + line * LINE);
        __builtin_prefetch(memory + line * LINE + AHEAD);
        for (int64_t i = 0; i < LINE / 8; ++i) found ^= numbers[i];
    }
    return found;
}

// Both return how many products there were.
int64_t limits_multiply_bytes(int64_t rounds, int64_t num_threads) { return in_threads(num_threads, [&] { return byte_products(rounds); }); }

int64_t limits_multiply_numbers(int64_t rounds, int64_t num_threads) { return in_threads(num_threads, [&] { return number_products(rounds); }); }
}
