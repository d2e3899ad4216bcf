// Many query tokens of one sequence attend to its keys, causally but within images: tiles of queries times tiles of keys, with the softmax
// computed online (Dao et al., arXiv:2205.14135; Rabe and Staats, arXiv:2112.05682).
//
// Keys and values are first laid out so that a row of 64 numbers is what one step of the inner product multiplies. With products of bfloat16
// that is two rows at once, interleaved; without them the products are float32. Of a long context only so many keys are laid out at a time, and
// what the queries have summed up over them is put by until the next.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "attention_part.h"
#include "common.h"
#include "pack.h"
#include "parallel.h"
#include "quantized_cache.h"
#include "tile.h"
#include "vector.h"

namespace {

constexpr int64_t QUERY_TILE = 48;
constexpr int64_t TILES_AT_A_TIME = 128;  // of keys: 8,192 of them
constexpr int64_t ROWS = 6;       // of a register tile
constexpr int64_t COLUMNS = 64;
constexpr int64_t MAX_VALUE_SIZE = 256;

// What is multiplied, and how many steps of the inner product lie interleaved in one row.
template <typename T>
struct Product {
    using Element = float;
    static constexpr int64_t STEP = 1;
};

template <>
struct Product<BFloat16> {
    using Element = Factor;
    static constexpr int64_t STEP = FACTORS_OF_STEP;
};

#ifdef PENSTOCK_TILES

// sums[16][64] = or += a[16][depth] * b[depth][64], by tiles. Packed rows are as right factors have them. depth is a multiple of 32.
template <bool ADDS>
inline void multiply_by_tiles(float* sums, int64_t sums_stride, const BFloat16* a, int64_t a_stride, const BFloat16* b, int64_t b_stride, int64_t depth) {
    const int64_t sums_bytes = sums_stride * sizeof(float), a_bytes = a_stride * sizeof(BFloat16), b_bytes = b_stride * sizeof(BFloat16);
    if constexpr (ADDS) {
        amx::load<0>(sums, sums_bytes);
        amx::load<1>(sums + 16, sums_bytes);
        amx::load<2>(sums + 32, sums_bytes);
        amx::load<3>(sums + 48, sums_bytes);
    } else {
        amx::clear<0>();
        amx::clear<1>();
        amx::clear<2>();
        amx::clear<3>();
    }
    for (int64_t k = 0; k < depth; k += amx::NUMBERS) {
        const BFloat16* rows = b + k / 2 * b_stride;
        amx::load<4>(a + k, a_bytes);
        amx::load<6>(rows, b_bytes);
        amx::add_bfloat16_products<0, 4, 6>();
        amx::load<7>(rows + 32, b_bytes);
        amx::add_bfloat16_products<1, 4, 7>();
        amx::load<6>(rows + 64, b_bytes);
        amx::add_bfloat16_products<2, 4, 6>();
        amx::load<7>(rows + 96, b_bytes);
        amx::add_bfloat16_products<3, 4, 7>();
    }
    amx::store<0>(sums, sums_bytes);
    amx::store<1>(sums + 16, sums_bytes);
    amx::store<2>(sums + 32, sums_bytes);
    amx::store<3>(sums + 48, sums_bytes);
}

constexpr int64_t MOST_ROWS_AT_ONCE = amx::ROWS, DEPTH_OF_TILES = amx::NUMBERS;
#else
constexpr int64_t MOST_ROWS_AT_ONCE = ROWS, DEPTH_OF_TILES = 1;
#endif

// One sequence: its queries, and where its keys and values lie.
template <typename T>
struct Prefill {
    T* out;          // [num_queries, num_heads, value_size]
    const T* query;  // [num_queries, num_heads, key_size]
    const T* key_cache;
    const T* value_cache;
    const int32_t* block_table;
    int64_t num_queries, context_len, num_heads, num_kv_heads, key_size, value_size, block_size;
    bool is_quantized;  // the caches: see `Shape`
    Options options;
    const int64_t* key_stops = nullptr;  // of each query, which sees the keys before that position too; null: only those up to its own

    using Element = typename Product<T>::Element;
    static constexpr int64_t STEP = Product<T>::STEP;
    Element* keys = nullptr;    // packed: see `pack`
    Element* values = nullptr;
    int64_t first_tile = 0, end_tile = 0;  // that are packed
    float* states = nullptr;               // of all query tiles and heads, where not all keys are packed at once
    float* scales = nullptr;               // of the packed keys and values, where the caches have 8 bits

    int64_t num_query_tiles() const { return (num_queries + QUERY_TILE - 1) / QUERY_TILE; }
    int64_t num_key_tiles() const { return (context_len + KEY_TILE - 1) / KEY_TILE; }
    int64_t first_visible(int64_t position) const { return options.window > 0 ? std::max<int64_t>(0, position - options.window + 1) : 0; }
    // The end of the keys that a query sees, and of those that any of some queries sees.
    int64_t visible_end(int64_t query) const {
        const int64_t causal = context_len - num_queries + query + 1;
        return key_stops ? std::max(causal, key_stops[query]) : causal;
    }
    int64_t visible_end_of(int64_t first_query, int64_t count) const {
        const int64_t stop = std::min(first_query + count, num_queries);
        int64_t end = 0;
        for (int64_t query = key_stops ? first_query : stop - 1; query < stop; ++query) end = std::max(end, visible_end(query));
        return end;
    }
    int64_t visible_end_of_tile(int64_t first_query) const { return visible_end_of(first_query, QUERY_TILE); }
    int64_t first_needed_tile() const { return first_visible(context_len - num_queries) / KEY_TILE; }
    int64_t num_packed_tiles() const { return std::min(num_key_tiles() - first_needed_tile(), TILES_AT_A_TIME); }
    // Rounds begin where parts do.
    int64_t first_of_round(int64_t round) const { return first_needed_tile() / TILES_OF_PART * TILES_OF_PART + round * TILES_AT_A_TIME; }
    int64_t num_rounds() const { return (num_key_tiles() - first_of_round(0) + TILES_AT_A_TIME - 1) / TILES_AT_A_TIME; }
    int64_t value_columns() const { return (value_size + COLUMNS - 1) / COLUMNS * COLUMNS; }
    int64_t key_depth() const { return (key_size + STEP - 1) / STEP * STEP; }
    int64_t keys_size() const { return num_kv_heads * num_packed_tiles() * key_depth() * KEY_TILE; }
    int64_t values_size() const { return num_kv_heads * num_packed_tiles() * KEY_TILE * value_columns(); }
    int64_t state_size() const { return QUERY_TILE * (value_columns() + 2); }  // sums, maximum and total of each row
    int64_t states_size() const { return num_rounds() > 1 ? num_query_tiles() * num_heads * state_size() : 0; }

    int64_t scales_size() const { return is_quantized ? num_kv_heads * num_packed_tiles() * 2 * KEY_TILE : 0; }

    // Of a tile's keys, then of its values; null for caches without scales.
    float* tile_scales(int64_t head, int64_t tile) const {
        return is_quantized ? scales + (head * num_packed_tiles() + tile - first_tile) * 2 * KEY_TILE : nullptr;
    }

    Element* key_tile(int64_t head, int64_t tile) const {
        return keys + (head * num_packed_tiles() + tile - first_tile) * key_depth() * KEY_TILE;
    }
    Element* value_tile(int64_t head, int64_t tile) const {
        return values + (head * num_packed_tiles() + tile - first_tile) * KEY_TILE * value_columns();
    }

    // Whether the queries of a tile see any of the keys that are packed.
    bool sees(int64_t first_query) const {
        const int64_t first_position = context_len - num_queries + first_query;
        const int64_t last_key = visible_end_of_tile(first_query) - 1;
        return first_visible(first_position) / KEY_TILE < end_tile && last_key / KEY_TILE >= first_tile;
    }

    // A key or value as it lies in the cache or, where that has 8 bits, its codes in `memory`, and its scale.
    const T* row(const T* cache, int64_t position, int64_t head, int64_t size, T* memory, float* scale) const {
        const int64_t block = block_table[position / block_size], place = position % block_size;
        if (!is_quantized) return cache + ((block * block_size + place) * num_kv_heads + head) * size;
        const CodeRows rows(const_cast<T*>(cache), block, head, num_kv_heads, block_size, size);
        rows.read(memory, place);
        *scale = rows.scales[place];
        return memory;
    }

    // Keys become [depth / STEP][64 keys][STEP], values [64 / STEP][columns][STEP]; what lies past the end is zero.
    void pack(int64_t head, int64_t tile) const {
        Element* packed_keys = key_tile(head, tile);
        Element* packed_values = value_tile(head, tile);
        const int64_t first = tile * KEY_TILE, last = std::min(first + KEY_TILE, context_len);
        // Blocks before all windows may be other sequences' by now. A weight of zero does not silence NaN, so the first visible key is
        // packed in their place.
        const int64_t oldest = first_visible(context_len - num_queries);
        if (key_size % 32 == 0 && value_size % COLUMNS == 0) {
            alignas(64) T copies[2][LANES][MAX_CODES];
            float* const key_scales = tile_scales(head, tile);
            if (is_quantized) std::fill_n(key_scales, 2 * KEY_TILE, 0.0f);
            for (int64_t i = 0; i < KEY_TILE; i += LANES) {
                const T *key_rows[LANES] = {}, *value_rows[LANES] = {};
                const int64_t count = std::clamp<int64_t>(last - first - i, 0, LANES);
                for (int64_t r = 0; r < count; ++r) {
                    const int64_t position = std::max(first + i + r, oldest);
                    key_rows[r] = row(key_cache, position, head, key_size, copies[0][r], key_scales + i + r);
                    value_rows[r] = row(value_cache, position, head, value_size, copies[1][r], key_scales + KEY_TILE + i + r);
                }
                pack_keys(packed_keys + STEP * i, KEY_TILE, key_rows, count, key_size);
                pack_values(packed_values + i * value_columns(), value_rows, 0, count, value_size);
            }
            return;
        }
        std::memset(static_cast<void*>(packed_keys), 0, key_depth() * KEY_TILE * sizeof(Element));
        std::memset(static_cast<void*>(packed_values), 0, KEY_TILE * value_columns() * sizeof(Element));
        for (int64_t position = std::max(first, oldest); position < last; ++position) {
            const int64_t slot = int64_t{block_table[position / block_size]} * block_size + position % block_size;
            const T* key = key_cache + (slot * num_kv_heads + head) * key_size;
            const T* value = value_cache + (slot * num_kv_heads + head) * value_size;
            const int64_t i = position - first;
            for (int64_t d = 0; d < key_size; ++d) convert(packed_keys + (d / STEP) * KEY_TILE * STEP + i * STEP + d % STEP, key[d]);
            Element* row = packed_values + (i / STEP) * value_columns() * STEP + i % STEP;
            for (int64_t d = 0; d < value_size; ++d) convert(row + d * STEP, value[d]);
        }
    }

    // Whether products go by tiles: for all of a sequence's queries, or for none.
    bool by_tiles() const {
        return std::is_same_v<Element, BFloat16> && num_queries >= amx::use.attention_rows && key_size % 32 == 0;
    }

    // Of 64 columns, or at least of the first `num_columns`.
    template <bool ADDS>
    void multiply_at_once(float* sums, int64_t sums_stride, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t depth,
                          int64_t num_columns = COLUMNS) const {
#ifdef PENSTOCK_TILES
        if constexpr (std::is_same_v<Element, BFloat16>)
            if (by_tiles()) return multiply_by_tiles<ADDS>(sums, sums_stride, a, a_stride, b, b_stride, depth);
#endif
        constexpr int64_t VECTORS = std::min(TILE_VECTORS, COLUMNS / 2 / LANES);
        if (num_columns <= COLUMNS / 2) return multiply_columns<ADDS, ROWS, VECTORS>(sums, sums_stride, a, a_stride, b, b_stride, depth, COLUMNS / 2);
        multiply_columns<ADDS, ROWS>(sums, sums_stride, a, a_stride, b, b_stride, depth, COLUMNS);
    }

    // How many of a tile's keys any of these queries sees: of what comes after, weights are zeros.
    int64_t num_seen(int64_t tile, int64_t first_query, int64_t num_rows) const {
        return std::clamp<int64_t>(visible_end_of(first_query, num_rows) - tile * KEY_TILE, 0, KEY_TILE);
    }

    // One query head, one tile of queries, the keys that are packed.
    void attend(int64_t head, int64_t first_query) const {
        const int64_t num_rows = std::min(QUERY_TILE, num_queries - first_query);
        const int64_t rows_at_once = by_tiles() ? MOST_ROWS_AT_ONCE : ROWS, value_step = by_tiles() ? DEPTH_OF_TILES : STEP;
        const int64_t padded_rows = (num_rows + rows_at_once - 1) / rows_at_once * rows_at_once;
        const int64_t first_position = context_len - num_queries + first_query, last_key = visible_end_of_tile(first_query) - 1;
        const int64_t kv_head = head / (num_heads / num_kv_heads), columns = value_columns(), depth = key_depth();
        alignas(64) Element rows[QUERY_TILE * MAX_VALUE_SIZE];
        alignas(64) Element weights[QUERY_TILE * KEY_TILE];
        alignas(64) float scores[MOST_ROWS_AT_ONCE * KEY_TILE];
        alignas(64) float sums[QUERY_TILE * MAX_VALUE_SIZE], joined[QUERY_TILE * MAX_VALUE_SIZE];
        float maxima[QUERY_TILE], joined_maxima[QUERY_TILE], joined_totals[QUERY_TILE];
        Vector totals[QUERY_TILE];  // of each row's weights, added up lane by lane
#ifdef PENSTOCK_TILES
        if (by_tiles()) amx::configure(amx::ROWS, amx::ROW_BYTES);
#endif
        for (int64_t r = 0; r < num_rows; ++r) {
            const T* row = query + ((first_query + r) * num_heads + head) * key_size;
            for (int64_t d = 0; d < key_size; ++d) convert(rows + r * depth + d, row[d]);
            std::fill_n(rows + r * depth + key_size, depth - key_size, Element{});
        }
        std::fill_n(rows + num_rows * depth, (padded_rows - num_rows) * depth, Element{});
        std::fill_n(weights + num_rows * KEY_TILE, (padded_rows - num_rows) * KEY_TILE, Element{});
        const int64_t first_key_tile = first_visible(first_position) / KEY_TILE, end_key_tile = last_key / KEY_TILE + 1;
        const bool begins = first_key_tile >= first_tile, ends = end_key_tile <= end_tile;
        float* const state = begins && ends ? nullptr : states + (first_query / QUERY_TILE * num_heads + head) * state_size();
        float* const state_maxima = state + QUERY_TILE * columns;
        float* const state_totals = state_maxima + QUERY_TILE;
        bool has_joined = !begins || options.sinks;
        if (!begins) {
            std::memcpy(joined, state, num_rows * columns * sizeof(float));
            std::copy_n(state_maxima, num_rows, joined_maxima);
            std::copy_n(state_totals, num_rows, joined_totals);
        } else if (options.sinks) {
            std::memset(joined, 0, num_rows * columns * sizeof(float));
            std::fill_n(joined_maxima, num_rows, options.sinks[head] * LOG2_E);
            std::fill_n(joined_totals, num_rows, 1.0f);
        }
        const auto store = [&](int64_t r, const float* from, float total) {
            store_attended(out + ((first_query + r) * num_heads + head) * value_size, from + r * columns, total, value_size);
        };
        const int64_t begin = std::max(first_key_tile, first_tile), end = std::min(end_key_tile, end_tile);
        for (int64_t tile = begin; tile < end; ++tile) {
            if (tile == begin || tile % TILES_OF_PART == 0) {
                std::memset(sums, 0, padded_rows * columns * sizeof(float));
                std::fill_n(maxima, num_rows, HIDDEN);
                std::fill_n(totals, num_rows, Vector{});
            }
            const Element* packed_keys = key_tile(kv_head, tile);
            const Element* packed_values = value_tile(kv_head, tile);
            const float* const key_scales = tile_scales(kv_head, tile);
            int64_t seen[QUERY_TILE];  // of the rows from each of those on that a product begins with
            for (int64_t first = 0; first < num_rows; first += rows_at_once) {
                seen[first] = num_seen(tile, first_query + first, rows_at_once);
                if (seen[first] == 0) continue;
                multiply_at_once<false>(scores, KEY_TILE, rows + first * depth, depth, packed_keys, KEY_TILE * STEP, depth, seen[first]);
                for (int64_t r = first; r < std::min(first + rows_at_once, num_rows); ++r) {
                    const TileView view{first_visible(first_position + r) - tile * KEY_TILE, visible_end(first_query + r) - tile * KEY_TILE, key_scales,
                                        key_scales ? key_scales + KEY_TILE : nullptr};
                    weigh(scores + (r - first) * KEY_TILE, weights + r * KEY_TILE, sums + r * columns, maxima[r], totals[r], columns, view, options);
                }
            }
            for (int64_t column = 0; column < columns; column += COLUMNS)
                for (int64_t r = 0; r < num_rows; r += rows_at_once) {
                    if (seen[r] == 0) continue;
                    const int64_t value_depth = (seen[r] + value_step - 1) / value_step * value_step;
                    multiply_at_once<true>(sums + r * columns + column, columns, weights + r * KEY_TILE, KEY_TILE, packed_values + column * STEP,
                                           columns * STEP, value_depth);
                }
            if (tile + 1 < end && (tile + 1) % TILES_OF_PART != 0) continue;
            const bool is_only_part = !has_joined && ends && tile + 1 == end;
            for (int64_t r = 0; r < num_rows; ++r) {
                const float total = total_of(totals[r]);
                if (is_only_part) {
                    store(r, sums, total);
                } else if (has_joined) {
                    join(joined + r * columns, joined_totals[r], joined_maxima[r], sums + r * columns, total, maxima[r], columns);
                } else {
                    std::copy_n(sums + r * columns, columns, joined + r * columns);
                    joined_totals[r] = total;
                    joined_maxima[r] = maxima[r];
                }
            }
            if (is_only_part) return;
            has_joined = true;
        }
        if (!ends) {
            std::memcpy(state, joined, num_rows * columns * sizeof(float));
            std::copy_n(joined_maxima, num_rows, state_maxima);
            std::copy_n(joined_totals, num_rows, state_totals);
            return;
        }
        for (int64_t r = 0; r < num_rows; ++r) store(r, joined, joined_totals[r]);
    }
};

// All sequences at once: with one pair of parallel loops a round however many there are, short prompts do not wait for each other's last tile.
template <typename T>
void prefill(std::vector<Prefill<T>>& sequences) {
    using Element = typename Prefill<T>::Element;
    struct Task {
        const Prefill<T>* sequence;
        int64_t head, tile, num_keys;
    };
    int64_t size = 0, states_size = 0, num_rounds = 0;
    for (const auto& sequence : sequences) {
        size += sequence.keys_size() + sequence.values_size();
        states_size += sequence.states_size() + sequence.scales_size();
        num_rounds = std::max(num_rounds, sequence.num_rounds());
    }
    const std::unique_ptr<Element[]> packed(new Element[size]);
    const std::unique_ptr<float[]> states(new float[states_size]);
    Element* next = packed.get();
    float* next_states = states.get();
    for (auto& sequence : sequences) {
        sequence.keys = next;
        sequence.values = next + sequence.keys_size();
        next = sequence.values + sequence.values_size();
        sequence.states = next_states;
        sequence.scales = next_states + sequence.states_size();
        next_states = sequence.scales + sequence.scales_size();
    }
    std::vector<Task> pack_tasks, attend_tasks;
    for (int64_t round = 0; round < num_rounds; ++round) {
        pack_tasks.clear();
        attend_tasks.clear();
        for (auto& sequence : sequences) {
            sequence.first_tile = std::max(sequence.first_of_round(round), sequence.first_needed_tile());
            sequence.end_tile = std::min(sequence.first_of_round(round + 1), sequence.num_key_tiles());
            for (int64_t head = 0; head < sequence.num_kv_heads; ++head)
                for (int64_t tile = sequence.first_tile; tile < sequence.end_tile; ++tile) pack_tasks.push_back({&sequence, head, tile, KEY_TILE});
            for (int64_t first = 0; first < sequence.num_queries; first += QUERY_TILE)
                for (int64_t head = 0; head < sequence.num_heads && sequence.sees(first); ++head)
                    attend_tasks.push_back({&sequence, head, first, sequence.context_len - sequence.num_queries + first});
        }
        // The longest first, so that no thread is left with a long one at the end.
        std::stable_sort(attend_tasks.begin(), attend_tasks.end(), [](const Task& a, const Task& b) { return a.num_keys > b.num_keys; });
        const int64_t tile_size = KEY_TILE * (sequences[0].key_size + sequences[0].value_size);
        parallel_for(pack_tasks.size(), elementwise(tile_size), [&](int64_t i) {
            pack_tasks[i].sequence->pack(pack_tasks[i].head, pack_tasks[i].tile);
        });
        // At least a tile of keys for each.
        parallel_for<UNEQUAL>(attend_tasks.size(), multiplying(QUERY_TILE * tile_size), [&](int64_t i) {
            attend_tasks[i].sequence->attend(attend_tasks[i].head, attend_tasks[i].tile);
        });
    }
}

}  // namespace
