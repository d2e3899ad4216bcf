// Single rows of a weight of 4, 5 or 8 bits, as numbers: what an embedding looks up.

#pragma once

#include <cstdint>
#include <cstring>

#include "common.h"
#include "parallel.h"
#include "quantized_product.h"

namespace {

inline float half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, sizeof(half));
    return half_to_float(half);
}

// out [num_groups * GROUP] is row `row` of the weight that the blocks hold.
template <int BITS>
void quantized_row(float* out, const uint8_t* blocks, int64_t row, int64_t num_groups) {
    const uint8_t* block = blocks + row / TILE * num_groups * BLOCK_BYTES<BITS>;
    const int64_t lane = row % TILE;
    for (int64_t g = 0; g < num_groups; ++g, block += BLOCK_BYTES<BITS>) {
        const uint8_t* numbers = block + CODE_BYTES<BITS> + 2 * lane;
        const float scale = half_at(numbers), minimum = BITS == 8 ? -128.0f * scale : half_at(numbers + 2 * TILE);
        for (int64_t i = 0; i < GROUP; ++i) {
            // Four columns of each of the tile's rows, eight times; of less than 8 bits, the last four times in the upper halves.
            const int64_t index = i / 4 * 4 * TILE + lane * 4 + i % 4;
            const uint8_t byte = block[BITS == 8 ? index : index % HALF_BYTES];
            int32_t code = BITS == 8 ? byte : index < HALF_BYTES ? byte & 15 : byte >> 4;
            if constexpr (BITS == 5) code += (block[HALF_BYTES + index / 8] >> index % 8 & 1) * 16;
            out[g * GROUP + i] = scale * static_cast<float>(code) + minimum;
        }
    }
}

template <int BITS>
void quantized_rows(float* out, const uint8_t* blocks, const int64_t* rows, int64_t num_rows, int64_t num_groups) {
    parallel_for(num_rows, 1.0 * num_groups * GROUP, [&](int64_t i) { quantized_row<BITS>(out + i * num_groups * GROUP, blocks, rows[i], num_groups); });
}

}  // namespace
