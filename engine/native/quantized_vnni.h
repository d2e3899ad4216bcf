// Products with quantized weights by AVX-512's instruction for them, which sums four products of bytes in every lane.

#pragma once

#ifdef __AVX512VNNI__

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "quantized_product.h"
#include "vector.h"

namespace {

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

// Of every row of a tile four codes of a group, which stand for OFFSET less.
template <typename Type>
inline __attribute__((always_inline)) __m512i codes_at(const uint8_t* codes, int64_t step) {
    if constexpr (Type::BITS == 8) return _mm512_loadu_si512(codes + 64 * step);
    const __m512i bytes = _mm512_loadu_si512(codes + 64 * (step % 4));
    const __m512i lower = _mm512_and_si512(step < 4 ? bytes : _mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
    if constexpr (Type::BITS == 5) return add_sixteens(lower, codes + HALF_BYTES + 8 * step);
    if constexpr (Type::BITS == 6) {
        const __m512i pairs = _mm512_loadu_si512(codes + HALF_BYTES + 64 * (step / 4)), place = _mm512_set1_epi8(48);
        const int64_t pair = step % 4;
        const __m512i upper = pair < 2 ? _mm512_slli_epi16(pairs, 4 - 2 * pair) : _mm512_srli_epi16(pairs, 2 * pair - 4);
        return _mm512_ternarylogic_epi32(lower, upper, place, 0xf8);  // lower | (upper & place)
    }
    if constexpr (Type::HAS_LEVELS) {
        const __m128i levels = _mm_xor_si128(_mm_load_si128(reinterpret_cast<const __m128i*>(Type::LEVELS)), _mm_set1_epi8(-128));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), lower);
    }
    return lower;
}

template <typename Type, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    using Scales = typename Type::Scales;
    constexpr int64_t PART_STEPS = STEPS / Scales::SCALES;
    const int64_t num_blocks = num_groups / Scales::GROUPS, tile_bytes = num_blocks * Type::BLOCK_BYTES;
    constexpr bool IS_ONLY_BLOCK = ROWS <= FEW_ROWS || ROWS > BLOCK_ROWS;  // where there are several, each has another number of rows
    // The processor does so by itself, but loses track of weights that several blocks of rows go through. Fetched in the first pass alone, the
    // next tiles would keep it waiting for memory, and memory would have nothing to do in the others.
    const bool has_room = TILES * tile_bytes <= MOST_AHEAD;
    const int64_t ahead = has_room ? TILES * tile_bytes : NEAR_AHEAD, groups_per_fetch = has_room ? num_passes : 1;
    int64_t groups_until_fetch = has_room ? pass : 0;
    const uint8_t* block = blocks + first_tile * tile_bytes;
    const RowGroup* x = rows + first_row * num_groups;
    __mmask16 lanes[TILES];
    __m512 sums[ROWS][TILES];
    for (int t = 0; t < TILES; ++t) {
        lanes[t] = static_cast<__mmask16>(0xffff >> (TILE - std::min(TILE, outputs - (first_tile + t) * TILE)));
        const __m512 start = bias ? load_lanes(bias, is_bfloat16, (first_tile + t) * TILE, lanes[t]) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; ++r) sums[r][t] = start;
    }
    for (int64_t b = 0; b < num_blocks; ++b, block += Type::BLOCK_BYTES) {
        Scales scales[TILES];
        for (int t = 0; t < TILES; ++t) scales[t].read(block + t * tile_bytes + Type::CODES);
        for (int64_t g = 0; g < Scales::GROUPS; ++g, ++x) {
            const uint8_t* codes = block + g * CODE_BYTES<Type::BITS>;
#pragma GCC unroll 2
            for (int part = 0; part < Scales::SCALES; ++part) {
                __m512i dots[ROWS][TILES];
                for (int r = 0; r < ROWS; ++r)
                    for (int t = 0; t < TILES; ++t) dots[r][t] = _mm512_set1_epi32(correction<Type>(x[r * num_groups], part));
#pragma GCC unroll 8
                for (int i = 0; i < PART_STEPS; ++i) {
                    // Both halves of a byte are used one after the other.
                    const int step = Type::BITS == 8 || Scales::SCALES == 2 ? PART_STEPS * part + i : i / 2 + i % 2 * 4;
                    __m512i unpacked[TILES];
                    for (int t = 0; t < TILES; ++t) unpacked[t] = codes_at<Type>(codes + t * tile_bytes, step);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r) {
                        const __m512i four = four_codes(x[r * num_groups].codes + 4 * step);
                        for (int t = 0; t < TILES; ++t) dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], unpacked[t], four);
                    }
                }
                __m512 scale[TILES];
                for (int t = 0; t < TILES; ++t) scale[t] = (__m512)scales[t].scale(g, part).parts[0];
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const __m512 row_scale = _mm512_set1_ps(x[r * num_groups].scale);
                    for (int t = 0; t < TILES; ++t)
                        sums[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][t]), _mm512_mul_ps(scale[t], row_scale), sums[r][t]);
                }
            }
            constexpr int64_t GROUP_BYTES = Type::BLOCK_BYTES / Scales::GROUPS;
            if (IS_ONLY_BLOCK || groups_until_fetch-- == 0) {
                groups_until_fetch = groups_per_fetch - 1;
                for (int t = 0; t < TILES; ++t) fetch_lines(block + g * GROUP_BYTES + t * tile_bytes + ahead, GROUP_BYTES);
            }
            fetch_following(b * Scales::GROUPS + g);
            if constexpr (Scales::HAS_MINIMUMS) {
                __m512 minimum[TILES];
                for (int t = 0; t < TILES; ++t) minimum[t] = (__m512)scales[t].minimum(g).parts[0];
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
                    for (int t = 0; t < TILES; ++t)
                        sums[r][t] = _mm512_fmadd_ps(minimum[t], _mm512_set1_ps(x[r * num_groups].sum), sums[r][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) store_lanes(out, is_bfloat16, (first_row + r) * stride + (first_tile + t) * TILE, lanes[t], sums[r][t]);
}

template <typename Type>
void QuantizedProduct::multiply_block(int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles) const {
    multiply_any<Type>(first_row, num_rows, first_tile, num_tiles);
}

}  // namespace

#endif
