// Keys and values as they are multiplied: numbers that one step of the inner product takes lie side by side.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common.h"
#include "tile.h"
#include "vector.h"

namespace {

#ifdef __AVX512F__

// The first of four registers gets the first 16 bytes of each, the second one the second ones, and so on.
inline void exchange_quarters(__m512i& a, __m512i& b, __m512i& c, __m512i& d) {
    const __m512i even_low = _mm512_shuffle_i32x4(a, b, EVEN_QUARTERS), odd_low = _mm512_shuffle_i32x4(a, b, ODD_QUARTERS);
    const __m512i even_high = _mm512_shuffle_i32x4(c, d, EVEN_QUARTERS), odd_high = _mm512_shuffle_i32x4(c, d, ODD_QUARTERS);
    a = _mm512_shuffle_i32x4(even_low, even_high, EVEN_QUARTERS);
    b = _mm512_shuffle_i32x4(odd_low, odd_high, EVEN_QUARTERS);
    c = _mm512_shuffle_i32x4(even_low, even_high, ODD_QUARTERS);
    d = _mm512_shuffle_i32x4(odd_low, odd_high, ODD_QUARTERS);
}

// Rows become columns.
inline void transpose(Vector* rows) {
    __m512i all[LANES], half[LANES];
    for (int64_t i = 0; i < LANES; ++i) all[i] = (__m512i)rows[i].parts[0];
    for (int64_t i = 0; i < LANES; i += 2) {
        half[i] = _mm512_unpacklo_epi32(all[i], all[i + 1]);
        half[i + 1] = _mm512_unpackhi_epi32(all[i], all[i + 1]);
    }
    for (int64_t i = 0; i < LANES; i += 4) {
        all[i] = _mm512_unpacklo_epi64(half[i], half[i + 2]);
        all[i + 1] = _mm512_unpackhi_epi64(half[i], half[i + 2]);
        all[i + 2] = _mm512_unpacklo_epi64(half[i + 1], half[i + 3]);
        all[i + 3] = _mm512_unpackhi_epi64(half[i + 1], half[i + 3]);
    }
    for (int64_t i = 0; i < 4; ++i) exchange_quarters(all[i], all[i + 4], all[i + 8], all[i + 12]);
    for (int64_t i = 0; i < LANES; ++i) rows[i].parts[0] = (Register)all[i];
}

#else

// Rows become columns, squares of registers at a time.
inline void transpose(Vector* rows) {
    Vector columns[LANES];
    for (int64_t p = 0; p < PARTS; ++p)
        for (int64_t q = 0; q < PARTS; ++q) {
            Register square[WIDTH], half[WIDTH];
            for (int64_t i = 0; i < WIDTH; ++i) square[i] = rows[WIDTH * p + i].parts[q];
            for (int64_t i = 0; i < WIDTH; i += 2) {
                half[i] = low_numbers(square[i], square[i + 1]);
                half[i + 1] = high_numbers(square[i], square[i + 1]);
            }
            for (int64_t i = 0; i < WIDTH; i += 4) {
                square[i] = low_pairs(half[i], half[i + 2]);
                square[i + 1] = high_pairs(half[i], half[i + 2]);
                square[i + 2] = low_pairs(half[i + 1], half[i + 3]);
                square[i + 3] = high_pairs(half[i + 1], half[i + 3]);
            }
#ifdef __AVX2__
            for (int64_t i = 0; i < WIDTH / 2; ++i) {
                half[i] = low_halves(square[i], square[i + WIDTH / 2]);
                half[i + WIDTH / 2] = high_halves(square[i], square[i + WIDTH / 2]);
            }
            for (int64_t i = 0; i < WIDTH; ++i) square[i] = half[i];
#endif
            for (int64_t i = 0; i < WIDTH; ++i) columns[WIDTH * q + i].parts[p] = square[i];
        }
    for (int64_t i = 0; i < LANES; ++i) rows[i] = columns[i];
}

#endif

// The first numbers of sixteen pairs of bfloat16, and the second ones.
inline Vector first_of_pairs(const Vector& pairs) {
    return for_parts([&](int64_t p) { return (Register)((UIntRegister)pairs.parts[p] << 16); });
}

inline Vector second_of_pairs(const Vector& pairs) {
    return for_parts([&](int64_t p) { return (Register)((UIntRegister)pairs.parts[p] & 0xffff0000u); });
}

// packed [size / step][`width` keys][step], of which it writes 16 keys; those from `count` on are zeros. size is a multiple of 32. `besides` is called
// before every 16 vectors are written.
template <typename Element, typename Rows, typename Besides = Nothing>
inline __attribute__((always_inline)) void pack_keys(Element* packed, int64_t width, const Rows& keys, int64_t count, int64_t size,
                                                     const Besides& besides = {}) {
    constexpr bool ARE_PAIRS = std::is_same_v<std::decay_t<decltype(*keys[0])>, BFloat16>;  // in a lane, which is moved as a whole
    constexpr int64_t NUMBERS = ARE_PAIRS ? 2 : 1;
    for (int64_t d = 0; d < size; d += NUMBERS * LANES) {
        besides();
        Vector rows[LANES];
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; ++i) rows[i] = i < count ? load(reinterpret_cast<const float*>(keys[i] + d)) : Vector{};
        transpose(rows);
        if constexpr (ARE_PAIRS && std::is_same_v<Element, float>) {
            besides();
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; ++i) {
                convert(packed + (d + 2 * i) * width, first_of_pairs(rows[i]));
                convert(packed + (d + 2 * i + 1) * width, second_of_pairs(rows[i]));
            }
        } else {
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; ++i) convert(reinterpret_cast<float*>(packed + (d + NUMBERS * i) * width), rows[i]);
        }
    }
}

// packed [16 / step][size][step]: values of neighbouring keys side by side; those before `begin` and from `end` on are zeros. size is a
// multiple of 32.
template <typename Rows>
inline void pack_values(float* packed, const Rows& values, int64_t begin, int64_t end, int64_t size) {
    for (int64_t i = 0; i < LANES; ++i)
        for (int64_t d = 0; d < size; d += LANES) convert(packed + i * size + d, i >= begin && i < end ? load(values[i] + d) : Vector{});
}

#if defined(__AVX512BF16__)

// Two neighbouring rows, of which row(i, d) gives 32 numbers.
template <typename Row>
inline __attribute__((always_inline)) void interleave(BFloat16* packed, int64_t i, int64_t size, const Row& row) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    // 16-bit lanes i and 32 + i, next to each other.
    const __m512i take_low = _mm512_add_epi32(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(32)), 16));
    const __m512i take_high = _mm512_add_epi32(take_low, _mm512_set1_epi32(16 | 16 << 16));
    for (int64_t d = 0; d < size; d += 32) {
        const __m512i even = row(i, d), odd = row(i + 1, d);
        BFloat16* to = packed + (i / 2 * size + d) * 2;
        _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, take_low, odd));
        _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(even, take_high, odd));
    }
}

template <typename Rows>
inline __attribute__((always_inline)) void pack_values(BFloat16* packed, const Rows& values, int64_t begin, int64_t end, int64_t size) {
    if (begin <= 0 && end >= LANES) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < LANES; i += 2) interleave(packed, i, size, [&](int64_t row, int64_t d) { return _mm512_loadu_si512(values[row] + d); });
    } else {
        for (int64_t i = 0; i < LANES; i += 2)
            interleave(packed, i, size, [&](int64_t row, int64_t d) {
                return row >= begin && row < end ? _mm512_loadu_si512(values[row] + d) : _mm512_setzero_si512();
            });
    }
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

template <typename Rows>
inline void pack_values(BFloat16* packed, const Rows& values, int64_t begin, int64_t end, int64_t size) {
    for (int64_t i = 0; i < LANES; i += 2)
        for (int64_t d = 0; d < size; d += 8) {
            const uint16x8_t even = i >= begin && i < end ? vld1q_u16(&values[i][d].bits) : vdupq_n_u16(0);
            const uint16x8_t odd = i + 1 >= begin && i + 1 < end ? vld1q_u16(&values[i + 1][d].bits) : vdupq_n_u16(0);
            uint16_t* to = &packed[(i / 2 * size + d) * 2].bits;
            vst1q_u16(to, vzip1q_u16(even, odd));
            vst1q_u16(to + 8, vzip2q_u16(even, odd));
        }
}

#endif

}  // namespace
