// Products with weights of 4, 5 or 8 bits by AVX-512's instruction for them, which sums four products of bytes in every lane.

#pragma once

#ifdef __AVX512VNNI__

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "quantized_product.h"
#include "vector.h"

namespace {

// Bytes of the weight to ask for ahead of their use: those of the next tiles where a core's cache holds them besides the tiles at hand.
constexpr int64_t MOST_AHEAD = 320 * 1024, NEAR_AHEAD = 4096;

inline __m512i four_codes(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, sizeof(four));
    return _mm512_set1_epi32(four);
}

// 16 more in each byte whose bit is set.
inline __m512i add_sixteens(__m512i codes, const uint8_t* bits) {
    uint64_t mask;
    std::memcpy(&mask, bits, sizeof(mask));
    return _mm512_mask_add_epi8(codes, mask, codes, _mm512_set1_epi8(16));
}

inline __m512 load_lanes(const void* from, bool is_bfloat16, int64_t index, __mmask16 lanes) {
    if (!is_bfloat16) return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(from) + index);
    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, static_cast<const BFloat16*>(from) + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline void store_lanes(void* to, bool is_bfloat16, int64_t index, __mmask16 lanes, __m512 sums) {
    if (is_bfloat16) {
        BFloat16 halves[TILE];
        convert(halves, Vector{{(Register)sums}});
        _mm256_mask_storeu_epi16(static_cast<BFloat16*>(to) + index, lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
    } else {
        _mm512_mask_storeu_ps(static_cast<float*>(to) + index, lanes, sums);
    }
}

template <int BITS, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    const int64_t tile_bytes = num_groups * BLOCK_BYTES<BITS>;
    // The processor does so by itself, but loses track of weights that several blocks of rows go through.
    const int64_t ahead = TILES * tile_bytes <= MOST_AHEAD ? TILES * tile_bytes : NEAR_AHEAD;
    const uint8_t* block = blocks + first_tile * tile_bytes;
    const RowGroup* x = rows + first_row * num_groups;
    const __m512i lower_half = _mm512_set1_epi8(15);
    __mmask16 lanes[TILES];
    __m512 sums[ROWS][TILES];
    for (int t = 0; t < TILES; ++t) {
        lanes[t] = static_cast<__mmask16>(0xffff >> (TILE - std::min(TILE, outputs - (first_tile + t) * TILE)));
        const __m512 start = bias ? load_lanes(bias, is_bfloat16, (first_tile + t) * TILE, lanes[t]) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; ++r) sums[r][t] = start;
    }
    for (int64_t g = 0; g < num_groups; ++g, block += BLOCK_BYTES<BITS>, ++x) {
        __m512i dots[ROWS][TILES];
        for (int r = 0; r < ROWS; ++r)
            for (int t = 0; t < TILES; ++t) dots[r][t] = _mm512_set1_epi32(BITS == 8 ? x[r * num_groups].offset : 0);
#pragma GCC unroll 8
        for (int step = 0; step < CODE_ROWS<BITS>; ++step) {
            __m512i codes[TILES], upper[TILES];
            for (int t = 0; t < TILES; ++t) {
                codes[t] = _mm512_loadu_si512(block + t * tile_bytes + 64 * step);
                if constexpr (BITS != 8) {
                    upper[t] = _mm512_and_si512(_mm512_srli_epi16(codes[t], 4), lower_half);
                    codes[t] = _mm512_and_si512(codes[t], lower_half);
                }
                if constexpr (BITS == 5) {
                    const uint8_t* fifth_bits = block + t * tile_bytes + HALF_BYTES + 8 * step;
                    codes[t] = add_sixteens(codes[t], fifth_bits);
                    upper[t] = add_sixteens(upper[t], fifth_bits + 32);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512i four = four_codes(x[r * num_groups].codes + 4 * step);
                for (int t = 0; t < TILES; ++t) dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], codes[t], four);
            }
            if constexpr (BITS != 8) {
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const __m512i four = four_codes(x[r * num_groups].codes + 4 * (step + 4));
                    for (int t = 0; t < TILES; ++t) dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], upper[t], four);
                }
            }
        }
        for (int t = 0; t < TILES; ++t)
            for (int64_t i = 0; i < BLOCK_BYTES<BITS>; i += 64)
                _mm_prefetch(reinterpret_cast<const char*>(block + t * tile_bytes + ahead + i), _MM_HINT_T1);
        __m512 scales[TILES], minimums[TILES];
        for (int t = 0; t < TILES; ++t) {
            const auto* halves = reinterpret_cast<const __m256i*>(block + t * tile_bytes + CODE_BYTES<BITS>);
            scales[t] = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
            if constexpr (BITS != 8) minimums[t] = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scale = _mm512_set1_ps(x[r * num_groups].scale);
            for (int t = 0; t < TILES; ++t) {
                sums[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][t]), _mm512_mul_ps(scales[t], scale), sums[r][t]);
                if constexpr (BITS != 8) sums[r][t] = _mm512_fmadd_ps(minimums[t], _mm512_set1_ps(x[r * num_groups].sum), sums[r][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) store_lanes(out, is_bfloat16, (first_row + r) * outputs + (first_tile + t) * TILE, lanes[t], sums[r][t]);
}

}  // namespace

#endif
