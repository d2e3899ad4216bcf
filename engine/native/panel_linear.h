// Linear layers over weights of bfloat16 that are laid out in panels of 32 outputs, for any number of rows: one pass over the weight, which
// for few rows takes as long as reading it from memory does, and for many is bound by AVX-512's bfloat16 products.

#pragma once

#ifdef __AVX512BF16__

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "parallel.h"
#include "vector.h"

namespace {

constexpr int64_t PANEL = 32;        // outputs that are computed together: two vectors of sums for every row
constexpr int64_t ROW_TILE = 12;     // rows that are: as many as registers hold the sums of
constexpr int64_t ROW_CHUNK = 192;   // rows that stay in the processor's cache while the panels pass by

// out[ROWS][columns] = x[ROWS][inputs] times one panel, [inputs / 2][PANEL][2], plus the bias.
template <int64_t ROWS>
void multiply_panel(BFloat16* out, int64_t out_stride, const BFloat16* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs, int64_t columns) {
    __m512 sums[ROWS][2];
    for (int64_t r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t i = 0; i < inputs; i += 2) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(panel + i * PANEL), high = (__m512bh)_mm512_loadu_si512(panel + i * PANEL + 32);
#pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; ++r) {
            int32_t pair;
            std::memcpy(&pair, x + r * inputs + i, sizeof(pair));
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, low);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, high);
        }
    }
    for (int64_t r = 0; r < ROWS; ++r)
        for (int64_t v = 0; v < 2 && 16 * v < columns; ++v) {
            const __m512 sum = bias ? sums[r][v] + load_floats(bias + 16 * v) : sums[r][v];
            convert(out + r * out_stride + 16 * v, (Vector)sum);
        }
}

inline void multiply_rows(BFloat16* out, int64_t out_stride, const BFloat16* x, const BFloat16* panel, const BFloat16* bias, int64_t inputs,
                          int64_t columns, int64_t num_rows) {
    using Kernel = decltype(&multiply_panel<1>);
    static constexpr Kernel kernels[ROW_TILE] = {multiply_panel<1>, multiply_panel<2>, multiply_panel<3>,  multiply_panel<4>,
                                                 multiply_panel<5>, multiply_panel<6>, multiply_panel<7>,  multiply_panel<8>,
                                                 multiply_panel<9>, multiply_panel<10>, multiply_panel<11>, multiply_panel<12>};
    for (int64_t first = 0; first < num_rows; first += ROW_TILE) {
        const int64_t rows = std::min(ROW_TILE, num_rows - first);
        kernels[rows - 1](out + first * out_stride, out_stride, x + first * inputs, panel, bias, inputs, columns);
    }
}

// out [num_rows, outputs] and x [num_rows, inputs] are contiguous; weight [outputs / 32 rounded up, inputs / 2, 32, 2], zero beyond the last
// output; bias [outputs], or null. inputs is even, outputs a multiple of 16.
inline void panel_linear(BFloat16* out, const BFloat16* x, const BFloat16* weight, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                         int64_t outputs) {
    const int64_t num_panels = (outputs + PANEL - 1) / PANEL;
    const int64_t num_chunks = (num_rows + ROW_CHUNK - 1) / ROW_CHUNK;
    const int64_t panel_size = inputs * PANEL;
    const double nanoseconds = std::max(reading(panel_size * sizeof(BFloat16)), multiplying(panel_size * std::min(num_rows, ROW_CHUNK)));
    parallel_for(num_chunks * num_panels, nanoseconds, [&](int64_t task) {
        const int64_t p = task % num_panels, first = task / num_panels * ROW_CHUNK;
        multiply_rows(out + first * outputs + p * PANEL, outputs, x + first * inputs, weight + p * inputs * PANEL,
                      bias ? bias + p * PANEL : nullptr, inputs, std::min(PANEL, outputs - p * PANEL), std::min(ROW_CHUNK, num_rows - first));
    });
}

}  // namespace

#endif
