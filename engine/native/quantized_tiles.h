// Products with quantized weights by tiles of AMX, for 16 rows and more.
//
// A tile product sums the integers of the columns that share a scale, 32 or 16: 16 rows of so many bytes by a tile's codes, which are a right
// factor as they lie in memory or once unpacked. Two groups would fit into a tile's 64 bytes, but each counts by its own scales. By the number of instructions, a
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
#include "quantized_types.h"
#include "quantized_vnni.h"
#include "vector.h"

namespace {

constexpr int64_t PARTS_AT_ONCE = 4;  // as many as there are tiles for sums

// A tile of the weight whose codes have a byte each, and its scales and minimums as numbers. A part is the columns of a scale.
template <typename Type>
struct UnpackedTile {
    static constexpr int64_t SCALES = Type::Scales::SCALES, PART = GROUP / SCALES, PART_CODES = TILE * PART;

    std::vector<uint8_t> codes;
    std::vector<float> scales, minimums;

    void read(const uint8_t* block, int64_t num_groups) {
        codes.resize(num_groups * TILE * GROUP);
        scales.resize(num_groups * SCALES * TILE);
        minimums.resize(num_groups * TILE);
        for (int64_t g = 0; g < num_groups; g += Type::Scales::GROUPS, block += Type::BLOCK_BYTES) {
            typename Type::Scales numbers;
            numbers.read(block + Type::CODES);
            for (int64_t i = 0; i < Type::Scales::GROUPS; ++i) {
                unpack(&codes[(g + i) * TILE * GROUP], block + i * CODE_BYTES<Type::BITS>);
                for (int64_t part = 0; part < SCALES; ++part) convert(&scales[((g + i) * SCALES + part) * TILE], numbers.scale(i, part));
                if constexpr (Type::Scales::HAS_MINIMUMS) convert(&minimums[(g + i) * TILE], numbers.minimum(i));
            }
        }
    }

    static void unpack(uint8_t* to, const uint8_t* group) {
#ifdef __AVX512VNNI__
        for (int64_t step = 0; step < STEPS; ++step) _mm512_storeu_si512(to + 64 * step, codes_at<Type>(group, step));
#else
        for (int64_t i = 0; i < TILE * GROUP; ++i) to[i] = static_cast<uint8_t>(number_at<Type>(group, i) + Type::OFFSET);
#endif
    }
};

struct Dots {
    alignas(64) int32_t of_parts[PARTS_AT_ONCE][amx::ROWS][TILE];
};

// 16 rows by one tile of the weight.
template <typename Type>
struct TileProduct {
    using Tile = UnpackedTile<Type>;
    static constexpr int64_t SCALES = Tile::SCALES;

    const QuantizedProduct& product;
    const RowGroup* x;
    const Tile& tile;

    template <int INDEX>
    void multiply_part(Dots& dots, int64_t part) const {
        constexpr int LEFT = amx::FIRST_LEFT + INDEX % 2, RIGHT = amx::FIRST_RIGHT + INDEX % 2;
        amx::clear<INDEX>();
        amx::load<LEFT>(x[part / SCALES].codes + part % SCALES * Tile::PART, product.num_groups * sizeof(RowGroup));
        amx::load<RIGHT>(&tile.codes[part * Tile::PART_CODES], amx::ROW_BYTES);
        amx::add_byte_products<INDEX, LEFT, RIGHT>();
        amx::store<INDEX>(dots.of_parts[INDEX], amx::ROW_BYTES);
    }

    void multiply_parts(Dots& dots, int64_t first, int64_t count) const {
        multiply_part<0>(dots, first);
        if (count > 1) multiply_part<1>(dots, first + 1);
        if (count > 2) multiply_part<2>(dots, first + 2);
        if (count > 3) multiply_part<3>(dots, first + 3);
    }

    void add_parts(Vector (&all_sums)[amx::ROWS], const Dots& dots, int64_t first, int64_t count) const {
        Vector sums[amx::ROWS];  // in registers: an array that others may read is stored after each addition
#pragma GCC unroll 16
        for (int64_t r = 0; r < amx::ROWS; ++r) sums[r] = all_sums[r];
        for (int64_t i = 0; i < count; ++i) {
            const int64_t part = first + i, group = part / SCALES;
            const Vector scale = load(&tile.scales[part * TILE]), minimum = load(&tile.minimums[group * TILE]);
#pragma GCC unroll 16
            for (int64_t r = 0; r < amx::ROWS; ++r) {
                const RowGroup& row = x[r * product.num_groups + group];
                IntVector all;
                std::memcpy(&all, dots.of_parts[i][r], sizeof(all));
                for (int64_t p = 0; p < PARTS; ++p) all.parts[p] += correction<Type>(row, part % SCALES);
                sums[r] = multiply_add(to_floats(all), rounded_product(scale, broadcast(row.scale)), sums[r]);
                if constexpr (Type::Scales::HAS_MINIMUMS) sums[r] = multiply_add(minimum, broadcast(row.sum), sums[r]);
            }
        }
#pragma GCC unroll 16
        for (int64_t r = 0; r < amx::ROWS; ++r) all_sums[r] = sums[r];
    }

    // Some parts are scaled while the next are multiplied.
    void run(Vector (&sums)[amx::ROWS]) const {
        Dots dots[2];
        const int64_t num_parts = product.num_groups * SCALES;
        for (int64_t p = 0; p < num_parts + PARTS_AT_ONCE; p += PARTS_AT_ONCE) {
            const int64_t before = p - PARTS_AT_ONCE, turn = p / PARTS_AT_ONCE % 2;
            if (p < num_parts) multiply_parts(dots[turn], p, std::min(PARTS_AT_ONCE, num_parts - p));
            if (p > 0) add_parts(sums, dots[1 - turn], before, std::min(PARTS_AT_ONCE, num_parts - before));
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

template <typename Type, typename T>
void multiply_rows_by_tiles(const QuantizedProduct& product, const UnpackedTile<Type>& unpacked, int64_t first_row, int64_t tile) {
    const int64_t count = std::min(TILE, product.outputs - tile * TILE), first = tile * TILE;
    const T* bias = static_cast<const T*>(product.bias);
    Vector sums[amx::ROWS];
    start_sums(sums, bias ? bias + first : nullptr, count);
    TileProduct<Type>{product, product.rows + first_row * product.num_groups, unpacked}.run(sums);
    store_sums(static_cast<T*>(product.out) + first_row * product.stride + first, product.stride, sums, count);
}

// A task is a tile of the weight, unpacked once, and 16 rows or more that stay in a core's cache. num_rows is at least 16.
template <typename Type>
void multiply_by_tiles(const QuantizedProduct& product, int64_t num_rows) {
    const int64_t num_tiles = (product.outputs + TILE - 1) / TILE, num_groups = product.num_groups;
    const int64_t tile_bytes = num_groups / Type::Scales::GROUPS * Type::BLOCK_BYTES;
    const int64_t chunk_rows = std::max<int64_t>(CHUNK_BYTES / (num_groups * sizeof(RowGroup)) / amx::ROWS, 2) * amx::ROWS;
    const int64_t num_chunks = std::max<int64_t>(num_rows / chunk_rows, 1);  // so that none has fewer
    const double products = multiplying(num_groups * TILE * GROUP * std::min(num_rows, chunk_rows)) * 2 / amx::SPEED;
    parallel_for(num_chunks * num_tiles, std::max(reading(tile_bytes), products), [&](int64_t task) {
        static thread_local UnpackedTile<Type> unpacked;
        const int64_t chunk = task / num_tiles, tile = task % num_tiles;
        const int64_t begin = num_rows * chunk / num_chunks, end = num_rows * (chunk + 1) / num_chunks;
        unpacked.read(product.blocks + tile * tile_bytes, num_groups);
        const auto multiply = product.is_bfloat16 ? &multiply_rows_by_tiles<Type, BFloat16> : &multiply_rows_by_tiles<Type, float>;
        amx::configure(amx::ROWS, UnpackedTile<Type>::PART);
        for (int64_t first = begin; first < end; first += amx::ROWS)
            multiply(product, unpacked, std::min(first, end - amx::ROWS), tile);  // the last overlaps with the one before
    });
}

}  // namespace

#endif
