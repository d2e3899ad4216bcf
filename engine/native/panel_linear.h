// Linear layers over weights of bfloat16 that are laid out in panels of 32 outputs, for any number of rows: one pass over the weight, which
// for few rows takes as long as reading it from memory does, and for many is bound by the processor's products.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "common.h"
#include "parallel.h"
#include "tile.h"
#include "vector.h"

namespace {

constexpr int64_t PANEL = 32;        // outputs that are computed together: two vectors of sums for every row
constexpr int64_t PANEL_VECTORS = PANEL / LANES;
constexpr int64_t ROW_TILE = WIDTH == 16 ? 12 : 3;  // rows that are: as many as registers hold the sums of
constexpr int64_t ROW_CHUNK = 192;   // rows that stay in the processor's cache while the panels pass by

// out[ROWS][columns] = x[ROWS][inputs] times one panel, [inputs / 2][PANEL][2], plus the bias.
template <int64_t ROWS>
void multiply_panel(BFloat16* out, int64_t out_stride, const Factor* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs, int64_t columns) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    multiply_tile(sums, x, inputs, panel, 2 * PANEL, inputs);
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t v = 0; v < PANEL_VECTORS && LANES * v < columns; ++v)
            convert(out + r * out_stride + LANES * v, bias ? sums[r][v] + load(bias + LANES * v) : sums[r][v]);
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

// out [num_rows, outputs] and x [num_rows, inputs] are contiguous; weight [outputs / 32 rounded up, inputs / 2, 32, 2], zero beyond the last
// output; bias [outputs], or null. inputs is even, outputs a multiple of 16.
inline void panel_linear(BFloat16* out, const BFloat16* x, const BFloat16* weight, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                         int64_t outputs) {
    const Factor* rows = factors(x, num_rows, inputs, static_cast<const Factor*>(nullptr));
    const int64_t num_panels = (outputs + PANEL - 1) / PANEL;
    const int64_t num_chunks = (num_rows + ROW_CHUNK - 1) / ROW_CHUNK;
    const int64_t panel_size = inputs * PANEL;
    const double nanoseconds = std::max(reading(panel_size * sizeof(BFloat16)), multiplying(panel_size * std::min(num_rows, ROW_CHUNK)));
    parallel_for(num_chunks * num_panels, nanoseconds, [&](int64_t task) {
        const int64_t p = task % num_panels, first = task / num_panels * ROW_CHUNK;
        multiply_rows(out + first * outputs + p * PANEL, outputs, rows + first * inputs, weight + p * inputs * PANEL,
                      bias ? bias + p * PANEL : nullptr, inputs, std::min(PANEL, outputs - p * PANEL), std::min(ROW_CHUNK, num_rows - first));
    });
}

}  // namespace
