// Linear layers over weights of bfloat16 that are laid out in panels of 32 outputs, for any number of rows: one pass over the weight, which
// for few rows takes as long as reading it from memory does, and for many is bound by the processor's products.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "amx.h"
#include "common.h"
#include "parallel.h"
#include "tile.h"
#include "vector.h"

namespace {

constexpr int64_t PANEL = 32;        // outputs that are computed together: two vectors of sums for every row
constexpr int64_t PANEL_VECTORS = PANEL / LANES;
constexpr int64_t ROW_TILE = WIDTH == 16 ? 12 : 3;  // rows that are: as many as registers hold the sums of
constexpr int64_t ROW_CHUNK = 192;   // rows that stay in the processor's cache while the panels pass by

template <int64_t ROWS>
void store_panel_sums(BFloat16* out, int64_t out_stride, const Vector (&sums)[ROWS][PANEL_VECTORS], const BFloat16* bias, int64_t columns) {
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t v = 0; v < PANEL_VECTORS && LANES * v < columns; ++v)
            convert(out + r * out_stride + LANES * v, bias ? sums[r][v] + load(bias + LANES * v) : sums[r][v]);
}

// out[ROWS][columns] = x[ROWS][inputs] times one panel, [inputs / 2][PANEL][2], plus the bias.
template <int64_t ROWS>
void multiply_panel(BFloat16* out, int64_t out_stride, const Factor* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs, int64_t columns) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    multiply_tile(sums, x, inputs, panel, 2 * PANEL, inputs);
    store_panel_sums(out, out_stride, sums, bias, columns);
}

using PanelKernel = decltype(&multiply_panel<1>);

template <int64_t... ROWS>
constexpr std::array<PanelKernel, sizeof...(ROWS)> panel_kernels(std::integer_sequence<int64_t, ROWS...>) {
    return {multiply_panel<ROWS + 1>...};
}

inline void multiply_rows(BFloat16* out, int64_t out_stride, const Factor* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs,
                          int64_t columns, int64_t num_rows) {
    static constexpr auto kernels = panel_kernels(std::make_integer_sequence<int64_t, ROW_TILE>());
    for (int64_t first = 0; first < num_rows; first += ROW_TILE) {
        const int64_t rows = std::min(ROW_TILE, num_rows - first);
        kernels[rows - 1](out + first * out_stride, out_stride, x + first * inputs, panel, bias, inputs, columns);
    }
}

#ifdef PENSTOCK_TILES

// The same by tiles, for one or two of rows. A panel's rows are as right factors have them. Two of rows times two of columns take four loads for
// four products, and a load from the nearest cache takes half of a product's 16 cycles.
template <int ROW_TILES>
void multiply_panel_by_tiles(BFloat16* out, int64_t out_stride, const BFloat16* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs,
                             int64_t columns, int64_t tile_rows) {
    constexpr int64_t panel_stride = 2 * PANEL * sizeof(BFloat16);
    const int64_t x_stride = inputs * sizeof(BFloat16);
    amx::clear<0>();
    amx::clear<1>();
    if constexpr (ROW_TILES == 2) {
        amx::clear<2>();
        amx::clear<3>();
    }
    for (int64_t k = 0; k < inputs; k += amx::NUMBERS) {
        amx::load<4>(x + k, x_stride);
        amx::load<6>(panel + k * PANEL, panel_stride);
        amx::load<7>(panel + k * PANEL + 2 * amx::COLUMNS, panel_stride);
        amx::add_bfloat16_products<0, 4, 6>();
        amx::add_bfloat16_products<1, 4, 7>();
        if constexpr (ROW_TILES == 2) {
            amx::load<5>(x + amx::ROWS * inputs + k, x_stride);
            amx::add_bfloat16_products<2, 5, 6>();
            amx::add_bfloat16_products<3, 5, 7>();
        }
    }
    alignas(64) float sums[ROW_TILES * amx::ROWS][PANEL];
    amx::store<0>(sums[0], sizeof(sums[0]));
    amx::store<1>(sums[0] + amx::COLUMNS, sizeof(sums[0]));
    if constexpr (ROW_TILES == 2) {
        amx::store<2>(sums[amx::ROWS], sizeof(sums[0]));
        amx::store<3>(sums[amx::ROWS] + amx::COLUMNS, sizeof(sums[0]));
    }
    for (int64_t r = 0; r < (ROW_TILES == 2 ? 2 * amx::ROWS : tile_rows); ++r)
        for (int64_t i = 0; i < std::min(PANEL, columns); i += LANES)
            convert(out + r * out_stride + i, bias ? load(sums[r] + i) + load(bias + i) : load(sums[r] + i));
}

// A row's result depends on nothing but the row: whichever place in a tile it has, the processor adds up the same products in the same order.
inline void multiply_rows_by_tiles(BFloat16* out, int64_t out_stride, const BFloat16* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs,
                                   int64_t columns, int64_t num_rows) {
    const int64_t tile_rows = std::min(num_rows, amx::ROWS);
    amx::configure(tile_rows, amx::ROW_BYTES);
    int64_t first = 0;
    for (; first + 2 * amx::ROWS <= num_rows; first += 2 * amx::ROWS)
        multiply_panel_by_tiles<2>(out + first * out_stride, out_stride, x + first * inputs, panel, bias, inputs, columns, tile_rows);
    for (; first < num_rows; first += amx::ROWS) {
        const int64_t begin = std::min(first, num_rows - tile_rows);  // the last tile overlaps with the one before rather than be shorter
        multiply_panel_by_tiles<1>(out + begin * out_stride, out_stride, x + begin * inputs, panel, bias, inputs, columns, tile_rows);
    }
}

#endif

inline bool goes_by_tiles([[maybe_unused]] int64_t num_rows, [[maybe_unused]] int64_t inputs) {
#ifdef PENSTOCK_TILES
    return num_rows >= amx::use.bfloat16_rows && inputs % amx::NUMBERS == 0;
#else
    return false;
#endif
}

// Rows as they are multiplied: the given ones or, where float32 is, copies that last until the thread's next call.
inline const BFloat16* factors(const BFloat16* x, int64_t, int64_t, const BFloat16*) { return x; }

inline const float* factors(const BFloat16* x, int64_t num_rows, int64_t inputs, const float*) {
    static thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < num_rows * inputs) memory.resize(num_rows * inputs);
    float* const copies = memory.data();
    parallel_for(num_rows, elementwise(inputs), [&](int64_t row) {
        for (int64_t i = row * inputs; i < (row + 1) * inputs; ++i) copies[i] = to_float(x[i]);
    });
    return copies;
}

// out [num_rows, outputs] and x [num_rows, inputs] are contiguous; panel(p) is panel p of the weight, until it is called again in the same
// thread: [inputs / 2, 32, 2], zero beyond the last output. In memory, a panel takes panel_bytes. bias [outputs], or null. inputs is even,
// outputs a multiple of 16.
template <typename Panel>
void multiply_panels(BFloat16* out, const BFloat16* x, const Panel& panel, int64_t panel_bytes, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                     int64_t outputs) {
    const int64_t num_panels = (outputs + PANEL - 1) / PANEL;
    const int64_t num_chunks = (num_rows + ROW_CHUNK - 1) / ROW_CHUNK;
    const int64_t panel_size = inputs * PANEL;
    const auto for_panels = [&](const auto* rows, double products, const auto& multiply) {
        parallel_for(num_chunks * num_panels, std::max(reading(panel_bytes), products), [&](int64_t task) {
            const int64_t p = task % num_panels, first = task / num_panels * ROW_CHUNK;
            multiply(out + first * outputs + p * PANEL, outputs, rows + first * inputs, panel(p), bias ? bias + p * PANEL : nullptr,
                     inputs, std::min(PANEL, outputs - p * PANEL), std::min(ROW_CHUNK, num_rows - first));
        });
    };
    const double products = multiplying(panel_size * std::min(num_rows, ROW_CHUNK));
#ifdef PENSTOCK_TILES
    if (goes_by_tiles(num_rows, inputs)) return for_panels(x, products / amx::SPEED, multiply_rows_by_tiles);
#endif
    for_panels(factors(x, num_rows, inputs, static_cast<const Factor*>(nullptr)), products, multiply_rows);
}

// The weight is [outputs / 32 rounded up, inputs / 2, 32, 2].
inline void panel_linear(BFloat16* out, const BFloat16* x, const BFloat16* weight, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                         int64_t outputs) {
    const auto panel = [&](int64_t p) { return weight + p * inputs * PANEL; };
    multiply_panels(out, x, panel, inputs * PANEL * sizeof(BFloat16), bias, num_rows, inputs, outputs);
}

// The same with a weight for each group of rows: those from starts[g] to starts[g + 1] are multiplied by weight g. Weights lie side by side, and so
// do biases. One loop computes all groups: where each has few rows, one for each would mostly be waiting.
inline void grouped_panel_linear(BFloat16* out, const BFloat16* x, const BFloat16* weights, const BFloat16* bias, const int64_t* starts,
                                 int64_t num_weights, int64_t inputs, int64_t outputs) {
    struct Piece {
        int64_t weight, first, num_rows;
    };
    const int64_t num_panels = (outputs + PANEL - 1) / PANEL, panel_size = inputs * PANEL, num_all = starts[num_weights];
    std::vector<Piece> pieces;
    for (int64_t w = 0; w < num_weights; ++w)
        for (int64_t first = starts[w]; first < starts[w + 1]; first += ROW_CHUNK)
            pieces.push_back({w, first, std::min(ROW_CHUNK, starts[w + 1] - first)});
    if (pieces.empty()) return;
    const Factor* rows = factors(x, num_all, inputs, static_cast<const Factor*>(nullptr));
    const double products = multiplying(panel_size * num_all / static_cast<int64_t>(pieces.size()));
    parallel_for<UNEQUAL>(pieces.size() * num_panels, std::max(reading(panel_size * sizeof(BFloat16)), products), [&](int64_t task) {
        const Piece& piece = pieces[task / num_panels];
        const int64_t p = task % num_panels, columns = std::min(PANEL, outputs - p * PANEL);
        const BFloat16* panel = weights + (piece.weight * num_panels + p) * panel_size;
        const BFloat16* panel_bias = bias ? bias + piece.weight * outputs + p * PANEL : nullptr;
        BFloat16* to = out + piece.first * outputs + p * PANEL;
#ifdef PENSTOCK_TILES
        if (goes_by_tiles(starts[piece.weight + 1] - starts[piece.weight], inputs))
            return multiply_rows_by_tiles(to, outputs, x + piece.first * inputs, panel, panel_bias, inputs, columns, piece.num_rows);
#endif
        multiply_rows(to, outputs, rows + piece.first * inputs, panel, panel_bias, inputs, columns, piece.num_rows);
    });
}

}  // namespace
