// A linear layer over quantized weights, for any number of rows.

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
#include "quantized_types.h"
#include "quantized_vnni.h"

namespace {

// Some of a layer's outputs, whose weights are of one type.
struct QuantizedPart {
    const uint8_t* blocks;
    int64_t type, outputs;
};

// What one task computes some strips of: a few tiles of a part.
struct Strips {
    QuantizedProduct product;
    decltype(&QuantizedProduct::multiply_any<Q8_0>) multiply;
    int64_t end;  // of this part's strips and all before
#ifdef PENSTOCK_TILES
    void (*multiply_by_tiles)(const QuantizedProduct&, int64_t);
#endif
};

inline Strips strips_of(const QuantizedProduct& product, int64_t type, int64_t end) {
    return with_type(type, [&](auto kind) -> Strips {
        using Type = decltype(kind);
#ifdef PENSTOCK_TILES
        return {product, &QuantizedProduct::multiply_any<Type>, end, &multiply_by_tiles<Type>};
#else
        return {product, &QuantizedProduct::multiply_any<Type>, end};
#endif
    });
}

template <typename T>
void quantize_row(RowGroup* to, const T* x, int64_t num_groups) {
    for (int64_t g = 0; g < num_groups; ++g) quantize_group(to + g, x + g * GROUP);
}

// Of a tile's weights, with their share of the block's scales.
inline int64_t group_bytes(int64_t type) {
    return with_type(type, [](auto kind) { return decltype(kind)::BLOCK_BYTES / decltype(kind)::Scales::GROUPS; });
}

// The rows as bytes, until the thread's next call.
inline const RowGroup* quantized(const void* x, int64_t num_rows, int64_t num_groups, bool is_bfloat16) {
    static thread_local std::vector<RowGroup> scratch;
    if (static_cast<int64_t>(scratch.size()) < num_rows * num_groups) scratch.resize(num_rows * num_groups);
    RowGroup* rows = scratch.data();
    parallel_for(num_rows, elementwise(num_groups * GROUP), [&](int64_t row) {
        if (is_bfloat16) {
            quantize_row(rows + row * num_groups, static_cast<const BFloat16*>(x) + row * num_groups * GROUP, num_groups);
        } else {
            quantize_row(rows + row * num_groups, static_cast<const float*>(x) + row * num_groups * GROUP, num_groups);
        }
    });
    return rows;
}

// Has one of so many products fetch its share of what follows.
inline void fetch(QuantizedProduct& product, const std::vector<Following>& following, int64_t index, int64_t num_products) {
    const int64_t place = index * static_cast<int64_t>(following.size());
    const Following& all = following[place / num_products];
    const int64_t lines = (all.bytes + 63) / 64, shares = (num_products + following.size() - 1) / following.size();
    const int64_t share = place % num_products / static_cast<int64_t>(following.size());
    product.following = all.start + 64 * (lines * share / shares);
    product.following_lines = (lines / shares + product.num_groups - 1) / product.num_groups;
}

// out [num_rows, all parts' outputs], x [num_rows, 32 num_groups] and bias, which may be null, are contiguous and of one type. `following` is
// read after the product.
inline void quantized_linear(void* out, const void* x, const QuantizedPart* parts, int64_t num_parts, const void* bias, int64_t num_rows,
                             int64_t num_groups, bool is_bfloat16, const std::vector<Following>& following = {}) {
    const RowGroup* rows = quantized(x, num_rows, num_groups, is_bfloat16);
    const int64_t width = tiles_for(num_rows / num_blocks_for(num_rows)), number_bytes = is_bfloat16 ? sizeof(BFloat16) : sizeof(float);
    int64_t outputs = 0, num_strips = 0;
    int64_t weight_bytes = 0;
    std::vector<Strips> all;
    for (int64_t p = 0; p < num_parts; ++p) outputs += parts[p].outputs;
    for (int64_t p = 0, first = 0; p < num_parts; first += parts[p++].outputs) {
        const int64_t num_tiles = (parts[p].outputs + TILE - 1) / TILE;
        const void* part_bias = bias ? static_cast<const char*>(bias) + first * number_bytes : nullptr;
        num_strips += (num_tiles + width - 1) / width;
        weight_bytes += num_tiles * num_groups * group_bytes(parts[p].type);
        const QuantizedProduct product{static_cast<char*>(out) + first * number_bytes, part_bias, parts[p].blocks, rows, num_groups,
                                       parts[p].outputs, outputs, is_bfloat16};
        all.push_back(strips_of(product, parts[p].type, num_strips));
    }
#ifdef PENSTOCK_TILES
    if (num_rows >= amx::use.quantized_rows) {
        for (const Strips& part : all) part.multiply_by_tiles(part.product, num_rows);
        return;
    }
#endif
    // A task is a strip and as many rows as stay in a core's cache while the strips of the weight pass by.
    const int64_t chunk_rows = std::max<int64_t>(CHUNK_BYTES / (num_groups * sizeof(RowGroup)) / BLOCK_ROWS, 4) * BLOCK_ROWS;
    const int64_t num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
    const double nanoseconds =
        std::max(reading(weight_bytes / num_strips), multiplying(outputs * num_groups * GROUP / num_strips * std::min(num_rows, chunk_rows)));
    parallel_for(num_chunks * num_strips, nanoseconds, [&](int64_t task) {
        const int64_t chunk = task / num_strips, strip = task % num_strips;
        const Strips* part = all.data();
        while (strip >= part->end) ++part;
        const int64_t first_tile = (strip - (part == all.data() ? 0 : part[-1].end)) * width;
        const int64_t num_tiles = std::min(width, (part->product.outputs + TILE - 1) / TILE - first_tile);
        const int64_t begin = num_rows * chunk / num_chunks, count = num_rows * (chunk + 1) / num_chunks - begin;
        const int64_t num_blocks = num_blocks_for(count);
        for (int64_t i = 0; i < num_blocks; ++i) {
            const int64_t first = count * i / num_blocks, last = count * (i + 1) / num_blocks;
            QuantizedProduct product = part->product;
            product.pass = i;
            product.num_passes = num_blocks;
            if (!following.empty()) fetch(product, following, task * num_blocks + i, num_chunks * num_strips * num_blocks);
            (product.*part->multiply)(begin + first, last - first, first_tile, num_tiles);
        }
    });
}

// The same with a weight for each group of rows: those from starts[g] to starts[g + 1] are multiplied by weight g. Blocks of a part lie
// `strides` bytes after those of the weight before, and biases side by side.
inline void grouped_linear(void* out, const void* x, const QuantizedPart* parts, const int64_t* strides, int64_t num_parts, const void* bias,
                           const int64_t* starts, int64_t num_weights, int64_t num_groups, bool is_bfloat16) {
    const int64_t number_bytes = is_bfloat16 ? sizeof(BFloat16) : sizeof(float);
    int64_t outputs = 0;
    for (int64_t p = 0; p < num_parts; ++p) outputs += parts[p].outputs;
    std::vector<QuantizedPart> own(parts, parts + num_parts);
    for (int64_t w = 0; w < num_weights; ++w) {
        const int64_t num_rows = starts[w + 1] - starts[w];
        if (num_rows == 0) continue;
        for (int64_t p = 0; p < num_parts; ++p) own[p].blocks = parts[p].blocks + w * strides[p];
        quantized_linear(static_cast<char*>(out) + starts[w] * outputs * number_bytes,
                         static_cast<const char*>(x) + starts[w] * num_groups * GROUP * number_bytes, own.data(), num_parts,
                         bias ? static_cast<const char*>(bias) + w * outputs * number_bytes : nullptr, num_rows, num_groups, is_bfloat16);
    }
}

}  // namespace
