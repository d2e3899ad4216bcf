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
constexpr int64_t MOST_QUERY_HEADS = 32;  // of the KV heads that are read together

constexpr int64_t BLOCKS_OF_TILE = KEY_TILE / BLOCK;
// Heads whose sums with all of a tile's columns fill the registers, and as many as are multiplied by half of the columns at once: with three sums of four
// registers, products wait for the sums before them.
constexpr int64_t HEADS_OF_ALL_COLUMNS = 6, MOST_HEADS = TILE_VECTORS > 1 ? 8 : HEADS_OF_ALL_COLUMNS;
constexpr int64_t vectors_for(int64_t num_heads) { return num_heads <= HEADS_OF_ALL_COLUMNS ? TILE_VECTORS : TILE_VECTORS / 2; }

// What a part reads after its first keys, in this order: each tile's values and the next tile's keys, in the end those of the part that comes after it.
// Caches that are read ahead are asked for the first tile's values, unless the part before did so, and then for each next tile's keys and values.
// Little of them is asked for at a time, all the while that the part is computed: a core has only so many reads of memory under way, forgets what it
// is asked for beyond that, and what it computes with waits behind them. Blocks lie anywhere in the cache, so the processor cannot foresee which
// comes next; within a block it can, where lines are asked for in their order.
class SoonNeeded {
    static constexpr int64_t LINE = 64;
    static constexpr int64_t MOST_RUNS = 2 * (2 * KEYS_OF_PART / BLOCK + BLOCKS_OF_TILE);  // of codes, and of their scales

    // Rows that are `stride` bytes apart.
    struct Run {
        const char* first;
        int64_t row_bytes, stride, num_rows;
    };

    Run runs[MOST_RUNS];
    int64_t num_runs = 0, num_lines = 0;
    mutable int64_t next_run = 0, rows_left = 0;
    mutable const char *next = nullptr, *row_end = nullptr;

    // Not inlined: it is rare where rows lie together.
    __attribute__((noinline)) const char* begin_row(const char* next) const {
        if (rows_left > 0) {
            --rows_left;
            row_end += runs[next_run - 1].stride;
            return next + runs[next_run - 1].stride - runs[next_run - 1].row_bytes;
        }
        // After the last this itself, over and over.
        const Run run = next_run < num_runs ? runs[next_run++] : Run{reinterpret_cast<const char*>(this), LINE, 0, 1};
        rows_left = run.num_rows - 1;
        row_end = run.first + run.row_bytes;
        return run.first;
    }

public:
    // `row_bytes` is a multiple of a line's.
    void add(const void* first, int64_t row_bytes, int64_t stride, int64_t num_rows) {
        num_lines += row_bytes / LINE * num_rows;
        const char* const start = static_cast<const char*>(first);
        if (row_bytes != stride) {
            runs[num_runs++] = {start, row_bytes, stride, num_rows};
        } else if (num_runs > 0 && runs[num_runs - 1].num_rows == 1 && runs[num_runs - 1].first + runs[num_runs - 1].row_bytes == start) {
            runs[num_runs - 1].row_bytes += row_bytes * num_rows;
        } else {
            runs[num_runs++] = {start, row_bytes * num_rows, row_bytes * num_rows, 1};
        }
    }

    int64_t count() const { return num_lines; }

    // GCC takes a function that does nothing but prefetch for one without effect, and removes calls that it has not inlined by then.
    __attribute__((always_inline)) void fetch(int64_t count) const {
        const char* line = next;
        for (int64_t i = 0; i < count; ++i, line += LINE) {
            if (__builtin_expect(line == row_end, 0)) line = begin_row(line);
            __builtin_prefetch(line, 0, 2);  // into the second cache: the first of some processors, of 32 KiB, does not hold all of them
        }
        next = line;
    }

    void fetch_all() const { fetch(num_lines); }
};

// Lines in so many steps, of which each asks for about as many.
class SoonInSteps {
    const SoonNeeded& soon;
    int64_t lines, period;
    mutable int64_t step = 0;

public:
    SoonInSteps(const SoonNeeded& soon, int64_t num_lines, int64_t num_steps)
        : soon(soon), lines((num_lines + num_steps / 2) / num_steps), period(1) {
        if (lines == 0 && num_lines > 0) {
            lines = 1;
            period = num_steps / num_lines;
        }
    }

    // By the end of so many steps.
    int64_t lines_by(int64_t num_steps) const { return num_steps / period * lines; }

    __attribute__((always_inline)) void operator()() const {
        if (++step < period) return;
        step = 0;
        soon.fetch(lines);
    }
};

// One head's rows of a block.
struct Rows {
    const BFloat16* first;
    int64_t stride;

    const BFloat16* operator[](int64_t i) const { return first + i * stride; }
};

// Keys or values, block by block.
template <int64_t SIZE>
struct BFloat16Cache {
    static constexpr bool HAS_SCALES = false, IS_READ_AHEAD = false;

    const BFloat16* first;
    int64_t stride;

    BFloat16Cache(const void* cache, int64_t num_kv_heads) : first(static_cast<const BFloat16*>(cache)), stride(num_kv_heads * SIZE) {}

    // Where they lie; a cache of other numbers converts them into `memory` [BLOCK, SIZE].
    Rows rows(int64_t block, int64_t head, BFloat16*) const { return {first + block * BLOCK * stride + head * SIZE, stride}; }

    template <typename Besides>
    void pack(Factor* packed, int64_t block, int64_t head, const Besides& besides) const {
        pack_keys(packed, KEY_TILE, rows(block, head, nullptr), BLOCK, SIZE, besides);
    }

    void read_scales(float*, int64_t, int64_t, const Mask&) const {}

    void add_to(SoonNeeded& soon, int64_t block, int64_t first_head, int64_t num_heads) const {
        soon.add(rows(block, first_head, nullptr).first, num_heads * SIZE * sizeof(BFloat16), stride * sizeof(BFloat16), BLOCK);
    }
};

// The same of a cache of 8 bits: rows of codes as numbers. What is computed from a block's rows counts by their scales, which of invisible rows may be
// anything.
template <int64_t SIZE>
struct QuantizedCache {
    static constexpr bool HAS_SCALES = true;
    static constexpr bool IS_READ_AHEAD = true;  // a tile's values are packed at once, without products while which they could arrive

    void* cache;
    int64_t num_kv_heads;

    static_assert(SIZE % 64 == 0);

    QuantizedCache(const void* cache, int64_t num_kv_heads) : cache(const_cast<void*>(cache)), num_kv_heads(num_kv_heads) {}

    CodeRows codes(int64_t block, int64_t head) const { return {cache, block, head, num_kv_heads, BLOCK, SIZE}; }

    Rows rows(int64_t block, int64_t head, BFloat16* memory) const {
        const CodeRows from = codes(block, head);
        for (int64_t i = 0; i < BLOCK; ++i) from.read(memory + i * SIZE, i);
        return {memory, SIZE};
    }

    template <typename Besides>
    void pack(Factor* packed, int64_t block, int64_t head, const Besides& besides) const {
#ifdef PENSTOCK_PACKS_CODES
        pack_key_codes(packed, KEY_TILE, codes(block, head).codes, SIZE, besides);
#else
        alignas(64) BFloat16 numbers[BLOCK * SIZE];
        pack_keys(packed, KEY_TILE, rows(block, head, numbers), BLOCK, SIZE, besides);
#endif
    }

    void read_scales(float* to, int64_t block, int64_t head, const Mask& visible) const {
        convert(to, select(visible, load(codes(block, head).scales), 0.0f));
    }

    void add_to(SoonNeeded& soon, int64_t block, int64_t first_head, int64_t num_heads) const {
        const CodeRows from = codes(block, first_head);
        soon.add(from.codes, BLOCK * SIZE, BLOCK * SIZE, num_heads);
        soon.add(from.scales, BLOCK * sizeof(float), BLOCK * sizeof(float), num_heads);
    }
};

// Calls product(first, count) for a group's heads, some at a time; `count` is constant.
template <typename Product>
inline __attribute__((always_inline)) void for_heads(int64_t group, const Product& product) {
    const int64_t num_tiles = (group + MOST_HEADS - 1) / MOST_HEADS;
    for (int64_t i = 0; i < num_tiles; ++i) {
        const int64_t first = group * i / num_tiles;
        switch (group * (i + 1) / num_tiles - first) {
            case 1: product(first, std::integral_constant<int64_t, 1>{}); break;
            case 2: product(first, std::integral_constant<int64_t, 2>{}); break;
            case 3: product(first, std::integral_constant<int64_t, 3>{}); break;
            case 4: product(first, std::integral_constant<int64_t, 4>{}); break;
            case 5: product(first, std::integral_constant<int64_t, 5>{}); break;
            case 6: product(first, std::integral_constant<int64_t, 6>{}); break;
            case 7: product(first, std::integral_constant<int64_t, std::min<int64_t>(7, MOST_HEADS)>{}); break;  // which a group's share does not exceed
            default: product(first, std::integral_constant<int64_t, MOST_HEADS>{});
        }
    }
}

// How many steps the product of a group's rows with so many columns takes.
inline int64_t steps_of_product(int64_t group, int64_t depth, int64_t columns) {
    int64_t steps = 0;
    for_heads(group, [&](int64_t, auto count) { steps += columns / (LANES * vectors_for(decltype(count)::value)) * (depth / FACTORS_OF_STEP); });
    return steps;
}

// About how long a Zen 5 computes with one head of a tile, of which some blocks are to be seen, in cycles.
struct TileTime {
    int64_t packing, scoring, weighing, adding;

    TileTime(int64_t group, int64_t size, int64_t num_blocks)
        : packing(num_blocks * size), scoring(group * size), weighing(64 * group), adding(group * size * num_blocks / BLOCKS_OF_TILE) {}

    int64_t total() const { return packing + scoring + weighing + adding; }
};

// So many lines in that time: about as many in any part of it, since a core forgets what too much is asked for at once.
struct Pace {
    SoonInSteps with_packing, with_keys, with_values;
    int64_t lines_of_weights;  // of each query head

    Pace(const SoonNeeded& soon, int64_t num_lines, int64_t group, int64_t size, int64_t num_blocks)
        : Pace(soon, num_lines, group, TileTime(group, size, num_blocks), num_blocks * size / (LANES * FACTORS_OF_STEP),
               steps_of_product(group, size, KEY_TILE), steps_of_product(group, num_blocks * BLOCK, size)) {}

private:
    Pace(const SoonNeeded& soon, int64_t num_lines, int64_t group, const TileTime& time, int64_t num_chunks, int64_t key_steps, int64_t value_steps)
        : with_packing(soon, num_lines * time.packing / time.total(), num_chunks),
          with_keys(soon, num_lines * time.scoring / time.total(), key_steps),
          with_values(soon, num_lines * time.adding / time.total(), value_steps) {
        const int64_t rest = num_lines - with_packing.lines_by(num_chunks) - with_keys.lines_by(key_steps) - with_values.lines_by(value_steps);
        lines_of_weights = std::max<int64_t>(rest + group - 1, 0) / group;
    }
};

// The products of a group's rows with packed columns, of which there is a multiple of 64.
template <bool ADDS>
inline void multiply_group(float* sums, int64_t sums_stride, const Factor* a, int64_t a_stride, const Factor* b, int64_t b_stride, int64_t depth,
                           int64_t columns, int64_t group, const SoonInSteps& soon) {
    for_heads(group, [&](int64_t first, auto count) {
        constexpr int64_t HEADS = decltype(count)::value;
        multiply_columns<ADDS, HEADS, vectors_for(HEADS)>(sums + first * sums_stride, sums_stride, a + first * a_stride, a_stride, b, b_stride, depth,
                                                       columns, soon);
    });
}

#ifdef __AVX512BF16__

// sums[ROWS][SIZE] += weights[ROWS][KEY_TILE] * values, added up in the order of `multiply_columns`. Pairs of rows are interleaved on the way, each 16
// bytes on their own, so that of 32 sums those of every other four come first: see `reorder`.
template <int64_t ROWS, int64_t SIZE>
inline void add_values_of(float* sums, const BFloat16* weights, const Rows* blocks, int64_t num_blocks, const SoonInSteps& soon) {
    constexpr int64_t VECTORS = vectors_for(ROWS);
    for (int64_t column = 0; column < SIZE; column += LANES * VECTORS) {
        Vector tile[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int64_t v = 0; v < VECTORS; ++v) tile[r][v] = load(sums + r * SIZE + column + LANES * v);
        for (int64_t b = 0; b < num_blocks; ++b) {
            const BFloat16 *even = blocks[b].first + column, *factors = weights + b * BLOCK;
            for (int64_t i = 0; i < BLOCK; i += 2, even += 2 * blocks[b].stride) {
                soon();
                const BFloat16* const odd = even + blocks[b].stride;
                Pairs pairs[VECTORS];
#pragma GCC unroll 8
                for (int64_t v = 0; v < VECTORS; v += 2) {
                    const __m512i first = _mm512_loadu_si512(even + LANES * v), second = _mm512_loadu_si512(odd + LANES * v);
                    pairs[v] = {_mm512_unpacklo_epi16(first, second)};
                    pairs[v + 1] = {_mm512_unpackhi_epi16(first, second)};
                }
#pragma GCC unroll 12
                for (int64_t r = 0; r < ROWS; ++r) {
                    const Pairs x = broadcast_pair(factors + r * KEY_TILE + i);
#pragma GCC unroll 8
                    for (int64_t v = 0; v < VECTORS; ++v) tile[r][v] = add_products(tile[r][v], x, pairs[v]);
                }
            }
        }
#pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int64_t v = 0; v < VECTORS; ++v) convert(sums + r * SIZE + column + LANES * v, tile[r][v]);
    }
}

// A copy of rows in `memory` [BLOCK, SIZE], where it may lie already, with zeros before `begin` and from `end` on.
template <int64_t SIZE>
inline Rows only_visible(const Rows& rows, BFloat16* memory, int64_t begin, int64_t end) {
    for (int64_t i = 0; i < BLOCK; ++i)
        for (int64_t d = 0; d < SIZE; d += LANES) convert(memory + i * SIZE + d, i >= begin && i < end ? load(rows[i] + d) : Vector{});
    return {memory, SIZE};
}

#endif

// Adds the values of blocks from `seen_block` on, weighed, to a group's sums. `begin` and `stop` are of the tile's visible keys.
template <int64_t SIZE, typename Cache>
inline void add_values(float* sums, const Factor* weights, Factor* memory, const Cache& values, const int32_t* blocks, int64_t head,
                       int64_t seen_block, int64_t num_blocks, int64_t begin, int64_t stop, int64_t group, const SoonInSteps& soon) {
#ifdef PENSTOCK_PACKS_CODES
    if constexpr (Cache::HAS_SCALES) {  // codes of invisible rows are numbers as well, which weights of zero silence
        for (int64_t i = seen_block; i < num_blocks; ++i) pack_value_codes(memory + i * BLOCK * SIZE, values.codes(blocks[i], head).codes, SIZE);
        return multiply_group<true>(sums, SIZE, weights + seen_block * BLOCK, KEY_TILE, memory + seen_block * BLOCK * SIZE, SIZE * FACTORS_OF_STEP,
                                    (num_blocks - seen_block) * BLOCK, SIZE, group, soon);
    }
#endif
#ifdef __AVX512BF16__
    Rows rows[BLOCKS_OF_TILE];
    for (int64_t i = seen_block; i < num_blocks; ++i) {
        const int64_t place = i * BLOCK;
        rows[i] = values.rows(blocks[i], head, memory + place * SIZE);
        if (begin > place || stop < place + BLOCK) rows[i] = only_visible<SIZE>(rows[i], memory + place * SIZE, begin - place, stop - place);
    }
    for_heads(group, [&](int64_t first, auto count) {
        add_values_of<decltype(count)::value, SIZE>(sums + first * SIZE, weights + first * KEY_TILE + seen_block * BLOCK, rows + seen_block,
                                                    num_blocks - seen_block, soon);
    });
#else
    std::fill_n(memory, seen_block * BLOCK * SIZE, Factor{});
    for (int64_t i = seen_block; i < num_blocks; ++i) {
        alignas(64) BFloat16 numbers[BLOCK * SIZE];
        pack_values(memory + i * BLOCK * SIZE, values.rows(blocks[i], head, numbers), begin - i * BLOCK, stop - i * BLOCK, SIZE);
    }
    multiply_group<true>(sums, SIZE, weights, KEY_TILE, memory, SIZE * FACTORS_OF_STEP, num_blocks * BLOCK, SIZE, group, soon);
#endif
}

// Brings the sums of `add_values` into the order of the values' numbers.
template <typename Cache>
inline void reorder(float* sums, int64_t count) {
#ifdef PENSTOCK_PACKS_CODES
    if constexpr (Cache::HAS_SCALES) return reorder_sums_with_codes(sums, count);
#endif
#ifdef __AVX512BF16__
    const __m512i take_low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), take_high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        const __m512i first = _mm512_loadu_si512(sums + i), second = _mm512_loadu_si512(sums + i + LANES);
        _mm512_storeu_si512(sums + i, _mm512_permutex2var_epi64(first, take_low, second));
        _mm512_storeu_si512(sums + i + LANES, _mm512_permutex2var_epi64(first, take_high, second));
    }
#endif
}

// The KV heads of a task, which are read together: of a block, their rows lie together.
struct KVHeads {
    int64_t first, count;
};

// The first tile of a part's keys and values: blocks from `begin` to before `end`, none by default.
struct FirstTile {
    const int32_t* blocks = nullptr;
    int64_t begin = 0, end = 0;
    KVHeads heads{};

    FirstTile() = default;

    FirstTile(const int32_t* blocks, int64_t first_key, int64_t last_key, const KVHeads& heads)
        : blocks(blocks),
          begin(first_key / BLOCK),
          end(std::min((first_key / KEY_TILE + 1) * BLOCKS_OF_TILE, (last_key + BLOCK - 1) / BLOCK)),
          heads(heads) {}

    template <typename Cache>
    void add_to(SoonNeeded& soon, const Cache& cache) const {
        for (int64_t block = begin; block < end; ++block) cache.add_to(soon, blocks[block], heads.first, heads.count);
    }
};

// One sequence, some KV heads, all of their query heads, the keys from `first` to `last`. What lies in their blocks beside them may be anything, NaN
// included. Each KV head's part lies `part_stride` after the one before. Where `is_first`, nothing of its first tile has been asked for. `next` is that of
// the part that comes after this one.
template <int64_t SIZE, typename Cache>
void decode_part_bfloat16(float* parts, int64_t part_stride, const BFloat16* query, const Cache& keys, const Cache& values, const int32_t* blocks,
                          int64_t first, int64_t last, bool is_first, const FirstTile& next, const KVHeads& heads, int64_t group,
                          const Options& options) {
    alignas(64) Factor queries[MOST_QUERY_HEADS * SIZE], weights[MOST_QUERY_HEADS * KEY_TILE];
    alignas(64) Factor packed[KEY_TILE * SIZE] = {};
    alignas(64) float scores[MAX_GROUP * KEY_TILE], scales[2][KEY_TILE] = {};
    Vector totals[MOST_QUERY_HEADS];
    std::fill_n(totals, heads.count * group, Vector{});
    const auto part_of = [&](int64_t h) { return Part(parts + h * part_stride, group, SIZE); };
    for (int64_t h = 0; h < heads.count; ++h) {
        std::fill_n(part_of(h).sums, group * SIZE, 0.0f);
        std::fill_n(part_of(h).maxima, group, HIDDEN);
    }
    const BFloat16* const own_queries = query + heads.first * group * SIZE;
    for (int64_t i = 0; i < heads.count * group * SIZE; i += LANES) convert(queries + i, load(own_queries + i));
    const int64_t num_blocks = (last + BLOCK - 1) / BLOCK;
    if (is_first) {  // its keys at once; its values with what follows
        SoonNeeded soon;
        FirstTile(blocks, first, last, heads).add_to(soon, keys);
        soon.fetch_all();
    }
    SoonNeeded soon;
    int64_t lines_by[TILES_OF_PART], time_left = 0;  // what is to be asked for until a tile has been computed
    for (int64_t block = first / BLOCK, stop; block < num_blocks; block = stop) {
        const FirstTile tile(blocks, block * BLOCK, last, heads);
        stop = tile.end;
        const FirstTile after = stop < num_blocks ? FirstTile(blocks, stop * BLOCK, last, heads) : next;
        if (!Cache::IS_READ_AHEAD || (is_first && block == first / BLOCK)) tile.add_to(soon, values);
        after.add_to(soon, keys);
        if (Cache::IS_READ_AHEAD) after.add_to(soon, values);
        lines_by[block / BLOCKS_OF_TILE % TILES_OF_PART] = soon.count();
        time_left += TileTime(group, SIZE, stop - block).total();
    }
    int64_t num_fetched = 0;
    for (int64_t tile = first / KEY_TILE; tile * KEY_TILE < last; ++tile) {
        const int64_t first_block = tile * BLOCKS_OF_TILE, stop_block = std::min(first_block + BLOCKS_OF_TILE, num_blocks);
        const int64_t begin = first - tile * KEY_TILE, stop = last - tile * KEY_TILE;
        const int64_t seen_block = std::max(first_block, first / BLOCK);  // blocks before that may be gone
        // Some of what follows as well, where there will be less time for it: the last tile may be a short one.
        const int64_t time = TileTime(group, SIZE, stop_block - seen_block).total();
        const int64_t num_lines = std::max(lines_by[tile % TILES_OF_PART] - num_fetched, (soon.count() - num_fetched) * time / time_left);
        num_fetched += num_lines;
        time_left -= time;
        const Pace pace(soon, num_lines / heads.count, group, SIZE, stop_block - seen_block);
        for (int64_t h = 0; h < heads.count; ++h) {
            const int64_t head = heads.first + h;
            const Part part = part_of(h);
            for (int64_t block = seen_block; block < stop_block; ++block) {
                const int64_t place = (block - first_block) * BLOCK;
                keys.pack(packed + place * FACTORS_OF_STEP, blocks[block], head, pace.with_packing);
                const Mask visible = lanes_between(begin - place, stop - place);
                keys.read_scales(scales[0] + place, blocks[block], head, visible);
                values.read_scales(scales[1] + place, blocks[block], head, visible);
            }
            multiply_group<false>(scores, KEY_TILE, queries + h * group * SIZE, SIZE, packed, KEY_TILE * FACTORS_OF_STEP, SIZE, KEY_TILE, group,
                                  pace.with_keys);
            const TileView view{begin, stop, Cache::HAS_SCALES ? scales[0] : nullptr, Cache::HAS_SCALES ? scales[1] : nullptr};
            for (int64_t g = 0; g < group; ++g) {
                soon.fetch(pace.lines_of_weights);
                const int64_t row = h * group + g;
                weigh(scores + g * KEY_TILE, weights + row * KEY_TILE, part.sums + g * SIZE, part.maxima[g], totals[row], SIZE, view, options);
            }
        }
        for (int64_t h = 0; h < heads.count; ++h)
            add_values<SIZE>(part_of(h).sums, weights + h * group * KEY_TILE, packed, values, blocks + first_block, heads.first + h,
                             seen_block - first_block, stop_block - first_block, begin, stop, group, pace.with_values);
    }
    for (int64_t h = 0; h < heads.count; ++h) {
        reorder<Cache>(part_of(h).sums, group * SIZE);
        for (int64_t g = 0; g < group; ++g) part_of(h).totals[g] = total_of(totals[h * group + g]);
    }
}

}  // namespace
