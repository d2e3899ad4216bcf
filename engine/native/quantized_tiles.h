// Products with weights of 4, 5 or 8 bits by tiles of AMX, for 16 rows and more.
//
// A tile product sums the integers of one group of 32 columns: 16 rows of 32 bytes by a block's codes, which are a right factor as they lie in
// memory or once unpacked. Two groups would fit into a tile's 64 bytes, but each counts by its own scales. By the number of instructions, a
// block and 16 rows take 16 cycles for the product and, at the same time, 32 for scaling: three or four instructions a row, two in a cycle. By
// AVX-512's products it is 16 * (8 + 4) instructions, 96 cycles. To dequantize to bfloat16 instead would take about 100 cycles a block and then
// 16 for every 16 rows, so it pays for long prompts only, and what a row comes to would depend on how many rows there are. The integers and
// the order of additions here are those of quantized_vnni.h, so a row's result is the same to the bit, by whichever it is computed.

#pragma once

#include "amx.h"

#ifdef PENSTOCK_TILES

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"
#include "quantized_product.h"
#include "quantized_vnni.h"
#include "vector.h"

namespace {

constexpr int64_t BLOCK_CODES = TILE * GROUP;
constexpr int64_t GROUPS_AT_ONCE = 4;  // as many as there are tiles for sums

template <int BITS>
void unpack_codes(uint8_t* codes, const uint8_t* block) {
    for (int64_t i = 0; i < HALF_BYTES; ++i) {
        codes[i] = block[i] & 15;
        codes[HALF_BYTES + i] = block[i] >> 4;
    }
    if constexpr (BITS == 5) {
        const uint8_t* fifth_bits = block + HALF_BYTES;
#ifdef __AVX512VNNI__
        for (int64_t i = 0; i < BLOCK_CODES; i += 64)
            _mm512_storeu_si512(codes + i, add_sixteens(_mm512_loadu_si512(codes + i), fifth_bits + i / 8));
#else
        for (int64_t i = 0; i < BLOCK_CODES; ++i) codes[i] += (fifth_bits[i / 8] >> i % 8 & 1) * 16;
#endif
    }
}

struct Dots {
    alignas(64) int32_t of_groups[GROUPS_AT_ONCE][amx::ROWS][TILE];
};

template <int INDEX>
inline void multiply_group(Dots& dots, const RowGroup* x, int64_t row_bytes, const uint8_t* codes) {
    constexpr int LEFT = amx::FIRST_LEFT + INDEX % 2, RIGHT = amx::FIRST_RIGHT + INDEX % 2;
    amx::clear<INDEX>();
    amx::load<LEFT>(x->codes, row_bytes);
    amx::load<RIGHT>(codes, amx::ROW_BYTES);
    amx::add_byte_products<INDEX, LEFT, RIGHT>();
    amx::store<INDEX>(dots.of_groups[INDEX], amx::ROW_BYTES);
}

// 16 rows by one tile of the weight. The codes of its groups are `code_stride` bytes apart.
template <int BITS>
struct TileProduct {
    const QuantizedProduct& product;
    const RowGroup* x;
    const uint8_t *blocks, *codes;
    int64_t code_stride;

    void multiply_groups(Dots& dots, int64_t first, int64_t count) const {
        const int64_t row_bytes = product.num_groups * sizeof(RowGroup);
        const uint8_t* from = codes + first * code_stride;
        multiply_group<0>(dots, x + first, row_bytes, from);
        if (count > 1) multiply_group<1>(dots, x + first + 1, row_bytes, from + code_stride);
        if (count > 2) multiply_group<2>(dots, x + first + 2, row_bytes, from + 2 * code_stride);
        if (count > 3) multiply_group<3>(dots, x + first + 3, row_bytes, from + 3 * code_stride);
    }

    void add_groups(Vector (&sums)[amx::ROWS], const Dots& dots, int64_t first, int64_t count) const {
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t* numbers = blocks + (first + i) * BLOCK_BYTES<BITS> + CODE_BYTES<BITS>;
            const Vector scales = load_halves(numbers), minimums = BITS != 8 ? load_halves(numbers + 2 * TILE) : Vector{};
#pragma GCC unroll 16
            for (int64_t r = 0; r < amx::ROWS; ++r) {
                const RowGroup& row = x[r * product.num_groups + first + i];
                IntVector all;
                std::memcpy(&all, dots.of_groups[i][r], sizeof(all));
                if constexpr (BITS == 8)
                    for (int64_t p = 0; p < PARTS; ++p) all.parts[p] += row.offset;
                sums[r] = multiply_add(to_floats(all), scales * row.scale, sums[r]);
                if constexpr (BITS != 8) sums[r] = multiply_add(minimums, broadcast(row.sum), sums[r]);
            }
        }
    }

    // Some groups are scaled while the next are multiplied.
    void run(Vector (&sums)[amx::ROWS]) const {
        Dots dots[2];
        for (int64_t g = 0; g < product.num_groups + GROUPS_AT_ONCE; g += GROUPS_AT_ONCE) {
            const int64_t before = g - GROUPS_AT_ONCE, turn = g / GROUPS_AT_ONCE % 2;
            if (g < product.num_groups) multiply_groups(dots[turn], g, std::min(GROUPS_AT_ONCE, product.num_groups - g));
            if (g > 0) add_groups(sums, dots[1 - turn], before, std::min(GROUPS_AT_ONCE, product.num_groups - before));
        }
    }
};

template <typename T>
void start_sums(Vector (&sums)[amx::ROWS], const T* bias, int64_t count) {
    float start[TILE] = {};
    for (int64_t i = 0; bias && i < count; ++i) start[i] = to_float(bias[i]);
    for (Vector& sum : sums) sum = load(start);
}

template <typename T>
void store_sums(T* out, int64_t out_stride, const Vector (&sums)[amx::ROWS], int64_t count) {
    for (int64_t r = 0; r < amx::ROWS; ++r) {
        T numbers[TILE];
        convert(numbers, sums[r]);
        std::memcpy(static_cast<void*>(out + r * out_stride), numbers, count * sizeof(T));
    }
}

template <int BITS, typename T>
void multiply_quantized_rows(const QuantizedProduct& product, const uint8_t* codes, int64_t code_stride, int64_t first_row, int64_t tile) {
    const int64_t count = std::min(TILE, product.outputs - tile * TILE), first = tile * TILE;
    const uint8_t* blocks = product.blocks + tile * product.num_groups * BLOCK_BYTES<BITS>;
    const T* bias = static_cast<const T*>(product.bias);
    Vector sums[amx::ROWS];
    start_sums(sums, bias ? bias + first : nullptr, count);
    TileProduct<BITS>{product, product.rows + first_row * product.num_groups, blocks, codes, code_stride}.run(sums);
    store_sums(static_cast<T*>(product.out) + first_row * product.outputs + first, product.outputs, sums, count);
}

// A task is a tile of the weight, unpacked once, and 16 rows or more that stay in a core's cache. num_rows is at least 16.
template <int BITS>
void multiply_quantized_by_tiles(const QuantizedProduct& product, int64_t num_rows) {
    const int64_t num_tiles = (product.outputs + TILE - 1) / TILE, num_groups = product.num_groups;
    const int64_t chunk_rows = std::max<int64_t>(CHUNK_BYTES / (num_groups * sizeof(RowGroup)) / amx::ROWS, 2) * amx::ROWS;
    const int64_t num_chunks = std::max<int64_t>(num_rows / chunk_rows, 1);  // so that none has fewer
    const double products = multiplying(num_groups * TILE * GROUP * std::min(num_rows, chunk_rows)) * 2 / amx::SPEED;
    parallel_for(num_chunks * num_tiles, std::max(reading(num_groups * BLOCK_BYTES<BITS>), products), [&](int64_t task) {
        static thread_local std::vector<uint8_t> memory;
        const int64_t chunk = task / num_tiles, tile = task % num_tiles;
        const int64_t begin = num_rows * chunk / num_chunks, end = num_rows * (chunk + 1) / num_chunks;
        const uint8_t* codes = product.blocks + tile * num_groups * BLOCK_BYTES<BITS>;
        if constexpr (BITS != 8) {
            memory.resize(num_groups * BLOCK_CODES);
            for (int64_t g = 0; g < num_groups; ++g) unpack_codes<BITS>(&memory[g * BLOCK_CODES], codes + g * BLOCK_BYTES<BITS>);
            codes = memory.data();
        }
        const int64_t code_stride = BITS == 8 ? BLOCK_BYTES<BITS> : BLOCK_CODES;
        const auto multiply = product.is_bfloat16 ? &multiply_quantized_rows<BITS, BFloat16> : &multiply_quantized_rows<BITS, float>;
        amx::configure(amx::ROWS, GROUP);
        for (int64_t first = begin; first < end; first += amx::ROWS)
            multiply(product, codes, code_stride, std::min(first, end - amx::ROWS), tile);  // the last overlaps with the one before
    });
}

}  // namespace

#endif
