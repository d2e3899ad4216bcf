// Linear layers over weights of 8-bit floating point (e4m3) with scales, in panels of 32 outputs: a panel is converted to bfloat16 before it is
// multiplied, so the result is that of a weight of bfloat16, in half the memory.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "panel_linear.h"
#include "vector.h"

namespace penstock {

// codes [outputs / 32 rounded up, inputs / 2, 32, 2]; scales [outputs / 32 rounded up, scales of a row, 32], each for so many columns, which is
// an even number. Zeros beyond the last output.
struct Float8Panels {
    const uint8_t* codes;
    const float* scales;
    int64_t scale_columns, scales_per_row;
};

}  // namespace penstock

namespace {

// Sixteen numbers of e4m3, divided by 256. A number of half precision has the same bits, but for one more of exponent and seven more of
// mantissa, and the exponent's offset: 15 instead of 7. Subnormal numbers are right as well.
inline Vector load_float8(const uint8_t* from) {
#ifdef __AVX512F__
    const __m256i codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(codes, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(0x3f80));
    return {{(Register)_mm512_cvtph_ps(_mm256_or_si256(sign, magnitude))}};
#else
    uint16_t halves[LANES];
    for (int64_t i = 0; i < LANES; ++i) halves[i] = static_cast<uint16_t>((from[i] & 0x80) << 8 | (from[i] & 0x7f) << 7);
    return load_halves(reinterpret_cast<const uint8_t*>(halves));
#endif
}

constexpr float FLOAT8_FACTOR = 256.0f;
constexpr int64_t PAIR_VECTORS = 2 * PANEL / LANES;  // of a pair of columns of a panel

constexpr int64_t PART_COLUMNS = 128;  // of a panel, which the nearest cache holds as bfloat16
constexpr int64_t FEW_FLOAT8_ROWS = 3;  // are multiplied by parts of a panel, each as soon as it is converted

// Columns of panel p that have their scales in common, multiplied by these and rounded to bfloat16.
inline void convert_columns(BFloat16* to, const Float8Panels& panels, int64_t p, int64_t inputs, int64_t first, int64_t end) {
    const uint8_t* codes = panels.codes + p * inputs * PANEL;
    const float* scales = panels.scales + (p * panels.scales_per_row + first / panels.scale_columns) * PANEL;
    float pairs[2 * PANEL];
    for (int64_t i = 0; i < 2 * PANEL; ++i) pairs[i] = scales[i / 2] * FLOAT8_FACTOR;
    Vector scale[PAIR_VECTORS];
    for (int64_t v = 0; v < PAIR_VECTORS; ++v) scale[v] = load(pairs + LANES * v);
    for (int64_t i = first * PANEL; i < end * PANEL; i += 2 * PANEL, to += 2 * PANEL)
        for (int64_t v = 0; v < PAIR_VECTORS; v += 2) {
            const uint8_t* from = codes + i + LANES * v;
            convert(to + LANES * v, load_float8(from) * scale[v], load_float8(from + LANES) * scale[v + 1]);
        }
}

// Where the columns end, at most so many, that have their scales in common with column `first`.
inline int64_t end_of_part(const Float8Panels& panels, int64_t first, int64_t inputs, int64_t most) {
    return std::min({first + most, (first / panels.scale_columns + 1) * panels.scale_columns, inputs});
}

// As multiply_panel. The order of additions is the same.
template <int64_t ROWS>
void multiply_float8_panel(BFloat16* out, int64_t out_stride, const Factor* x, const Float8Panels& panels, int64_t p, const BFloat16* bias,
                           int64_t inputs, int64_t columns) {
    Vector sums[ROWS][PANEL_VECTORS] = {};
    alignas(64) BFloat16 part[PART_COLUMNS * PANEL];
    for (int64_t first = 0, end; first < inputs; first = end) {
        end = end_of_part(panels, first, inputs, PART_COLUMNS);
        convert_columns(part, panels, p, inputs, first, end);
        multiply_tile(sums, x + first, inputs, part, 2 * PANEL, end - first);
    }
    store_panel_sums(out, out_stride, sums, bias, columns);
}

inline void multiply_few_rows(BFloat16* out, const BFloat16* x, const Float8Panels& panels, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                              int64_t outputs) {
    constexpr decltype(&multiply_float8_panel<1>) kernels[] = {multiply_float8_panel<1>, multiply_float8_panel<2>, multiply_float8_panel<3>};
    const Factor* rows = factors(x, num_rows, inputs, static_cast<const Factor*>(nullptr));
    const double nanoseconds = std::max(reading(inputs * PANEL), multiplying(inputs * PANEL * num_rows));
    parallel_for((outputs + PANEL - 1) / PANEL, nanoseconds, [&](int64_t p) {
        const int64_t place = p * PANEL;
        kernels[num_rows - 1](out + place, outputs, rows, panels, p, bias ? bias + place : nullptr, inputs, std::min(PANEL, outputs - place));
    });
}

// As panel_linear, for any number of rows: what a row comes to does not depend on how many there are.
inline void float8_linear(BFloat16* out, const BFloat16* x, const Float8Panels& panels, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                          int64_t outputs) {
    if (num_rows == 0) return;
    if (num_rows <= FEW_FLOAT8_ROWS && !goes_by_tiles(num_rows, inputs))
        return multiply_few_rows(out, x, panels, bias, num_rows, inputs, outputs);
    const auto panel = [&](int64_t p) {
        static thread_local std::vector<BFloat16> memory;
        if (static_cast<int64_t>(memory.size()) < inputs * PANEL) memory.resize(inputs * PANEL);
        for (int64_t first = 0, end; first < inputs; first = end) {
            end = end_of_part(panels, first, inputs, inputs);
            convert_columns(memory.data() + first * PANEL, panels, p, inputs, first, end);
        }
        return static_cast<const BFloat16*>(memory.data());
    };
    multiply_panels(out, x, panel, inputs * PANEL, bias, num_rows, inputs, outputs);
}

// The same with a weight for each group of rows: those from starts[g] to starts[g + 1] are multiplied by weight g. Weights, their scales and
// biases lie side by side.
inline void grouped_float8_linear(BFloat16* out, const BFloat16* x, Float8Panels panels, const BFloat16* bias, const int64_t* starts,
                                  int64_t num_weights, int64_t inputs, int64_t outputs) {
    const int64_t num_panels = (outputs + PANEL - 1) / PANEL;
    for (int64_t w = 0; w < num_weights; ++w) {
        if (starts[w] < starts[w + 1])
            float8_linear(out + starts[w] * outputs, x + starts[w] * inputs, panels, bias ? bias + w * outputs : nullptr, starts[w + 1] - starts[w],
                          inputs, outputs);
        panels.codes += num_panels * PANEL * inputs;
        panels.scales += num_panels * PANEL * panels.scales_per_row;
    }
}

}  // namespace
