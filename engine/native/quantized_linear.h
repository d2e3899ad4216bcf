// A linear layer over weights of 4, 5 or 8 bits, for any number of rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "parallel.h"
#include "quantized_portable.h"
#include "quantized_product.h"
#include "quantized_rows.h"
#include "quantized_tiles.h"
#include "quantized_vnni.h"

namespace {

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
    parallel_for(num_rows, elementwise(num_groups * GROUP), quantize);
#ifdef PENSTOCK_TILES
    if (num_rows >= amx::use.quantized_rows) return multiply_quantized_by_tiles<BITS>(product, num_rows);
#endif
    // A task is a few tiles and as many rows as stay in a core's cache while the tiles of the weight pass by.
    const int64_t num_tiles = (outputs + TILE - 1) / TILE, width = tiles_for(num_rows), num_strips = (num_tiles + width - 1) / width;
    const int64_t chunk_rows = std::max<int64_t>(CHUNK_BYTES / (num_groups * sizeof(RowGroup)) / MOST_ROWS, 4) * MOST_ROWS;
    const int64_t num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
    const int64_t num_blocks = std::min(width, num_tiles) * num_groups;
    const double nanoseconds =
        std::max(reading(num_blocks * BLOCK_BYTES<BITS>), multiplying(num_blocks * TILE * GROUP * std::min(num_rows, chunk_rows)));
    parallel_for(num_chunks * num_strips, nanoseconds, [&](int64_t task) {
        const int64_t chunk = task / num_strips, first_tile = task % num_strips * width;
        const int64_t begin = num_rows * chunk / num_chunks, count = num_rows * (chunk + 1) / num_chunks - begin;
        const int64_t num_parts = (count + MOST_ROWS - 1) / MOST_ROWS;
        for (int64_t i = 0; i < num_parts; ++i) {
            const int64_t first = count * i / num_parts, last = count * (i + 1) / num_parts;
            product.template multiply_any<BITS>(begin + first, last - first, first_tile, std::min(width, num_tiles - first_tile));
        }
    });
}

// The function for weights of so many bits.
inline auto* quantized_linear_of(int64_t bits) { return bits == 8 ? &quantized_linear<8> : bits == 5 ? &quantized_linear<5> : &quantized_linear<4>; }

}  // namespace
