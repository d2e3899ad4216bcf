// Decoding in bfloat16 in whole vectors, for head sizes that fill them and blocks of 16 keys: four times as fast as `decode.h`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common.h"
#include "decode_part.h"
#include "pack.h"
#include "tile.h"
#include "vector.h"

namespace {

constexpr int64_t BLOCK = LANES;
constexpr int64_t MAX_GROUP = 16;

// How far keys and values are taken in at a time: one correction of the sums and one round of exponentials for all of these.
constexpr int64_t CHUNK = 16;  // blocks

// How many blocks ahead keys are fetched. Blocks lie anywhere in the cache, so the processor cannot foresee which comes next.
constexpr int64_t AHEAD = 2;

// Row i of a block and every `step`-th after it. A core has only so many reads of memory under way, and what it computes with next waits
// behind those: a whole block's at once take 1.3 times as long as one head's share at a time.
template <int64_t SIZE>
inline void fetch(const BFloat16* rows, int64_t stride, int64_t i, int64_t step) {
    for (; i < BLOCK; i += step)
        for (int64_t d = 0; d < SIZE; d += 32) __builtin_prefetch(rows + i * stride + d);
}

// Rows as their products are taken: those in the cache or, where float32 is multiplied, copies.
#ifdef PENSTOCK_BFLOAT16_PRODUCTS
template <int64_t SIZE>
struct FactorRows {
    const BFloat16* rows;
    int64_t stride;

    FactorRows(const BFloat16* rows, int64_t stride, int64_t) : rows(rows), stride(stride) {}

    const BFloat16* operator[](int64_t i) const { return rows + i * stride; }
};

template <int64_t SIZE>
inline Vector products(const BFloat16* a, const BFloat16* b) {
    Vector sums{};
    for (int64_t d = 0; d < SIZE; d += 2 * LANES) sums = add_products(sums, load_pairs(a + d), load_pairs(b + d));
    return sums;
}
#else
template <int64_t SIZE>
struct FactorRows {
    float rows[BLOCK][SIZE];

    FactorRows(const BFloat16* from, int64_t stride, int64_t count) {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t d = 0; d < SIZE; d += LANES) convert(rows[i] + d, load(from + i * stride + d));
    }

    const float* operator[](int64_t i) const { return rows[i]; }
};

template <int64_t SIZE>
inline Vector products(const float* a, const float* b) {
    Vector sums{};
    for (int64_t d = 0; d < SIZE; d += LANES) sums = multiply_add(load(a + d), load(b + d), sums);
    return sums;
}
#endif

// One sequence, one KV head, all of its query heads, the keys from `first` to `last`, of those up to `end` that are next. What lies in their
// blocks beside them may be anything, NaN included.
template <int64_t SIZE>
void decode_part_bfloat16(const Part& part, const BFloat16* query, const BFloat16* key_cache, const BFloat16* value_cache, const int32_t* blocks,
                          int64_t first, int64_t last, int64_t end, int64_t kv_head, int64_t group, int64_t num_kv_heads, const Options& options) {
    constexpr int64_t VECTORS_OF_ROW = SIZE / LANES;
    Vector sums[MAX_GROUP][1][VECTORS_OF_ROW];
    Vector totals[MAX_GROUP], scores[MAX_GROUP][CHUNK];
    float maxima[MAX_GROUP];
    alignas(64) Factor weights[MAX_GROUP][CHUNK * BLOCK];
    alignas(64) Factor packed_values[BLOCK * SIZE];
    for (int64_t g = 0; g < group; ++g) {
        for (int64_t c = 0; c < VECTORS_OF_ROW; ++c) sums[g][0][c] = Vector{};
        maxima[g] = HIDDEN;
        totals[g] = Vector{};
    }
    const FactorRows<SIZE> queries(query + kv_head * group * SIZE, SIZE, group);
    const bool is_capped = options.softcap > 0.0f;
    const float factor = (is_capped ? options.softcap : options.scaling) * LOG2_E;
    const int64_t stride = num_kv_heads * SIZE;
    const int64_t num_blocks = (last + BLOCK - 1) / BLOCK;
    const BFloat16* all_keys = key_cache + kv_head * SIZE;
    const BFloat16* all_values = value_cache + kv_head * SIZE;
    Mask visible[CHUNK];
    for (int64_t chunk = first / BLOCK; chunk < num_blocks; chunk += CHUNK) {
        const int64_t chunk_end = std::min(chunk + CHUNK, num_blocks);
        for (int64_t block = chunk; block < chunk_end; ++block) {
            const BFloat16* next_keys = (block + AHEAD) * BLOCK < end ? all_keys + int64_t{blocks[block + AHEAD]} * BLOCK * stride : nullptr;
            const BFloat16* values = all_values + int64_t{blocks[block]} * BLOCK * stride;
            visible[block - chunk] = lanes_between(first - block * BLOCK, last - block * BLOCK);
            const FactorRows<SIZE> keys(all_keys + int64_t{blocks[block]} * BLOCK * stride, stride, BLOCK);
            for (int64_t g = 0; g < group; ++g) {
                fetch<SIZE>(values, stride, g, group);
                if (next_keys != nullptr) fetch<SIZE>(next_keys, stride, g, group);
                Vector row_products[BLOCK];
                for (int64_t i = 0; i < BLOCK; ++i) row_products[i] = products<SIZE>(queries[g], keys[i]);
                Vector row_scores = sums_of(row_products);
                if (is_capped) {
                    float numbers[BLOCK];
                    convert(numbers, row_scores);
                    for (int64_t i = 0; i < BLOCK; ++i) numbers[i] = std::tanh(numbers[i] * options.scaling / options.softcap);
                    row_scores = load(numbers);
                }
                scores[g][block - chunk] = select(visible[block - chunk], row_scores * factor, HIDDEN);
            }
        }
        for (int64_t g = 0; g < group; ++g) {
            Vector highest_lanes = scores[g][0];
            for (int64_t b = 1; b < chunk_end - chunk; ++b) highest_lanes = highest(highest_lanes, scores[g][b]);
            const float most = std::max(maxima[g], highest_of(highest_lanes));
            const Vector correction = power_of_two(broadcast(maxima[g] - most));
            totals[g] *= correction;
            for (int64_t c = 0; c < VECTORS_OF_ROW; ++c) sums[g][0][c] *= correction;
            maxima[g] = most;
            for (int64_t b = 0; b < chunk_end - chunk; ++b) {
                const Vector weight = select(visible[b], power_of_two(scores[g][b] - most), 0.0f);
                totals[g] += weight;
                convert(weights[g] + b * BLOCK, weight);
            }
        }
        for (int64_t block = chunk; block < chunk_end; ++block) {
            const BFloat16* rows[BLOCK];
            for (int64_t i = 0; i < BLOCK; ++i) rows[i] = all_values + (int64_t{blocks[block]} * BLOCK + i) * stride;
            if constexpr (SIZE == 64) {
                pack_few_values(packed_values, rows, first - block * BLOCK, last - block * BLOCK, SIZE);
            } else {
                pack_values(packed_values, rows, first - block * BLOCK, last - block * BLOCK, SIZE);
            }
            for (int64_t g = 0; g < group; ++g)
                multiply_tile(sums[g], weights[g] + (block - chunk) * BLOCK, 0, packed_values, SIZE * FACTORS_OF_STEP, BLOCK);
        }
    }
    for (int64_t g = 0; g < group; ++g) {
        part.maxima[g] = maxima[g];
        part.totals[g] = sum_of(totals[g]);
        for (int64_t c = 0; c < VECTORS_OF_ROW; ++c) convert(part.sums + g * SIZE + LANES * c, sums[g][0][c]);
    }
}

}  // namespace
