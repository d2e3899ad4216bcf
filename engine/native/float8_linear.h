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
    uint16_t halves[LANES];
    for (int64_t i = 0; i < LANES; ++i) halves[i] = static_cast<uint16_t>((from[i] & 0x80) << 8 | (from[i] & 0x7f) << 7);
    return load_halves(reinterpret_cast<const uint8_t*>(halves));
}

constexpr float FLOAT8_FACTOR = 256.0f;
constexpr int64_t PAIR_VECTORS = 2 * PANEL / LANES;  // of a pair of columns of a panel

// Panel p, multiplied by its scales and rounded to bfloat16.
inline void convert_panel(BFloat16* to, const Float8Panels& panels, int64_t p, int64_t inputs) {
    const uint8_t* codes = panels.codes + p * inputs * PANEL;
    const float* scales = panels.scales + p * panels.scales_per_row * PANEL;
    for (int64_t first = 0; first < inputs; first += panels.scale_columns, scales += PANEL) {
        float pairs[2 * PANEL];
        for (int64_t i = 0; i < 2 * PANEL; ++i) pairs[i] = scales[i / 2] * FLOAT8_FACTOR;
        Vector scale[PAIR_VECTORS];
        for (int64_t v = 0; v < PAIR_VECTORS; ++v) scale[v] = load(pairs + LANES * v);
        const int64_t end = std::min(first + panels.scale_columns, inputs) * PANEL;
        for (int64_t i = first * PANEL; i < end; i += 2 * PANEL)
            for (int64_t v = 0; v < PAIR_VECTORS; ++v) convert(to + i + LANES * v, load_float8(codes + i + LANES * v) * scale[v]);
    }
}

// As panel_linear, for any number of rows: what a row comes to does not depend on how many there are.
inline void float8_linear(BFloat16* out, const BFloat16* x, const Float8Panels& panels, const BFloat16* bias, int64_t num_rows, int64_t inputs,
                          int64_t outputs) {
    const auto panel = [&](int64_t p) {
        static thread_local std::vector<BFloat16> memory;
        if (static_cast<int64_t>(memory.size()) < inputs * PANEL) memory.resize(inputs * PANEL);
        convert_panel(memory.data(), panels, p, inputs);
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
