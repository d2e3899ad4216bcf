// What is multiplied by quantized weights, and how much of it at once. Products are sums of integers, which every group of 32 columns (16 of
// Q6_K) adds to a row's result multiplied by its scale.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "quantized_rows.h"
#include "quantized_types.h"

namespace {

constexpr int64_t CHUNK_BYTES = 256 * 1024;  // of rows that stay in a core's cache while the weight passes by

// Bytes of the weight to ask for ahead of their use: those of the next tiles where a core's cache holds them besides the tiles at hand.
constexpr int64_t MOST_AHEAD = 320 * 1024, NEAR_AHEAD = 4096;

inline void fetch_lines(const void* first, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(first) + i, 0, 2);
}

#ifdef __AVX512VNNI__

// Rows of a block, which are multiplied at once: their sums of numbers and of integers with two tiles fill the registers.
constexpr int64_t BLOCK_ROWS = 6;
constexpr int64_t MOST_ROWS = 8;  // of a block, if there is only one: with one tile, but the weight passes by once
constexpr int64_t FEW_ROWS = 3;   // are done before the weight is read from memory, which goes fastest from its beginning to its end

constexpr int64_t num_blocks_for(int64_t num_rows) { return num_rows <= MOST_ROWS ? 1 : (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }

// The tiles that a block of so many rows is multiplied by at once.
constexpr int64_t tiles_for(int64_t block_rows) { return block_rows <= FEW_ROWS || block_rows > BLOCK_ROWS ? 1 : 2; }

#else

constexpr int64_t BLOCK_ROWS = 4;

constexpr int64_t num_blocks_for(int64_t) { return 1; }
constexpr int64_t tiles_for(int64_t) { return 1; }

#endif

// Weights that are read after a product: they are fetched from memory while the processor is busy with that.
struct Following {
    const char* start;
    int64_t bytes;
};

struct QuantizedProduct {
    void* out;         // results are `stride` apart from row to row
    const void* bias;  // null: none
    const uint8_t* blocks;
    const RowGroup* rows;
    int64_t num_groups, outputs, stride;
    bool is_bfloat16;
    int64_t pass = 0, num_passes = 1;  // of blocks of rows through the same tiles: each fetches its share of the tiles after them
    const char* following = nullptr;
    int64_t following_lines = 0;  // of 64 bytes, which are fetched for each group

    template <typename T>
    void store_as(int64_t row, int64_t tile, const float* sums, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const float start = bias ? to_float(static_cast<const T*>(bias)[tile * TILE + i]) : 0.0f;
            store(static_cast<T*>(out) + row * stride + tile * TILE + i, start + sums[i]);
        }
    }

    void fetch_following(int64_t group) const {
        for (int64_t i = 0; i < following_lines; ++i) __builtin_prefetch(following + 64 * (group * following_lines + i), 0, 2);
    }

    template <typename Type>
    void multiply_block(int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles) const;

#ifdef __AVX512VNNI__
    // The order of additions does not depend on ROWS or TILES, so neither does the result.
    template <typename Type, int ROWS, int TILES>
    void multiply(int64_t first_row, int64_t first_tile) const;

    template <typename Type, int ROWS>
    void multiply_tiles(int64_t first_row, int64_t first_tile, int64_t num_tiles) const {
        constexpr int TILES = tiles_for(ROWS);
        int64_t tile = first_tile;
        for (; tile + TILES <= first_tile + num_tiles; tile += TILES) multiply<Type, ROWS, TILES>(first_row, tile);
        for (; tile < first_tile + num_tiles; ++tile) multiply<Type, ROWS, 1>(first_row, tile);
    }

    template <typename Type, int ROWS = 1>
    void multiply_any(int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles) const {
        if constexpr (ROWS < MOST_ROWS)
            if (num_rows > ROWS) return multiply_any<Type, ROWS + 1>(first_row, num_rows, first_tile, num_tiles);
        multiply_tiles<Type, ROWS>(first_row, first_tile, num_tiles);
    }
#endif
};

}  // namespace

// A block of rows of a QuantizedProduct, by some tiles of a weight of this type. In products.cpp: code for each type and number of rows takes as long
// to compile as all the rest, beside which it is compiled.
extern "C" void penstock_multiply_block(const void* product, int64_t type, int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles);
