// What is multiplied by weights of 4, 5 or 8 bits, and how much of it at once. Products are sums of integers, and every group of 32 columns then
// counts by its scales.
//
// A tile is 16 rows of the weight, and a block one tile's group: codes [8, 16, 4], then 16 scales in half precision, and 16 minimums unless
// codes have 8 bits, which are 128 more than what they stand for. Of 4 bits, the second half of the codes is in the upper halves of the bytes;
// of 5, the fifth bits of all codes follow in their order.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "quantized_rows.h"

namespace {

constexpr int64_t TILE = 16;     // rows of the weight, one in each lane
constexpr int64_t MOST_ROWS = 6;  // at once: their sums and those of two tiles fill the registers
constexpr int64_t CHUNK_BYTES = 256 * 1024;  // of rows that stay in a core's cache while the weight passes by
constexpr int64_t FEW_ROWS = 3;   // are done before the weight is read from memory, which goes fastest from its beginning to its end

// The tiles that so many rows are multiplied by at once.
constexpr int64_t tiles_for(int64_t num_rows) { return num_rows <= FEW_ROWS ? 1 : 2; }

template <int BITS>
constexpr int64_t CODE_BYTES = TILE * GROUP * BITS / 8;
template <int BITS>
constexpr int64_t BLOCK_BYTES = CODE_BYTES<BITS> + (BITS == 8 ? 2 : 4) * TILE;
constexpr int64_t HALF_BYTES = TILE * GROUP / 2;  // of codes in halves of bytes
template <int BITS>
constexpr int64_t CODE_ROWS = BITS == 8 ? 8 : 4;  // of 64 bytes, the fifth bits apart

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
        constexpr int TILES = tiles_for(ROWS);
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

}  // namespace
