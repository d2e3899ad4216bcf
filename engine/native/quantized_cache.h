// Keys or values of 8 bits in a cache: each token's head has codes and a scale of its own, so that a large number costs precision in its row only.
//
// A block holds [num_kv_heads][block_size][size] codes, then [num_kv_heads][block_size] scales of float32, so that a head's share of a block, which
// is read at once, lies together.

#pragma once

#include <cmath>
#include <cstdint>

#include "common.h"
#include "pack.h"
#include "quantized_rows.h"
#include "vector.h"

namespace {

// Codes are multiplied as numbers, which bfloat16 holds without rounding; the scales of keys then count in scores, and those of values in weights.
constexpr int64_t MAX_CODES = 128;  // of a row

// Rows of one KV head. `size` is a multiple of 32.
struct CodeRows {
    int8_t* codes;
    float* scales;
    int64_t size;

    CodeRows(void* cache, int64_t block, int64_t head, int64_t num_kv_heads, int64_t block_size, int64_t size) : size(size) {
        int8_t* const first = static_cast<int8_t*>(cache) + block * block_size * num_kv_heads * (size + sizeof(float));
        codes = first + head * block_size * size;
        scales = reinterpret_cast<float*>(first + num_kv_heads * block_size * size) + head * block_size;
    }

    template <typename T>
    void write(int64_t row, const T* numbers) const {
        float most = 0.0f;
        for (int64_t d = 0; d < size; d += GROUP) {
            const float highest = highest_of_group(numbers + d);
            if (highest > most || std::isnan(highest)) most = highest;  // which stays NaN, so that results show it
        }
        scales[row] = most / 127.0f;
        for (int64_t d = 0; d < size; d += GROUP) round_group(codes + row * size + d, numbers + d, broadcast(inverse_scale(most)));
    }

    // The row's codes as numbers.
    template <typename T>
    void read(T* numbers, int64_t row) const {
        const int8_t* from = codes + row * size;
        for (int64_t d = 0; d < size; d += 2 * LANES) convert(numbers + d, load_bytes(from + d), load_bytes(from + d + LANES));
    }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PENSTOCK_PACKS_CODES

// The bytes of the numbers from 0 to 127 in bfloat16, which holds them without rounding.
struct NumberBytes {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    constexpr NumberBytes() {
        for (int number = 1, exponent = 0; number < 128; ++number) {
            if (number >> (exponent + 1)) ++exponent;
            const int bits = (127 + exponent) << 7 | (number << (7 - exponent) & 127);
            low[number] = static_cast<uint8_t>(bits & 255);
            high[number] = static_cast<uint8_t>(bits >> 8);
        }
    }
};

constexpr NumberBytes NUMBER_BYTES;

// The numbers that the even bytes of a register stand for, in bfloat16, and those of the odd ones.
struct Widened {
    __m512i even, odd;
};

inline Widened widen(__m512i codes) {
    const auto look_up = [magnitudes = _mm512_abs_epi8(codes)](const uint8_t* table) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), magnitudes, _mm512_load_si512(table + 64));
    };
    constexpr int FIRST_OR_SOME_OF_SECOND = 0xf8;
    const __m512i low = look_up(NUMBER_BYTES.low);
    const __m512i high = _mm512_ternarylogic_epi32(look_up(NUMBER_BYTES.high), codes, _mm512_set1_epi8(-128), FIRST_OR_SOME_OF_SECOND);
    return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, _mm512_set1_epi16(0x00ff), FIRST_OR_SOME_OF_SECOND),
            _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, _mm512_set1_epi16(static_cast<int16_t>(0xff00)), FIRST_OR_SOME_OF_SECOND)};
}

// What `pack_keys` makes of sixteen rows of codes as numbers. Here and in what follows, size is a multiple of 64.
template <typename Besides>
inline __attribute__((always_inline)) void pack_key_codes(BFloat16* packed, int64_t width, const int8_t* codes, int64_t size, const Besides& besides) {
    constexpr int64_t CODES = 4;  // of a lane
    const __m512i even_first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    for (int64_t d = 0; d < size; d += CODES * LANES) {
        Vector rows[LANES];
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; ++i) rows[i] = {{(Register)_mm512_loadu_si512(codes + i * size + d)}};
        besides();
        transpose(rows);
        besides();
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; ++i) {
            const Widened pairs = widen(_mm512_shuffle_epi8((__m512i)rows[i].parts[0], even_first));
            BFloat16* const to = packed + (d + CODES * i) * width;
            _mm512_storeu_si512(to, pairs.even);
            _mm512_storeu_si512(to + 2 * width, pairs.odd);
        }
    }
}

// What `pack_values` makes of them, but for the order of a row's pairs, of which each lane of 16 bytes is interleaved on its own: see `reorder_sums_with_codes`.
inline void pack_value_codes(BFloat16* packed, const int8_t* codes, int64_t size) {
    for (int64_t i = 0; i < LANES; i += 4)
        for (int64_t d = 0; d < size; d += 64) {
            const auto row = [&](int64_t r) { return _mm512_loadu_si512(codes + (i + r) * size + d); };
            const __m512i even_low = _mm512_unpacklo_epi8(row(0), row(2)), even_high = _mm512_unpackhi_epi8(row(0), row(2));
            const __m512i odd_low = _mm512_unpacklo_epi8(row(1), row(3)), odd_high = _mm512_unpackhi_epi8(row(1), row(3));
            const __m512i fours[] = {_mm512_unpacklo_epi16(even_low, odd_low), _mm512_unpackhi_epi16(even_low, odd_low),
                                     _mm512_unpacklo_epi16(even_high, odd_high), _mm512_unpackhi_epi16(even_high, odd_high)};
            BFloat16* const to = packed + i * size + 2 * d;
#pragma GCC unroll 4
            for (int64_t v = 0; v < 4; ++v) {
                const Widened pairs = widen(fours[v]);
                _mm512_storeu_si512(to + 2 * LANES * v, pairs.even);
                _mm512_storeu_si512(to + 2 * size + 2 * LANES * v, pairs.odd);
            }
        }
}

// Brings sums with values of `pack_value_codes` into the order of the values' numbers.
inline void reorder_sums_with_codes(float* sums, int64_t count) {
    for (int64_t i = 0; i < count; i += 4 * LANES) {
        __m512i quarters[4];
        for (int64_t v = 0; v < 4; ++v) quarters[v] = _mm512_loadu_si512(sums + i + LANES * v);
        exchange_quarters(quarters[0], quarters[1], quarters[2], quarters[3]);
        for (int64_t v = 0; v < 4; ++v) _mm512_storeu_si512(sums + i + LANES * v, quarters[v]);
    }
}

#endif

}  // namespace
