// Products with weights of 4, 5 or 8 bits, a block of codes at a time: unpacked once, and multiplied by each row.

#pragma once

#ifndef __AVX512VNNI__

#include <algorithm>
#include <cstdint>

#include "quantized_block.h"
#include "quantized_product.h"
#include "vector.h"

namespace {

template <int BITS, int ROWS, int TILES>
void QuantizedProduct::multiply(int64_t first_row, int64_t first_tile) const {
    for (int64_t tile = first_tile; tile < first_tile + TILES; ++tile) {
        Vector sums[ROWS] = {};
        for (int64_t g = 0; g < num_groups; ++g) {
            const uint8_t* block = blocks + (tile * num_groups + g) * BLOCK_BYTES<BITS>;
            const UnpackedBlock<BITS> codes(block);
            const Vector scales = load_halves(block + CODE_BYTES<BITS>);
            const Vector minimums = BITS != 8 ? load_halves(block + CODE_BYTES<BITS> + 2 * TILE) : Vector{};
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                const RowGroup& x = rows[(first_row + r) * num_groups + g];
                sums[r] = multiply_add(to_floats(codes.multiply(x)), scales * x.scale, sums[r]);
                if constexpr (BITS != 8) sums[r] = multiply_add(minimums, broadcast(x.sum), sums[r]);
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
