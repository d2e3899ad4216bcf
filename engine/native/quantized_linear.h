// A linear layer over weights of 4 or 8 bits: products are sums of integers, and every group of 32 columns then counts by its scales.
//
// A tile is 16 rows of the weight, and a block one tile's group: codes [8, 16, 4], the upper half of 4-bit codes in the upper halves of the
// bytes, then 16 scales in half precision, and 16 minimums where codes have 4 bits. Codes of 8 bits are 128 more than what they stand for.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "quantized_rows.h"
#include "vector.h"

namespace {

constexpr int64_t TILE = 16;      // rows of the weight, one in each lane
constexpr int64_t MOST_ROWS = 6;  // at once: their sums and those of two tiles fill the registers
constexpr int64_t FEW_ROWS = 3;   // are done before the weight is read from memory, which goes fastest from its beginning to its end
constexpr int64_t ROWS_ALONE = 4;  // quantized sooner than a second thread wakes up
constexpr int64_t CHUNK_BYTES = 256 * 1024;
constexpr int64_t MOST_AHEAD = 64 * 1024;

template <int BITS>
constexpr int64_t CODE_BYTES = TILE * GROUP * BITS / 8;
template <int BITS>
constexpr int64_t BLOCK_BYTES = CODE_BYTES<BITS> + (BITS == 4 ? 4 : 2) * TILE;

struct QuantizedProduct {
    void* out;
    const void* bias;  // null: none
    const uint8_t* blocks;
    const RowGroup* rows;
    int64_t num_groups, outputs;
    bool is_bfloat16;

    template <typename T>
    void store_as(int64_t row, int64_t tile, const float* sums, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const float start = bias ? to_float(static_cast<const T*>(bias)[tile * TILE + i]) : 0.0f;
            store(static_cast<T*>(out) + row * outputs + tile * TILE + i, start + sums[i]);
        }
    }

    // The order of additions does not depend on ROWS or TILES, so neither does the result.
    template <int BITS, int ROWS, int TILES>
    void multiply(int64_t first_row, int64_t first_tile) const;

    template <int BITS, int ROWS>
    void multiply_tiles(int64_t first_row, int64_t first_tile, int64_t num_tiles) const {
        constexpr int TILES = ROWS <= FEW_ROWS ? 1 : 2;
        int64_t tile = first_tile;
        for (; tile + TILES <= first_tile + num_tiles; tile += TILES) multiply<BITS, ROWS, TILES>(first_row, tile);
        for (; tile < first_tile + num_tiles; ++tile) multiply<BITS, ROWS, 1>(first_row, tile);
    }

    template <int BITS>
    void multiply_any(int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles) const {
        switch (num_rows) {
            case 1: return multiply_tiles<BITS, 1>(first_row, first_tile, num_tiles);
            case 2: return multiply_tiles<BITS, 2>(first_row, first_tile, num_tiles);
            case 3: return multiply_tiles<BITS, 3>(first_row, first_tile, num_tiles);
            case 4: return multiply_tiles<BITS, 4>(first_row, first_tile, num_tiles);
            case 5: return multiply_tiles<BITS, 5>(first_row, first_tile, num_tiles);
            default: return multiply_tiles<BITS, MOST_ROWS>(first_row, first_tile, num_tiles);
        }
    }
};

#ifdef __AVX512VNNI__

inline __m512i four_codes(const int8_t* codes) {
    int32_t four;
    std::memcpy(&four, codes, sizeof(four));
    return _mm512_set1_epi32(four);
}

inline __m512 load_lanes(const void* from, bool is_bfloat16, int64_t index, __mmask16 lanes) {
    if (!is_bfloat16) return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(from) + index);
    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, static_cast<const BFloat16*>(from) + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

inline void store_lanes(void* to, bool is_bfloat16, int64_t index, __mmask16 lanes, __m512 sums) {
    if (is_bfloat16) {
        BFloat16 halves[TILE];
        convert(halves, (Vector)sums);
        _mm256_mask_storeu_epi16(static_cast<BFloat16*>(to) + index, lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
    } else {
        _mm512_mask_storeu_ps(static_cast<float*>(to) + index, lanes, sums);
    }
}

template <int BITS, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    const int64_t tile_bytes = num_groups * BLOCK_BYTES<BITS>;
    // What the next tiles need, or of long ones the next groups. The processor loses track of weights that several blocks of rows go through.
    const int64_t ahead = TILES * tile_bytes <= MOST_AHEAD ? TILES * tile_bytes : MOST_AHEAD / 8;
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
        for (int step = 0; step < BITS; ++step) {
            __m512i codes[TILES], upper[TILES];
            for (int t = 0; t < TILES; ++t) {
                codes[t] = _mm512_loadu_si512(block + t * tile_bytes + 64 * step);
                if constexpr (BITS == 4) {
                    upper[t] = _mm512_and_si512(_mm512_srli_epi16(codes[t], 4), lower_half);
                    codes[t] = _mm512_and_si512(codes[t], lower_half);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512i four = four_codes(x[r * num_groups].codes + 4 * step);
                for (int t = 0; t < TILES; ++t) dots[r][t] = _mm512_dpbusd_epi32(dots[r][t], codes[t], four);
            }
            if constexpr (BITS == 4) {
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
            if constexpr (BITS == 4) minimums[t] = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1));
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scale = _mm512_set1_ps(x[r * num_groups].scale);
            for (int t = 0; t < TILES; ++t) {
                sums[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[r][t]), _mm512_mul_ps(scales[t], scale), sums[r][t]);
                if constexpr (BITS == 4) sums[r][t] = _mm512_fmadd_ps(minimums[t], _mm512_set1_ps(x[r * num_groups].sum), sums[r][t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        for (int t = 0; t < TILES; ++t) store_lanes(out, is_bfloat16, (first_row + r) * outputs + (first_tile + t) * TILE, lanes[t], sums[r][t]);
}

#else

inline float half_to_float(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
    float result;
    if (exponent == 0) {
        result = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -result : result;
    }
    const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&result, &wide, sizeof(result));
    return result;
}

template <int BITS, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    for (int64_t tile = first_tile; tile < first_tile + TILES; ++tile) {
        float sums[ROWS][TILE] = {};
        for (int64_t g = 0; g < num_groups; ++g) {
            const uint8_t* block = blocks + (tile * num_groups + g) * BLOCK_BYTES<BITS>;
            uint8_t codes[TILE * GROUP];
            for (int64_t i = 0; i < CODE_BYTES<BITS>; ++i) {
                codes[i] = BITS == 4 ? block[i] & 15 : block[i];
                if constexpr (BITS == 4) codes[i + CODE_BYTES<BITS>] = block[i] >> 4;
            }
            uint16_t halves[2 * TILE];
            std::memcpy(halves, block + CODE_BYTES<BITS>, BLOCK_BYTES<BITS> - CODE_BYTES<BITS>);
            for (int r = 0; r < ROWS; ++r) {
                const RowGroup& x = rows[(first_row + r) * num_groups + g];
                int32_t dots[TILE];
                std::fill_n(dots, TILE, BITS == 8 ? x.offset : 0);
                for (int64_t step = 0; step < GROUP / 4; ++step)
                    for (int64_t o = 0; o < TILE; ++o)
                        for (int64_t i = 0; i < 4; ++i) dots[o] += codes[step * 64 + o * 4 + i] * x.codes[step * 4 + i];
                for (int64_t o = 0; o < TILE; ++o) {
                    sums[r][o] = std::fma(static_cast<float>(dots[o]), half_to_float(halves[o]) * x.scale, sums[r][o]);
                    if constexpr (BITS == 4) sums[r][o] = std::fma(half_to_float(halves[TILE + o]), x.sum, sums[r][o]);
                }
            }
        }
        const int64_t count = std::min(TILE, outputs - tile * TILE);
        for (int r = 0; r < ROWS; ++r) {
            if (is_bfloat16) {
                store_as<BFloat16>(first_row + r, tile, sums[r], count);
            } else {
                store_as<float>(first_row + r, tile, sums[r], count);
            }
        }
    }
}

#endif

template <int BITS, typename T>
void quantize_row(RowGroup* to, const T* x, int64_t num_groups) {
    for (int64_t g = 0; g < num_groups; ++g) quantize_group<BITS>(to + g, x + g * GROUP);
}

template <int BITS>
void quantized_linear(void* out, const void* x, const uint8_t* blocks, const void* bias, int64_t num_rows, int64_t num_groups, int64_t outputs,
                      bool is_bfloat16) {
    static thread_local std::vector<RowGroup> scratch;
    if (static_cast<int64_t>(scratch.size()) < num_rows * num_groups) scratch.resize(num_rows * num_groups);
    RowGroup* rows = scratch.data();
    const QuantizedProduct product{out, bias, blocks, rows, num_groups, outputs, is_bfloat16};
    auto quantize = [&](int64_t row) {
        if (is_bfloat16) {
            quantize_row<BITS>(rows + row * num_groups, static_cast<const BFloat16*>(x) + row * num_groups * GROUP, num_groups);
        } else {
            quantize_row<BITS>(rows + row * num_groups, static_cast<const float*>(x) + row * num_groups * GROUP, num_groups);
        }
    };
    if (num_rows <= ROWS_ALONE)
        for (int64_t row = 0; row < num_rows; ++row) quantize(row);
    // A task is a few tiles and as many rows as stay in a core's cache while the tiles of the weight pass by.
    const int64_t num_tiles = (outputs + TILE - 1) / TILE, width = num_rows <= FEW_ROWS ? 1 : 2, num_strips = (num_tiles + width - 1) / width;
    const int64_t chunk_rows = std::max<int64_t>(CHUNK_BYTES / (num_groups * sizeof(RowGroup)) / MOST_ROWS, 4) * MOST_ROWS;
    const int64_t num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
#pragma omp parallel
    {
        if (num_rows > ROWS_ALONE) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < num_rows; ++row) quantize(row);
        }
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < num_chunks * num_strips; ++task) {
            const int64_t chunk = task / num_strips, first_tile = task % num_strips * width;
            const int64_t begin = num_rows * chunk / num_chunks, count = num_rows * (chunk + 1) / num_chunks - begin;
            const int64_t num_parts = (count + MOST_ROWS - 1) / MOST_ROWS;
            for (int64_t i = 0; i < num_parts; ++i) {
                const int64_t first = count * i / num_parts, last = count * (i + 1) / num_parts;
                product.template multiply_any<BITS>(begin + first, last - first, first_tile, std::min(width, num_tiles - first_tile));
            }
        }
    }
}

}  // namespace
