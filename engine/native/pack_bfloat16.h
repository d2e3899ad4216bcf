// Sixteen rows of bfloat16, laid out for products of pairs.

#pragma once

#ifdef __AVX512BF16__

#include <cstdint>

#include "common.h"
#include "vector.h"

namespace {

// Rows become columns, in numbers of 32 bits.
inline void transpose(__m512i* rows) {
    __m512i half[16];
    for (int64_t i = 0; i < 16; i += 2) {
        half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int64_t i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
    }
    for (int64_t i = 0; i < 4; ++i) {
        const __m512i even_low = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88), odd_low = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        const __m512i even_high = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88), odd_high = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
        half[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
        half[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
        half[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
        half[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
    }
    for (int64_t i = 0; i < 16; ++i) rows[i] = half[i];
}

// packed [size / 2][`width` keys][2], of which it writes 16 keys; those from `count` on are zeros. size is a multiple of 32.
inline void pack_keys(BFloat16* packed, int64_t width, const BFloat16* const* keys, int64_t count, int64_t size) {
    for (int64_t d = 0; d < size; d += 32) {
        __m512i rows[16];
        for (int64_t i = 0; i < 16; ++i) rows[i] = i < count ? _mm512_loadu_si512(keys[i] + d) : _mm512_setzero_si512();
        transpose(rows);
        for (int64_t i = 0; i < 16; ++i) _mm512_storeu_si512(packed + (d / 2 + i) * width * 2, rows[i]);
    }
}

// packed [8][size][2]: two values side by side; those from `count` on are zeros. size is a multiple of 32.
inline void pack_values(BFloat16* packed, const BFloat16* const* values, int64_t count, int64_t size) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // 16-bit lanes i and 32 + i, next to each other.
    const __m512i take_low = _mm512_add_epi32(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
    const __m512i take_high = _mm512_add_epi32(take_low, _mm512_set1_epi32(16 | 16 << 16));
    for (int64_t i = 0; i < 16; i += 2)
        for (int64_t d = 0; d < size; d += 32) {
            const __m512i even = i < count ? _mm512_loadu_si512(values[i] + d) : _mm512_setzero_si512();
            const __m512i odd = i + 1 < count ? _mm512_loadu_si512(values[i + 1] + d) : _mm512_setzero_si512();
            BFloat16* to = packed + (i / 2 * size + d) * 2;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, take_low, odd));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, take_high, odd));
        }
}

}  // namespace

#endif
