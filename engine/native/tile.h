// The product of a few rows with packed columns, whose sums stay in registers: what linear layers and attention are made of.

#pragma once

#include <cstdint>
#include <type_traits>

#include "common.h"
#include "vector.h"

namespace {

// The first or second number of each of sixteen pairs.
template <int SECOND>
inline Vector of_pairs(const BFloat16* pairs) {
    return for_parts([&](int64_t p) {
        const UIntRegister both = *reinterpret_cast<const Words*>(pairs + 2 * WIDTH * p);
        return (Register)(SECOND ? both & 0xffff0000u : both << 16);
    });
}

// What a product does in each of its steps besides: nothing.
struct Nothing {
    void operator()() const {}
};

// tile[ROWS][16 * VECTORS] += a[ROWS][depth] * b, both of float32: b's rows are `b_stride` apart, a's `a_stride`.
template <int64_t ROWS, int64_t VECTORS, typename Besides = Nothing>
inline void multiply_tile(Vector (&tile)[ROWS][VECTORS], const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                          const Besides& besides = {}) {
    for (int64_t k = 0; k < depth; ++k) {
        besides();
        Vector columns[VECTORS];
#pragma GCC unroll 8
        for (int64_t v = 0; v < VECTORS; ++v) columns[v] = load(b + k * b_stride + LANES * v);
#pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; ++r) {
            const Vector x = broadcast(a[r * a_stride + k]);
#pragma GCC unroll 8
            for (int64_t v = 0; v < VECTORS; ++v) tile[r][v] = multiply_add(x, columns[v], tile[r][v]);
        }
    }
}

// The same with b in bfloat16, two steps side by side: a row of pairs is `b_stride` after the one before.
template <int64_t ROWS, int64_t VECTORS, typename Besides = Nothing>
inline void multiply_tile(Vector (&tile)[ROWS][VECTORS], const float* a, int64_t a_stride, const BFloat16* b, int64_t b_stride, int64_t depth,
                          const Besides& besides = {}) {
    for (int64_t k = 0; k < depth; k += 2) {
        besides();
        const BFloat16* row = b + k / 2 * b_stride;
#pragma GCC unroll 8
        for (int64_t v = 0; v < VECTORS; ++v) {
            const Vector first = of_pairs<0>(row + 2 * LANES * v);
#pragma GCC unroll 12
            for (int64_t r = 0; r < ROWS; ++r) tile[r][v] = multiply_add(broadcast(a[r * a_stride + k]), first, tile[r][v]);
            const Vector second = of_pairs<1>(row + 2 * LANES * v);
#pragma GCC unroll 12
            for (int64_t r = 0; r < ROWS; ++r) tile[r][v] = multiply_add(broadcast(a[r * a_stride + k + 1]), second, tile[r][v]);
        }
    }
}

#ifdef PENSTOCK_BFLOAT16_PRODUCTS
// The same with both in bfloat16.
template <int64_t ROWS, int64_t VECTORS, typename Besides = Nothing>
inline void multiply_tile(Vector (&tile)[ROWS][VECTORS], const BFloat16* a, int64_t a_stride, const BFloat16* b, int64_t b_stride, int64_t depth,
                          const Besides& besides = {}) {
    for (int64_t k = 0; k < depth; k += 2) {
        besides();
        const BFloat16* row = b + k / 2 * b_stride;
        Pairs columns[VECTORS];
#pragma GCC unroll 8
        for (int64_t v = 0; v < VECTORS; ++v) columns[v] = load_pairs(row + 2 * LANES * v);
#pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; ++r) {
            const Pairs x = broadcast_pair(a + r * a_stride + k);
#pragma GCC unroll 8
            for (int64_t v = 0; v < VECTORS; ++v) tile[r][v] = add_products(tile[r][v], x, columns[v]);
        }
    }
}
#endif

constexpr int64_t TILE_VECTORS = WIDTH == 16 ? 4 : 1;  // of a register tile's columns: as many as registers hold the sums of six rows of

// sums[ROWS][columns] = or += a[ROWS][depth] * b[depth][columns]; a's rows are `a_stride` apart, b's rows are packed. `columns` is a multiple of
// 16 VECTORS.
template <bool ADDS, int64_t ROWS, int64_t VECTORS = TILE_VECTORS, typename Element, typename Besides = Nothing>
inline void multiply_columns(float* sums, int64_t sums_stride, const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t depth,
                             int64_t columns, const Besides& besides = {}) {
    constexpr int64_t step = std::is_same_v<Element, BFloat16> ? 2 : 1;
    for (int64_t column = 0; column < columns; column += LANES * VECTORS) {
        Vector tile[ROWS][VECTORS];
        for (int64_t r = 0; r < ROWS; ++r)
            for (int64_t v = 0; v < VECTORS; ++v) tile[r][v] = ADDS ? load(sums + r * sums_stride + column + LANES * v) : Vector{};
        multiply_tile(tile, a, a_stride, b + column * step, b_stride, depth, besides);
        for (int64_t r = 0; r < ROWS; ++r)
            for (int64_t v = 0; v < VECTORS; ++v) convert(sums + r * sums_stride + column + LANES * v, tile[r][v]);
    }
}

}  // namespace
