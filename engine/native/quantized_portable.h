// Products with quantized weights, a group of codes at a time: unpacked once, and multiplied by each row.

#pragma once

#ifndef __AVX512VNNI__

#include <algorithm>
#include <cstdint>

#include "quantized_block.h"
#include "quantized_product.h"
#include "vector.h"

namespace {

template <typename Type, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    using Scales = typename Type::Scales;
    const int64_t num_blocks = num_groups / Scales::GROUPS;
    for (int64_t tile = first_tile; tile < first_tile + TILES; ++tile) {
        const uint8_t* block = blocks + tile * num_blocks * Type::BLOCK_BYTES;
        const RowGroup* x = rows + first_row * num_groups;
        Vector sums[ROWS] = {};
        for (int64_t b = 0; b < num_blocks; ++b, block += Type::BLOCK_BYTES) {
            Scales scales;
            scales.read(block + Type::CODES);
            for (int64_t g = 0; g < Scales::GROUPS; ++g, ++x) {
                const UnpackedCodes<Type> codes(block + g * CODE_BYTES<Type::BITS>);
                for (int64_t part = 0; part < Scales::SCALES; ++part) {
                    const Vector scale = scales.scale(g, part);
#pragma GCC unroll 6
                    for (int r = 0; r < ROWS; ++r) {
                        const RowGroup& row = x[r * num_groups];
                        sums[r] = multiply_add(to_floats(codes.multiply(row, part)), rounded_product(scale, broadcast(row.scale)), sums[r]);
                    }
                }
                if constexpr (Scales::HAS_MINIMUMS) {
                    const Vector minimum = scales.minimum(g);
                    for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(minimum, broadcast(x[r * num_groups].sum), sums[r]);
                }
            }
        }
        const int64_t count = std::min(TILE, outputs - tile * TILE);
        for (int r = 0; r < ROWS; ++r) {
            float numbers[TILE];
            convert(numbers, sums[r]);
            if (is_bfloat16) {
                store_as<BFloat16>(first_row + r, tile, numbers, count);
            } else {
                store_as<float>(first_row + r, tile, numbers, count);
            }
        }
    }
}

}  // namespace

#endif
