// Products with weights of 4 or 8 bits on any processor, in vectors that the compiler maps to what there is.

#pragma once

#ifndef __AVX512VNNI__

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "quantized_avx2.h"
#include "quantized_product.h"

namespace {

inline void halves_to_floats(float* to, const uint8_t* from) {
#ifdef __F16C__
    for (int64_t o = 0; o < TILE; o += 8) _mm256_storeu_ps(to + o, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * o))));
#else
    uint16_t halves[TILE];
    std::memcpy(halves, from, sizeof(halves));
    for (int64_t o = 0; o < TILE; ++o) to[o] = half_to_float(halves[o]);
#endif
}

// Of two roundings where there is no instruction that does with one, which is as good as long as it is the same for every number of rows.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

#ifndef __AVX2__

typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int64_t Longs __attribute__((vector_size(16)));

template <int BITS>
struct UnpackedBlock {
    static constexpr int64_t STEPS = 8, EIGHTHS = 8;
    static constexpr int64_t STEPS_TO_SUM = BITS == 4 ? 8 : 2;  // sixteen bits hold as many pairs of products: of 15, or of 128, and 127

    Shorts codes[STEPS][EIGHTHS];  // those of 8 bits without the 128 that they are more than what they stand for

    explicit UnpackedBlock(const uint8_t* block) {
        int16_t unpacked[STEPS * EIGHTHS * 8];
        for (int64_t i = 0; i < CODE_BYTES<BITS>; ++i) {
            unpacked[i] = static_cast<int16_t>(BITS == 4 ? block[i] & 15 : block[i] - 128);
            if constexpr (BITS == 4) unpacked[i + CODE_BYTES<BITS>] = block[i] >> 4;
        }
        std::memcpy(codes, unpacked, sizeof(codes));
    }

    // For each row of the tile the sum of its products with the group.
    void multiply(int32_t* dots, const RowGroup& x) const {
        Shorts sums[EIGHTHS] = {};
        Ints pairs[EIGHTHS] = {};
        for (int64_t step = 0; step < STEPS; ++step) {
            int16_t four[4];
            for (int64_t i = 0; i < 4; ++i) four[i] = x.codes[4 * step + i];
            int64_t pattern;
            std::memcpy(&pattern, four, sizeof(pattern));
            for (int64_t e = 0; e < EIGHTHS; ++e) sums[e] += codes[step][e] * (Shorts)(Longs{} + pattern);
            if (step % STEPS_TO_SUM != STEPS_TO_SUM - 1) continue;
            for (int64_t e = 0; e < EIGHTHS; ++e) {
                const Ints both = (Ints)sums[e];
                pairs[e] += ((both << 16) >> 16) + (both >> 16);
                sums[e] = Shorts{};
            }
        }
        int32_t halves[2 * TILE];
        std::memcpy(halves, pairs, sizeof(halves));
        for (int64_t o = 0; o < TILE; ++o) dots[o] = halves[2 * o] + halves[2 * o + 1];
    }
};

#endif

template <int BITS, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    for (int64_t tile = first_tile; tile < first_tile + TILES; ++tile) {
        float sums[ROWS][TILE] = {};
        for (int64_t g = 0; g < num_groups; ++g) {
            const uint8_t* block = blocks + (tile * num_groups + g) * BLOCK_BYTES<BITS>;
            const UnpackedBlock<BITS> codes(block);
            float scales[TILE], minimums[TILE];
            halves_to_floats(scales, block + CODE_BYTES<BITS>);
            if constexpr (BITS == 4) halves_to_floats(minimums, block + CODE_BYTES<BITS> + 2 * TILE);
            for (int r = 0; r < ROWS; ++r) {
                const RowGroup& x = rows[(first_row + r) * num_groups + g];
                int32_t dots[TILE];
                codes.multiply(dots, x);
                for (int64_t o = 0; o < TILE; ++o) {
                    sums[r][o] = multiply_add(static_cast<float>(dots[o]), scales[o] * x.scale, sums[r][o]);
                    if constexpr (BITS == 4) sums[r][o] = multiply_add(minimums[o], x.sum, sums[r][o]);
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

}  // namespace

#endif
