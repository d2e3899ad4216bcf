// Products with quantized weights, a group of codes at a time, without AVX-512's instruction for them. Four rows at a time are multiplied by codes as
// they are unpacked, or by eight groups that are unpacked once for up to 48 rows, whichever is faster.

#pragma once

#ifndef __AVX512VNNI__

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "quantized_block.h"
#include "quantized_product.h"
#include "vector.h"

namespace {

constexpr int64_t PANEL_GROUPS = 8;
constexpr int64_t PANEL_ROWS = 48;  // whose sums stay in the nearest cache beside a panel

// Up to so many rows, codes are unpacked again for every four. Where their bits lie together, that is about as fast as loading them, which leaves
// less to gain the fewer instructions their products take.
template <typename Type>
constexpr int64_t rows_without_panel() {
    [[maybe_unused]] constexpr bool IS_SPLIT = Type::BITS == 5 || Type::BITS == 6;
#if defined(PENSTOCK_MULTIPLIES_PAIRS)
    return BLOCK_ROWS;
#elif defined(__AVXVNNI__) || defined(__AVX512F__)
    return IS_SPLIT ? BLOCK_ROWS : std::numeric_limits<int64_t>::max();
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
    return IS_SPLIT ? BLOCK_ROWS : 3 * BLOCK_ROWS;
#else
    return BLOCK_ROWS;
#endif
}

// Adds sums of products, multiplied by their scales, to results. Compilers keep those in registers only if whole rows are added as such.
template <int ROWS>
struct AddScaled {
    const Vector& scales;
    const RowGroup* x;
    int64_t stride;
    Vector (&results)[ROWS];

    void operator()(int row, const IntVector& sums) const {
        results[row] = multiply_add(to_floats(sums), rounded_product(scales, broadcast(x[row * stride].scale)), results[row]);
    }

    void operator()(int row, int64_t i, IntRegister sums) const {
        const Register scale = rounded_product(scales.parts[i], Register{} + x[row * stride].scale);
        results[row].parts[i] = multiply_add(__builtin_convertvector(sums, Register), scale, results[row].parts[i]);
    }
};

// Scales of a tile's group for all rows.
template <typename Type>
struct GroupScales {
    Vector scales[Type::Scales::SCALES], minimum;

    GroupScales() = default;

    GroupScales(const typename Type::Scales& from, int64_t group) {
        for (int64_t part = 0; part < Type::Scales::SCALES; ++part) scales[part] = from.scale(group, part);
        if constexpr (Type::Scales::HAS_MINIMUMS) minimum = from.minimum(group);
    }

    // Adds rows' products with the group, whose codes are those of GroupCodes or of PanelCodes.
    template <typename Codes, int ROWS, typename Read>
    inline __attribute__((always_inline)) void add_products(Vector (&sums)[ROWS], const RowGroup* x, int64_t stride, const Read& read) const {
#pragma GCC unroll 2
        for (int64_t part = 0; part < Type::Scales::SCALES; ++part) {
            Codes::template multiply<ROWS>(x, stride, part, read, AddScaled<ROWS>{scales[part], x, stride, sums});
        }
        if constexpr (Type::Scales::HAS_MINIMUMS) {
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) sums[r] = multiply_add(minimum, broadcast(x[r * stride].sum), sums[r]);
        }
    }
};

// Some groups of a tile.
template <typename Type>
struct Panel {
    using Codes = PanelCodes<Type>;

    typename Codes::Code codes[PANEL_GROUPS][Codes::NUM_STEPS][Codes::REGISTERS];
    GroupScales<Type> scales[PANEL_GROUPS];

    void read(const uint8_t* block, int64_t num_blocks) {
        for (int64_t b = 0, place = 0; b < num_blocks; ++b, block += Type::BLOCK_BYTES) {
            typename Type::Scales numbers;
            numbers.read(block + Type::CODES);
            for (int64_t g = 0; g < Type::Scales::GROUPS; ++g, ++place) {
                scales[place] = GroupScales<Type>(numbers, g);
#pragma GCC unroll 8
                for (int64_t step = 0; step < Codes::NUM_STEPS; ++step)
#pragma GCC unroll 8
                    for (int64_t i = 0; i < Codes::REGISTERS; ++i)
                        codes[place][step][i] = Codes::read(block + g * CODE_BYTES<Type::BITS>, step, i);
            }
        }
    }

    template <int ROWS>
    void add_products(Vector* to, const RowGroup* x, int64_t stride, int64_t count) const {
        Vector sums[ROWS];
        for (int r = 0; r < ROWS; ++r) sums[r] = to[r];
        for (int64_t g = 0; g < count; ++g)
            scales[g].template add_products<Codes, ROWS>(sums, x + g, stride, [&](int64_t step, int64_t i) { return codes[g][step][i]; });
        for (int r = 0; r < ROWS; ++r) to[r] = sums[r];
    }
};

inline void store_tile(const QuantizedProduct& product, int64_t first_row, int64_t tile, const Vector* sums, int64_t num_rows) {
    const int64_t count = std::min(TILE, product.outputs - tile * TILE);
    for (int64_t r = 0; r < num_rows; ++r) {
        float numbers[TILE];
        convert(numbers, sums[r]);
        if (product.is_bfloat16) {
            product.store_as<BFloat16>(first_row + r, tile, numbers, count);
        } else {
            product.store_as<float>(first_row + r, tile, numbers, count);
        }
    }
}

template <typename Type, int ROWS>
void multiply_unpacking(const QuantizedProduct& product, int64_t first_row, int64_t tile) {
    using Codes = GroupCodes<Type>;
    using Scales = typename Type::Scales;
    constexpr int64_t GROUP_BYTES = Type::BLOCK_BYTES / Scales::GROUPS;
    const int64_t num_groups = product.num_groups, num_blocks = num_groups / Scales::GROUPS, tile_bytes = num_blocks * Type::BLOCK_BYTES;
    const int64_t ahead = tile_bytes <= MOST_AHEAD ? tile_bytes : NEAR_AHEAD;
    const uint8_t* block = product.blocks + tile * tile_bytes;
    const RowGroup* x = product.rows + first_row * num_groups;
    Vector sums[ROWS] = {};
    for (int64_t b = 0; b < num_blocks; ++b, block += Type::BLOCK_BYTES) {
        Scales scales;
        scales.read(block + Type::CODES);
        for (int64_t g = 0; g < Scales::GROUPS; ++g, ++x) {
            const uint8_t* group = block + g * CODE_BYTES<Type::BITS>;
            GroupScales<Type>(scales, g).template add_products<Codes, ROWS>(
                sums, x, num_groups, [&](int64_t step, int64_t i) { return Codes::read(group, step, i); });
            fetch_lines(block + g * GROUP_BYTES + ahead, GROUP_BYTES);
            product.fetch_following(b * Scales::GROUPS + g);
        }
    }
    store_tile(product, first_row, tile, sums, ROWS);
}

// Calls multiply(first, count) for some rows at a time: one where there is only one, or two to four.
template <typename Multiply>
inline void for_turns(int64_t num_rows, const Multiply& multiply) {
    static_assert(BLOCK_ROWS == 4);
    const int64_t num_turns = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t i = 0; i < num_turns; ++i) {
        const int64_t first = num_rows * i / num_turns;
        switch (num_rows * (i + 1) / num_turns - first) {
            case 1: multiply(first, std::integral_constant<int, 1>{}); break;
            case 2: multiply(first, std::integral_constant<int, 2>{}); break;
            case 3: multiply(first, std::integral_constant<int, 3>{}); break;
            default: multiply(first, std::integral_constant<int, 4>{});
        }
    }
}

// At most PANEL_ROWS rows, and more than BLOCK_ROWS.
template <typename Type>
void multiply_by_panels(const QuantizedProduct& product, int64_t first_row, int64_t num_rows, int64_t tile) {
    constexpr int64_t PANEL_BLOCKS = PANEL_GROUPS / Type::Scales::GROUPS, PANEL_BYTES = PANEL_BLOCKS * Type::BLOCK_BYTES;
    const int64_t num_groups = product.num_groups, num_blocks = num_groups / Type::Scales::GROUPS;
    const uint8_t* block = product.blocks + tile * num_blocks * Type::BLOCK_BYTES;
    Vector sums[PANEL_ROWS] = {};
    Panel<Type> panel;
    for (int64_t b = 0; b < num_blocks; b += PANEL_BLOCKS, block += PANEL_BYTES) {
        const int64_t count = std::min(PANEL_BLOCKS, num_blocks - b), first_group = b * Type::Scales::GROUPS;
        const uint8_t* const next = block + count * Type::BLOCK_BYTES;
        panel.read(block, count);
        for_turns(num_rows, [&](int64_t first, auto rows) {
            fetch_lines(next + PANEL_BYTES * first / num_rows, PANEL_BYTES * rows / num_rows);
            const RowGroup* x = product.rows + (first_row + first) * num_groups + first_group;
            panel.template add_products<rows>(sums + first, x, num_groups, count * Type::Scales::GROUPS);
        });
        for (int64_t g = 0; g < count * Type::Scales::GROUPS; ++g) product.fetch_following(first_group + g);
    }
    store_tile(product, first_row, tile, sums, num_rows);
}

// The order of additions does not depend on the number of rows, so neither does the result.
template <typename Type>
void QuantizedProduct::multiply_block(int64_t first_row, int64_t num_rows, int64_t first_tile, int64_t num_tiles) const {
    for (int64_t tile = first_tile; tile < first_tile + num_tiles; ++tile) {
        if (num_rows <= rows_without_panel<Type>()) {
            for_turns(num_rows, [&](int64_t first, auto rows) { multiply_unpacking<Type, rows>(*this, first_row + first, tile); });
            continue;
        }
        const int64_t num_parts = (num_rows + PANEL_ROWS - 1) / PANEL_ROWS;
        for (int64_t i = 0; i < num_parts; ++i) {
            const int64_t first = num_rows * i / num_parts, last = num_rows * (i + 1) / num_parts;
            multiply_by_panels<Type>(*this, first_row + first, last - first, tile);
        }
    }
}

}  // namespace

#endif
