// Decoding in bfloat16 in whole vectors, for head sizes that fill them and blocks of 16 keys: four times as fast as `decode.h`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common.h"
#include "decode_part.h"
#include "pack.h"
#include "quantized_cache.h"
#include "tile.h"
#include "vector.h"

namespace {

constexpr int64_t BLOCK = LANES;
constexpr int64_t MAX_GROUP = 16;

// How far keys and values are taken in at a time: one correction of the sums and one round of exponentials for all of these.
constexpr int64_t CHUNK = 16;  // blocks

// GCC takes a function that does nothing but prefetch for one without effect, and removes calls that it has not inlined by then.
#define PENSTOCK_INLINED __attribute__((always_inline))

// One KV head's keys or values, block by block. `fetch` asks for a block's line i and every `step`-th after it: a core has only so many reads of
// memory under way, and what it computes with next waits behind those, so that a whole block's at once take 1.3 times as long as one head's share at
// a time.
template <int64_t SIZE>
struct BFloat16Head {
    // How many blocks ahead keys are fetched. Blocks lie anywhere in the cache, so the processor cannot foresee which comes next.
    static constexpr int64_t AHEAD = 2;

    const BFloat16* rows;
    int64_t stride;

    BFloat16Head(const void* cache, int64_t head, int64_t num_kv_heads)
        : rows(static_cast<const BFloat16*>(cache) + head * SIZE), stride(num_kv_heads * SIZE) {}

    struct Block {
        const BFloat16* rows;
        int64_t stride;

        const BFloat16* operator[](int64_t i) const { return rows + i * stride; }
    };

    Block operator[](int64_t block) const { return {rows + block * BLOCK * stride, stride}; }
    Vector scaled(const Vector& x, int64_t, const Mask&) const { return x; }

    PENSTOCK_INLINED void fetch(int64_t block, int64_t i, int64_t step) const {
        const BFloat16* const first = rows + block * BLOCK * stride;
        for (; i < BLOCK; i += step)
            for (int64_t d = 0; d < SIZE; d += 32) __builtin_prefetch(first + i * stride + d);
    }
};

// The same of a cache of 8 bits: rows of codes as numbers. What is computed from a block's rows counts by their scales, which of invisible rows may be
// anything.
template <int64_t SIZE>
struct QuantizedHead {
    static constexpr int64_t AHEAD = 4;

    void* cache;
    int64_t head, num_kv_heads;

    QuantizedHead(const void* cache, int64_t head, int64_t num_kv_heads) : cache(const_cast<void*>(cache)), head(head), num_kv_heads(num_kv_heads) {}

    struct Block {
        static constexpr int64_t stride = SIZE;
        alignas(64) BFloat16 rows[BLOCK][SIZE];

        const BFloat16* operator[](int64_t i) const { return rows[i]; }
    };

    CodeRows codes(int64_t block) const { return {cache, block, head, num_kv_heads, BLOCK, SIZE}; }

    Block operator[](int64_t block) const {
        const CodeRows from = codes(block);
        Block result;
        for (int64_t i = 0; i < BLOCK; ++i) from.read(result.rows[i], i);
        return result;
    }

    Vector scaled(const Vector& x, int64_t block, const Mask& visible) const { return select(visible, x * load(codes(block).scales), 0.0f); }

    PENSTOCK_INLINED void fetch(int64_t block, int64_t i, int64_t step) const {
        const CodeRows from = codes(block);
        if (i == 0) __builtin_prefetch(from.scales);
        for (; i < BLOCK * SIZE / 64; i += step) __builtin_prefetch(from.codes + 64 * i);
    }
};

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
template <int64_t SIZE, typename Head>
void decode_part_bfloat16(const Part& part, const BFloat16* query, const Head& keys, const Head& values, const int32_t* blocks, int64_t first,
                          int64_t last, int64_t end, int64_t kv_head, int64_t group, const Options& options) {
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
    const int64_t num_blocks = (last + BLOCK - 1) / BLOCK;
    Mask visible[CHUNK];
    for (int64_t chunk = first / BLOCK; chunk < num_blocks; chunk += CHUNK) {
        const int64_t chunk_end = std::min(chunk + CHUNK, num_blocks);
        for (int64_t block = chunk; block < chunk_end; ++block) {
            const bool has_next = (block + Head::AHEAD) * BLOCK < end;
            visible[block - chunk] = lanes_between(first - block * BLOCK, last - block * BLOCK);
            const auto key_rows = keys[blocks[block]];
            const FactorRows<SIZE> key_factors(key_rows[0], key_rows.stride, BLOCK);
            for (int64_t g = 0; g < group; ++g) {
                values.fetch(blocks[block], g, group);
                if (has_next) keys.fetch(blocks[block + Head::AHEAD], g, group);
                Vector row_products[BLOCK];
                for (int64_t i = 0; i < BLOCK; ++i) row_products[i] = products<SIZE>(queries[g], key_factors[i]);
                Vector row_scores = keys.scaled(sums_of(row_products), blocks[block], visible[block - chunk]);
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
                convert(weights[g] + b * BLOCK, values.scaled(weight, blocks[chunk + b], visible[b]));
            }
        }
        for (int64_t block = chunk; block < chunk_end; ++block) {
            const auto value_rows = values[blocks[block]];
            const BFloat16* rows[BLOCK];
            for (int64_t i = 0; i < BLOCK; ++i) rows[i] = value_rows[i];
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
