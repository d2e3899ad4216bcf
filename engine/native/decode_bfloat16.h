// Decoding with AVX-512's bfloat16 products, for head sizes that fill whole vectors and blocks of 16 keys: four times as fast as `decode.h`.

#pragma once

#ifdef __AVX512BF16__

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common.h"
#include "decode_part.h"
#include "vector.h"

namespace {

constexpr int64_t BLOCK = 16;
constexpr int64_t MAX_GROUP = 16;

// The sums of sixteen vectors, side by side.
inline __m512 sums_of(const __m512* vectors) {
    __m512 pairs[8], quads[4];
    for (int64_t i = 0; i < 8; ++i)
        pairs[i] = _mm512_unpacklo_ps(vectors[2 * i], vectors[2 * i + 1]) + _mm512_unpackhi_ps(vectors[2 * i], vectors[2 * i + 1]);
    for (int64_t i = 0; i < 4; ++i) {
        const __m512d even = _mm512_castps_pd(pairs[2 * i]), odd = _mm512_castps_pd(pairs[2 * i + 1]);
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(even, odd)) + _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd));
    }
    const __m512 low = _mm512_shuffle_f32x4(quads[0], quads[1], 0x88) + _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd);
    const __m512 high = _mm512_shuffle_f32x4(quads[2], quads[3], 0x88) + _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd);
    return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
}

// How far keys and values are taken in at a time: one correction of the sums and one round of exponentials for all of these.
constexpr int64_t CHUNK = 16;  // blocks

// Blocks lie anywhere in the cache, so the processor cannot foresee which comes next.
template <int64_t SIZE>
inline void fetch(const BFloat16* rows, int64_t stride) {
    for (int64_t i = 0; i < BLOCK; ++i)
        for (int64_t d = 0; d < SIZE; d += 32) _mm_prefetch(reinterpret_cast<const char*>(rows + i * stride + d), _MM_HINT_T0);
}

// One sequence, one KV head, all of its query heads, the keys from `first` to `last`, of those up to `end` that are next. What lies in their
// blocks beside them may be anything, NaN included.
template <int64_t SIZE>
void decode_part_bfloat16(const Part& part, const BFloat16* query, const BFloat16* key_cache, const BFloat16* value_cache, const int32_t* blocks,
                          int64_t first, int64_t last, int64_t end, int64_t kv_head, int64_t group, int64_t num_kv_heads, const Options& options) {
    constexpr int64_t HALVES = SIZE / 32, LANES = SIZE / 16;
    __m512 sums[MAX_GROUP][LANES];
    Vector totals[MAX_GROUP], scores[MAX_GROUP][CHUNK];
    float maxima[MAX_GROUP];
    alignas(64) int32_t weights[MAX_GROUP][CHUNK * BLOCK / 2];  // pairs of bfloat16
    for (int64_t g = 0; g < group; ++g) {
        for (int64_t c = 0; c < LANES; ++c) sums[g][c] = _mm512_setzero_ps();
        maxima[g] = HIDDEN;
        totals[g] = Vector{};
    }
    // Interleaves two rows of values, so that one product takes a pair of keys.
    alignas(64) int16_t low_half[32], high_half[32];
    for (int16_t i = 0; i < 16; ++i) {
        low_half[2 * i] = i, low_half[2 * i + 1] = 32 + i;
        high_half[2 * i] = 16 + i, high_half[2 * i + 1] = 48 + i;
    }
    const __m512i take_low = _mm512_load_si512(low_half), take_high = _mm512_load_si512(high_half);
    const bool is_capped = options.softcap > 0.0f;
    const float factor = (is_capped ? options.softcap : options.scaling) * LOG2_E;
    const int64_t stride = num_kv_heads * SIZE;
    const int64_t num_blocks = (last + BLOCK - 1) / BLOCK;
    const BFloat16* all_keys = key_cache + kv_head * SIZE;
    const BFloat16* all_values = value_cache + kv_head * SIZE;
    auto visible_in = [&](int64_t block) {
        const int64_t begin = std::max<int64_t>(first - block * BLOCK, 0), end = std::min(BLOCK, last - block * BLOCK);
        return static_cast<__mmask16>((0xffffu << begin) & (0xffffu >> (BLOCK - end)));
    };
    for (int64_t chunk = first / BLOCK; chunk < num_blocks; chunk += CHUNK) {
        const int64_t chunk_end = std::min(chunk + CHUNK, num_blocks);
        for (int64_t block = chunk; block < chunk_end; ++block) {
            if ((block + 1) * BLOCK < end) fetch<SIZE>(all_keys + int64_t{blocks[block + 1]} * BLOCK * stride, stride);
            fetch<SIZE>(all_values + int64_t{blocks[block]} * BLOCK * stride, stride);
            const __mmask16 visible = visible_in(block);
            const BFloat16* keys = all_keys + int64_t{blocks[block]} * BLOCK * stride;
            for (int64_t g = 0; g < group; ++g) {
                const BFloat16* row = query + (kv_head * group + g) * SIZE;
                __m512 products[BLOCK];
                for (int64_t i = 0; i < BLOCK; ++i) {
                    products[i] = _mm512_setzero_ps();
                    for (int64_t h = 0; h < HALVES; ++h)
                        products[i] = _mm512_dpbf16_ps(products[i], (__m512bh)_mm512_loadu_si512(row + 32 * h),
                                                       (__m512bh)_mm512_loadu_si512(keys + i * stride + 32 * h));
                }
                Vector row_scores = (Vector)sums_of(products);
                if (is_capped)
                    for (int64_t i = 0; i < BLOCK; ++i) row_scores[i] = std::tanh(row_scores[i] * options.scaling / options.softcap);
                scores[g][block - chunk] = (Vector)_mm512_mask_mov_ps(_mm512_set1_ps(HIDDEN), visible, (__m512)(row_scores * factor));
            }
        }
        for (int64_t g = 0; g < group; ++g) {
            Vector highest_lanes = scores[g][0];
            for (int64_t b = 1; b < chunk_end - chunk; ++b) highest_lanes = scores[g][b] > highest_lanes ? scores[g][b] : highest_lanes;
            const float highest = std::max(maxima[g], highest_of(highest_lanes));
            const Vector correction = power_of_two(Vector{} + (maxima[g] - highest));
            totals[g] *= correction;
            for (int64_t c = 0; c < LANES; ++c) sums[g][c] *= (__m512)correction;
            maxima[g] = highest;
            for (int64_t b = 0; b < chunk_end - chunk; ++b) {
                const Vector weight = (Vector)_mm512_maskz_mov_ps(visible_in(chunk + b), (__m512)power_of_two(scores[g][b] - highest));
                totals[g] += weight;
                convert(reinterpret_cast<BFloat16*>(weights[g]) + b * BLOCK, weight);
            }
        }
        for (int64_t block = chunk; block < chunk_end; ++block) {
            const __mmask16 visible = visible_in(block);
            const BFloat16* values = all_values + int64_t{blocks[block]} * BLOCK * stride;
            __m512bh pairs[BLOCK / 2][LANES];
            for (int64_t p = 0; p < BLOCK / 2; ++p) {
                const __mmask32 has_even = visible >> (2 * p) & 1 ? ~0u : 0u, has_odd = visible >> (2 * p + 1) & 1 ? ~0u : 0u;
                for (int64_t h = 0; h < HALVES; ++h) {
                    const __m512i even = _mm512_maskz_loadu_epi16(has_even, values + 2 * p * stride + 32 * h);
                    const __m512i odd = _mm512_maskz_loadu_epi16(has_odd, values + (2 * p + 1) * stride + 32 * h);
                    pairs[p][2 * h] = (__m512bh)_mm512_permutex2var_epi16(even, take_low, odd);
                    pairs[p][2 * h + 1] = (__m512bh)_mm512_permutex2var_epi16(even, take_high, odd);
                }
            }
            for (int64_t g = 0; g < group; ++g) {
                const int32_t* weight_pairs = weights[g] + (block - chunk) * BLOCK / 2;
                for (int64_t p = 0; p < BLOCK / 2; ++p) {
                    const __m512bh weight = (__m512bh)_mm512_set1_epi32(weight_pairs[p]);
                    for (int64_t c = 0; c < LANES; ++c) sums[g][c] = _mm512_dpbf16_ps(sums[g][c], weight, pairs[p][c]);
                }
            }
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        part.maxima[g] = maxima[g];
        part.totals[g] = _mm512_reduce_add_ps((__m512)totals[g]);
        for (int64_t c = 0; c < LANES; ++c) _mm512_storeu_ps(part.sums + g * SIZE + 16 * c, sums[g][c]);
    }
}

}  // namespace

#endif
