// A linear layer over quantized weights, for any number of rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "parallel.h"
#include "quantized_product.h"
#include "quantized_rows.h"
#include "quantized_tiles.h"
#include "quantized_types.h"

namespace {

// Some of a layer's outputs, whose weights are of one type.
struct QuantizedPart {
    const uint8_t* blocks;
    int64_t type, outputs;
};

// What one task computes some strips of: a few tiles of a part.
struct Strips {
    QuantizedProduct product;
    int64_t type;
    int64_t end;  // of this part's strips and all before
#ifdef PENSTOCK_TILES
    void (*multiply_by_tiles)(const QuantizedProduct&, int64_t);
#endif
};

inline Strips strips_of(const QuantizedProduct& product, int64_t type, int64_t end) {
#ifdef PENSTOCK_TILES
    return {product, type, end, with_type(type, [](auto kind) { return &multiply_by_tiles<decltype(kind)>; })};
#else
    return {product, type, end};
#endif
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

// The product of some rows with a weight, taken apart into tasks: a strip and as many rows as stay in a core's cache while the strips of the weight
// pass by.
class ProductTasks {
  public:
    // out [num_rows, all parts' outputs] and bias, which may be null, are contiguous and of one type.
    ProductTasks(void* out, const RowGroup* rows, const QuantizedPart* parts, int64_t num_parts, const void* bias, int64_t num_rows,
                 int64_t num_groups, bool is_bfloat16)
        : num_rows_(num_rows), width_(tiles_for(num_rows / num_blocks_for(num_rows))) {
        const int64_t number_bytes = is_bfloat16 ? sizeof(BFloat16) : sizeof(float);
        int64_t outputs = 0, weight_bytes = 0;
        for (int64_t p = 0; p < num_parts; ++p) outputs += parts[p].outputs;
        for (int64_t p = 0, first = 0; p < num_parts; first += parts[p++].outputs) {
            const int64_t num_tiles = (parts[p].outputs + TILE - 1) / TILE;
            const void* part_bias = bias ? static_cast<const char*>(bias) + first * number_bytes : nullptr;
            num_strips_ += (num_tiles + width_ - 1) / width_;
            weight_bytes += num_tiles * num_groups * group_bytes(parts[p].type);
            const QuantizedProduct product{static_cast<char*>(out) + first * number_bytes, part_bias, parts[p].blocks, rows, num_groups,
                                           parts[p].outputs, outputs, is_bfloat16};
            parts_.push_back(strips_of(product, parts[p].type, num_strips_));
        }
        const int64_t chunk_rows = std::max<int64_t>(CHUNK_BYTES / (num_groups * sizeof(RowGroup)) / BLOCK_ROWS, 4) * BLOCK_ROWS;
        num_chunks_ = (num_rows + chunk_rows - 1) / chunk_rows;
        nanoseconds_ = std::max(reading(weight_bytes / num_strips_),
                                multiplying(outputs * num_groups * GROUP / num_strips_ * std::min(num_rows, chunk_rows)));
    }

    int64_t count() const { return num_chunks_ * num_strips_; }

    // Of one task.
    double nanoseconds() const { return nanoseconds_; }

    // Computes the whole product, in place of the tasks, if tiles pay for so many rows; returns whether they do.
    bool run_by_tiles() const {
#ifdef PENSTOCK_TILES
        if (num_rows_ < amx::use.quantized_rows) return false;
        for (const Strips& part : parts_) part.multiply_by_tiles(part.product, num_rows_);
        return true;
#else
        return false;
#endif
    }

    void run(int64_t task, const std::vector<Following>& following = {}) const {
        const int64_t chunk = task / num_strips_, strip = task % num_strips_;
        const Strips* part = parts_.data();
        while (strip >= part->end) ++part;
        const int64_t first_tile = (strip - (part == parts_.data() ? 0 : part[-1].end)) * width_;
        const int64_t num_tiles = std::min(width_, (part->product.outputs + TILE - 1) / TILE - first_tile);
        const int64_t begin = num_rows_ * chunk / num_chunks_, count = num_rows_ * (chunk + 1) / num_chunks_ - begin;
        const int64_t num_blocks = num_blocks_for(count);
        for (int64_t i = 0; i < num_blocks; ++i) {
            const int64_t first = count * i / num_blocks, last = count * (i + 1) / num_blocks;
            QuantizedProduct product = part->product;
            product.pass = i;
            product.num_passes = num_blocks;
            if (!following.empty()) fetch(product, following, task * num_blocks + i, this->count() * num_blocks);
            penstock_multiply_block(&product, part->type, begin + first, last - first, first_tile, num_tiles);
        }
    }

  private:
    int64_t num_rows_, width_, num_strips_ = 0, num_chunks_ = 0;
    double nanoseconds_ = 0;
    std::vector<Strips> parts_;
};

// out [num_rows, all parts' outputs], x [num_rows, 32 num_groups] and bias, which may be null, are contiguous and of one type. `following` is
// read after the product.
inline void quantized_linear(void* out, const void* x, const QuantizedPart* parts, int64_t num_parts, const void* bias, int64_t num_rows,
                             int64_t num_groups, bool is_bfloat16, const std::vector<Following>& following = {}) {
    const RowGroup* rows = quantized(x, num_rows, num_groups, is_bfloat16);
    const ProductTasks tasks(out, rows, parts, num_parts, bias, num_rows, num_groups, is_bfloat16);
    if (tasks.run_by_tiles()) return;
    parallel_for(tasks.count(), tasks.nanoseconds(), [&](int64_t task) { tasks.run(task, following); });
}

// The same with a weight for each group of rows: those from starts[g] to starts[g + 1] are multiplied by weight g. Blocks of a part lie
// `strides` bytes after those of the weight before, and biases side by side. One loop computes all groups: where each has few rows, one for each
// would mostly be waiting.
inline void grouped_linear(void* out, const void* x, const QuantizedPart* parts, const int64_t* strides, int64_t num_parts, const void* bias,
                           const int64_t* starts, int64_t num_weights, int64_t num_groups, bool is_bfloat16) {
    const int64_t number_bytes = is_bfloat16 ? sizeof(BFloat16) : sizeof(float);
    int64_t outputs = 0;
    for (int64_t p = 0; p < num_parts; ++p) outputs += parts[p].outputs;
    const RowGroup* rows = quantized(x, starts[num_weights], num_groups, is_bfloat16);
    std::vector<QuantizedPart> own(parts, parts + num_parts);
    std::vector<ProductTasks> products;
    std::vector<int64_t> ends;  // of each product's tasks and all before
    int64_t num_tasks = 0;
    double nanoseconds = 0;
    for (int64_t w = 0; w < num_weights; ++w) {
        const int64_t num_rows = starts[w + 1] - starts[w];
        if (num_rows == 0) continue;
        for (int64_t p = 0; p < num_parts; ++p) own[p].blocks = parts[p].blocks + w * strides[p];
        const ProductTasks tasks(static_cast<char*>(out) + starts[w] * outputs * number_bytes, rows + starts[w] * num_groups, own.data(), num_parts,
                                 bias ? static_cast<const char*>(bias) + w * outputs * number_bytes : nullptr, num_rows, num_groups, is_bfloat16);
        if (tasks.run_by_tiles()) continue;
        num_tasks += tasks.count();
        nanoseconds += tasks.count() * tasks.nanoseconds();
        products.push_back(tasks);
        ends.push_back(num_tasks);
    }
    parallel_for<UNEQUAL>(num_tasks, nanoseconds / std::max<int64_t>(num_tasks, 1), [&](int64_t task) {
        const int64_t place = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
        products[place].run(task - (place ? ends[place - 1] : 0));
    });
}

}  // namespace
