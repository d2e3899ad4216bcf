// Sums of products with a block of codes by AVX2, which sums two products of bytes in sixteen bits, and four where it has the extension for it.

#pragma once

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "quantized_product.h"

namespace {

template <int BITS>
struct UnpackedBlock {
    static constexpr int64_t STEPS = 8, HALVES = 2;

    __m256i codes[STEPS][HALVES];

    explicit UnpackedBlock(const uint8_t* block) {
        const __m256i lower_half = _mm256_set1_epi8(15);
        for (int64_t step = 0; step < BITS; ++step)
            for (int64_t h = 0; h < HALVES; ++h) {
                const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block) + HALVES * step + h);
                codes[step][h] = BITS == 4 ? _mm256_and_si256(bytes, lower_half) : bytes;
                if constexpr (BITS == 4) codes[step + 4][h] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), lower_half);
            }
    }

    // For each row of the tile the sum of its products with the group.
    void multiply(int32_t* dots, const RowGroup& x) const {
        __m256i sums[HALVES];
        for (int64_t h = 0; h < HALVES; ++h) sums[h] = _mm256_set1_epi32(BITS == 8 ? x.offset : 0);
        for (int64_t step = 0; step < STEPS; ++step) {
            int32_t four;
            std::memcpy(&four, x.codes + 4 * step, sizeof(four));
            for (int64_t h = 0; h < HALVES; ++h) sums[h] = add_products(sums[h], codes[step][h], _mm256_set1_epi32(four));
        }
        for (int64_t h = 0; h < HALVES; ++h) _mm256_storeu_si256(reinterpret_cast<__m256i*>(dots) + h, sums[h]);
    }

    static __m256i add_products(__m256i sums, __m256i codes, __m256i x) {
#ifdef __AVXVNNI__
        return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else
        const __m256i ones = _mm256_set1_epi16(1);
        if constexpr (BITS == 4) return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ones));
        // Sixteen bits hold no two products of 255 and 127, but those of 7 bits and of the highest bit.
        const __m256i low = _mm256_and_si256(codes, _mm256_set1_epi8(127)), high = _mm256_and_si256(codes, _mm256_set1_epi8(-128));
        const __m256i products = _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(low, x), ones), _mm256_madd_epi16(_mm256_maddubs_epi16(high, x), ones));
        return _mm256_add_epi32(sums, products);
#endif
    }
};

}  // namespace

#endif
