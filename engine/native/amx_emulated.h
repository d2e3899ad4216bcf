// What AMX's instructions compute, in portable code and to the bit: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2.
//
// Using tiles that are not configured, or with operands of other shapes, ends the program, as the processor would.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "vector.h"

namespace amx {
namespace {

struct EmulatedTile {
    int64_t rows, row_bytes;  // no rows: not configured
    alignas(64) uint8_t bytes[16][64];
};

thread_local EmulatedTile tiles[8];

inline EmulatedTile& configured(int tile) {
    if (tiles[tile].rows == 0) std::abort();
    return tiles[tile];
}

inline void load_configuration(const Configuration& configuration) {
    for (int tile = 0; tile < 8; ++tile) tiles[tile] = {configuration.rows[tile], configuration.row_bytes[tile], {}};
}

inline void release_registers() { std::memset(tiles, 0, sizeof(tiles)); }

template <int TILE>
inline void clear() {
    std::memset(configured(TILE).bytes, 0, sizeof(tiles[TILE].bytes));
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
    clear<TILE>();
    EmulatedTile& tile = tiles[TILE];
    for (int64_t row = 0; row < tile.rows; ++row) std::memcpy(tile.bytes[row], static_cast<const char*>(from) + row * stride, tile.row_bytes);
}

template <int TILE>
inline void store(void* to, int64_t stride) {
    const EmulatedTile& tile = configured(TILE);
    for (int64_t row = 0; row < tile.rows; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tile.bytes[row], tile.row_bytes);
}

inline void require_shapes(const EmulatedTile& sums, const EmulatedTile& left, const EmulatedTile& right) {
    if (sums.rows != left.rows || sums.row_bytes != right.row_bytes || left.row_bytes != 4 * right.rows) std::abort();
}

// Numbers too small for a normal exponent count as zeros, and so do such results.
inline Vector flush(const Vector& x) {
    return for_parts([&](int64_t p) {
        const UIntRegister bits = (UIntRegister)x.parts[p];
        return (Register)((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
    });
}

// Even and odd products are added up apart from each other, and the sum of both to the tile.
template <int SUMS, int LEFT, int RIGHT>
inline void add_bfloat16_products() {
    EmulatedTile &sums = configured(SUMS), &left = configured(LEFT), &right = configured(RIGHT);
    require_shapes(sums, left, right);
    const Vector one = broadcast(1.0f);
    for (int64_t m = 0; m < sums.rows; ++m) {
        Vector totals[2] = {};
        for (int64_t k = 0; k < right.rows; ++k)
            for (int64_t odd = 0; odd < 2; ++odd) {
                float x[LANES], y[LANES];
                for (int64_t n = 0; n < LANES; ++n) {
                    BFloat16 a, b;
                    std::memcpy(&a, &left.bytes[m][4 * k + 2 * odd], sizeof(a));
                    std::memcpy(&b, &right.bytes[k][4 * n + 2 * odd], sizeof(b));
                    x[n] = to_float(a);
                    y[n] = to_float(b);
                }
                totals[odd] = flush(multiply_add(flush(penstock::load(x)), flush(penstock::load(y)), totals[odd]));
            }
        float* const row = reinterpret_cast<float*>(sums.bytes[m]);
        const Vector total = flush(multiply_add(totals[0], one, totals[1]));  // by name, so that it is not added in another order
        convert(row, flush(multiply_add(total, one, flush(penstock::load(row)))));
    }
}

template <int SUMS, int LEFT, int RIGHT>
inline void add_byte_products() {
    EmulatedTile &sums = configured(SUMS), &left = configured(LEFT), &right = configured(RIGHT);
    require_shapes(sums, left, right);
    for (int64_t m = 0; m < sums.rows; ++m) {
        int32_t row[16];
        std::memcpy(row, sums.bytes[m], sizeof(row));
        for (int64_t k = 0; k < right.rows; ++k)
            for (int64_t n = 0; n < 16; ++n)
                for (int64_t i = 0; i < 4; ++i) row[n] += static_cast<int8_t>(left.bytes[m][4 * k + i]) * right.bytes[k][4 * n + i];
        std::memcpy(sums.bytes[m], row, sizeof(row));
    }
}

inline bool request() { return true; }

}  // namespace
}  // namespace amx
