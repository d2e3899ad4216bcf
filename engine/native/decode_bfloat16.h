// Decoding in bfloat16 in whole vectors, for head sizes that fill them and blocks of 16 keys: four times as fast as `decode.h`.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "attention_part.h"
#include "common.h"
#include "pack.h"
#include "quantized_cache.h"
#include "tile.h"
#include "vector.h"

namespace {

constexpr int64_t BLOCK = LANES;
constexpr int64_t MAX_GROUP = 16;

constexpr int64_t BLOCKS_OF_TILE = KEY_TILE / BLOCK;
constexpr int64_t MOST_HEADS = 6;  // at once: their sums fill the registers

// Rows that are computed with soon, of which some are asked for in each step of a product: a core has only so many reads of memory under way, and what
// it computes with next waits behind those. Blocks lie anywhere in the cache, so the processor cannot foresee which comes next.
template <int64_t ROW_BYTES>
struct SoonNeeded {
    static constexpr uint64_t MOST_BLOCKS = 2 * BLOCKS_OF_TILE;

    const char* blocks[MOST_BLOCKS];
    uint64_t num_blocks = 0, stride = ROW_BYTES, rows_a_step = 0;
    mutable uint64_t row = 0;

    SoonNeeded() { std::fill_n(blocks, MOST_BLOCKS, reinterpret_cast<const char*>(this)); }

    void add(const void* block, uint64_t its_stride) {
        blocks[num_blocks++] = static_cast<const char*>(block);
        stride = its_stride;
    }

    // Without a branch for the end: what lies behind it is this object. GCC takes a function that does nothing but prefetch for one without effect, and
    // removes calls that it has not inlined by then.
    __attribute__((always_inline)) void operator()() const {
        for (uint64_t i = 0; i < rows_a_step; ++i, ++row) {
            const char* const from = blocks[row / BLOCK % MOST_BLOCKS] + row % BLOCK * stride;
            for (int64_t byte = 0; byte < ROW_BYTES; byte += 64) __builtin_prefetch(from + byte);
        }
    }

    // At once.
    __attribute__((always_inline)) void fetch() {
        for (rows_a_step = 1; row < num_blocks * BLOCK;) (*this)();
    }
};

// One KV head's keys or values, block by block.
template <int64_t SIZE>
struct BFloat16Head {
    static constexpr bool HAS_SCALES = false;

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
    void read_scales(float*, int64_t, const Mask&) const {}

    static constexpr int64_t ROW_BYTES = SIZE * sizeof(BFloat16);

    void add_to(SoonNeeded<ROW_BYTES>& soon, int64_t block) const { soon.add(rows + block * BLOCK * stride, stride * sizeof(BFloat16)); }
};

// The same of a cache of 8 bits: rows of codes as numbers. What is computed from a block's rows counts by their scales, which of invisible rows may be
// anything.
template <int64_t SIZE>
struct QuantizedHead {
    static constexpr bool HAS_SCALES = true;

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

    void read_scales(float* to, int64_t block, const Mask& visible) const { convert(to, select(visible, load(codes(block).scales), 0.0f)); }

    static constexpr int64_t ROW_BYTES = SIZE;

    __attribute__((always_inline)) void add_to(SoonNeeded<ROW_BYTES>& soon, int64_t block) const {
        const CodeRows from = codes(block);
        __builtin_prefetch(from.scales);
        soon.add(from.codes, SIZE);
    }
};

// The products of a group's rows with packed columns, of which there is a multiple of 64.
template <bool ADDS, typename Soon>
inline void multiply_group(float* sums, int64_t sums_stride, const Factor* a, int64_t a_stride, const Factor* b, int64_t b_stride, int64_t depth,
                           int64_t columns, int64_t group, Soon& soon) {
    const int64_t num_tiles = (group + MOST_HEADS - 1) / MOST_HEADS;
    const int64_t num_steps = num_tiles * (columns / (LANES * TILE_VECTORS)) * (depth / FACTORS_OF_STEP);
    soon.rows_a_step = (soon.num_blocks * BLOCK + num_steps - 1) / num_steps;
    for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t first = group * i / num_tiles, count = group * (i + 1) / num_tiles - first;
        auto multiply = [&](auto heads) {
            multiply_columns<ADDS, decltype(heads)::value>(sums + first * sums_stride, sums_stride, a + first * a_stride, a_stride, b, b_stride, depth,
                                                           columns, soon);
        };
        switch (count) {
            case 1: multiply(std::integral_constant<int64_t, 1>{}); break;
            case 2: multiply(std::integral_constant<int64_t, 2>{}); break;
            case 3: multiply(std::integral_constant<int64_t, 3>{}); break;
            case 4: multiply(std::integral_constant<int64_t, 4>{}); break;
            case 5: multiply(std::integral_constant<int64_t, 5>{}); break;
            default: multiply(std::integral_constant<int64_t, MOST_HEADS>{});
        }
    }
}

// One sequence, one KV head, all of its query heads, the keys from `first` to `last`, of those up to `end` that are next. What lies in their
// blocks beside them may be anything, NaN included.
template <int64_t SIZE, typename Head>
void decode_part_bfloat16(const Part& part, const BFloat16* query, const Head& keys, const Head& values, const int32_t* blocks, int64_t first,
                          int64_t last, int64_t end, int64_t kv_head, int64_t group, const Options& options) {
    alignas(64) Factor queries[MAX_GROUP * SIZE], weights[MAX_GROUP * KEY_TILE];
    alignas(64) Factor packed[KEY_TILE * SIZE] = {};
    alignas(64) float scores[MAX_GROUP * KEY_TILE], scales[2][KEY_TILE] = {};
    Vector totals[MAX_GROUP];
    std::fill_n(part.sums, group * SIZE, 0.0f);
    std::fill_n(part.maxima, group, HIDDEN);
    std::fill_n(totals, group, Vector{});
    const BFloat16* const own_queries = query + kv_head * group * SIZE;
    for (int64_t i = 0; i < group * SIZE; i += LANES) convert(queries + i, load(own_queries + i));
    const int64_t num_blocks = (last + BLOCK - 1) / BLOCK, end_block = (end + BLOCK - 1) / BLOCK;
    SoonNeeded<Head::ROW_BYTES> soon;
    for (int64_t block = first / BLOCK; block < std::min((first / KEY_TILE + 1) * BLOCKS_OF_TILE, num_blocks); ++block) keys.add_to(soon, blocks[block]);
    soon.fetch();
    for (int64_t tile = first / KEY_TILE; tile * KEY_TILE < last; ++tile) {
        const int64_t first_block = tile * BLOCKS_OF_TILE, stop_block = std::min(first_block + BLOCKS_OF_TILE, num_blocks);
        const int64_t begin = first - tile * KEY_TILE, stop = last - tile * KEY_TILE;
        const int64_t seen_block = std::max(first_block, first / BLOCK);  // blocks before that may be gone
        const int64_t stop_next = std::min(stop_block + BLOCKS_OF_TILE, end_block);
        SoonNeeded<Head::ROW_BYTES> with_keys, with_values;
        if (begin >= 0)  // of the first tile nothing was asked for before
            for (int64_t block = seen_block; block < stop_block; ++block) values.add_to(with_keys, blocks[block]);
        for (int64_t block = stop_block; block < stop_next; ++block) keys.add_to(with_keys, blocks[block]);
        for (int64_t block = stop_block; block < stop_next; ++block) values.add_to(with_values, blocks[block]);
        for (int64_t block = seen_block; block < stop_block; ++block) {
            const int64_t place = (block - first_block) * BLOCK;
            pack_keys(packed + place * FACTORS_OF_STEP, KEY_TILE, keys[blocks[block]], BLOCK, SIZE);
            const Mask visible = lanes_between(begin - place, stop - place);
            keys.read_scales(scales[0] + place, blocks[block], visible);
            values.read_scales(scales[1] + place, blocks[block], visible);
        }
        multiply_group<false>(scores, KEY_TILE, queries, SIZE, packed, KEY_TILE * FACTORS_OF_STEP, SIZE, KEY_TILE, group, with_keys);
        const TileView view{begin, stop, Head::HAS_SCALES ? scales[0] : nullptr, Head::HAS_SCALES ? scales[1] : nullptr};
        for (int64_t g = 0; g < group; ++g)
            weigh(scores + g * KEY_TILE, weights + g * KEY_TILE, part.sums + g * SIZE, part.maxima[g], totals[g], SIZE, view, options);
        std::fill_n(packed, (seen_block - first_block) * BLOCK * SIZE, Factor{});
        for (int64_t block = seen_block; block < stop_block; ++block) {
            const int64_t place = (block - first_block) * BLOCK;
            pack_values(packed + place * SIZE, values[blocks[block]], begin - place, stop - place, SIZE);
        }
        multiply_group<true>(part.sums, SIZE, weights, KEY_TILE, packed, SIZE * FACTORS_OF_STEP, (stop_block - first_block) * BLOCK, SIZE, group, with_values);
    }
    for (int64_t g = 0; g < group; ++g) part.totals[g] = total_of(totals[g]);
}

}  // namespace
