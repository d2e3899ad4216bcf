// Products with weights of 4 or 8 bits on any processor, in vectors of 16-bit integers that the compiler maps to what there is.

#pragma once

#ifndef __AVX512VNNI__

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "quantized_product.h"

namespace {

typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));
typedef int64_t Longs __attribute__((vector_size(32)));

constexpr int64_t STEPS = 8;     // of four columns each
constexpr int64_t QUARTERS = 4;  // of a tile

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

// As many codes as fit 64 lanes in each of 8 steps. Those of 8 bits lose the 128 that they are more than what they stand for.
template <int BITS>
void unpack_codes(int16_t* __restrict to, const uint8_t* __restrict block) {
    for (int64_t i = 0; i < CODE_BYTES<BITS>; ++i) {
        to[i] = static_cast<int16_t>(BITS == 4 ? block[i] & 15 : block[i] - 128);
        if constexpr (BITS == 4) to[i + CODE_BYTES<BITS>] = block[i] >> 4;
    }
}

// For each row of a tile the sum of its products with the group.
template <int BITS>
void multiply_group(int32_t* dots, const Shorts (&codes)[STEPS][QUARTERS], const RowGroup& x) {
    Shorts sums[QUARTERS] = {};
    Ints pairs[QUARTERS] = {};
    for (int64_t step = 0; step < STEPS; ++step) {
        int16_t four[4];
        for (int64_t i = 0; i < 4; ++i) four[i] = x.codes[4 * step + i];
        int64_t pattern;
        std::memcpy(&pattern, four, sizeof(pattern));
        const Shorts repeated = (Shorts)(Longs{} + pattern);
        for (int64_t q = 0; q < QUARTERS; ++q) sums[q] += codes[step][q] * repeated;
        // Sixteen bits hold eight products of 15 and 127, but only two of 128 and 127.
        if (step % (BITS == 4 ? STEPS : 2) != (BITS == 4 ? STEPS : 2) - 1) continue;
        for (int64_t q = 0; q < QUARTERS; ++q) {
            const Ints both = (Ints)sums[q];
            pairs[q] += ((both << 16) >> 16) + (both >> 16);
            sums[q] = Shorts{};
        }
    }
    int32_t halves[2 * TILE];
    std::memcpy(halves, pairs, sizeof(halves));
    for (int64_t o = 0; o < TILE; ++o) dots[o] = halves[2 * o] + halves[2 * o + 1];
}

template <int BITS, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    for (int64_t tile = first_tile; tile < first_tile + TILES; ++tile) {
        float sums[ROWS][TILE] = {};
        for (int64_t g = 0; g < num_groups; ++g) {
            const uint8_t* block = blocks + (tile * num_groups + g) * BLOCK_BYTES<BITS>;
            Shorts codes[STEPS][QUARTERS];
            unpack_codes<BITS>(reinterpret_cast<int16_t*>(codes), block);
            uint16_t halves[2 * TILE];
            std::memcpy(halves, block + CODE_BYTES<BITS>, BLOCK_BYTES<BITS> - CODE_BYTES<BITS>);
            float scales[TILE], minimums[TILE];
            for (int64_t o = 0; o < TILE; ++o) {
                scales[o] = half_to_float(halves[o]);
                if constexpr (BITS == 4) minimums[o] = half_to_float(halves[TILE + o]);
            }
            for (int r = 0; r < ROWS; ++r) {
                const RowGroup& x = rows[(first_row + r) * num_groups + g];
                int32_t dots[TILE];
                multiply_group<BITS>(dots, codes, x);
                for (int64_t o = 0; o < TILE; ++o) {
                    sums[r][o] = std::fma(static_cast<float>(dots[o]), scales[o] * x.scale, sums[r][o]);
                    if constexpr (BITS == 4) sums[r][o] = std::fma(minimums[o], x.sum, sums[r][o]);
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
