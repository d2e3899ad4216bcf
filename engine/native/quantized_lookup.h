// Single rows of a quantized weight, as numbers: what an embedding looks up.

#pragma once

#include <cstdint>

#include "common.h"
#include "parallel.h"
#include "quantized_types.h"

namespace {

// out [num_groups * GROUP] is row `row` of the weight that the blocks hold.
template <typename Type>
void quantized_row(float* out, const uint8_t* blocks, int64_t row, int64_t num_groups) {
    using Scales = typename Type::Scales;
    const int64_t num_blocks = num_groups / Scales::GROUPS, lane = row % TILE;
    const uint8_t* block = blocks + row / TILE * num_blocks * Type::BLOCK_BYTES;
    for (int64_t b = 0; b < num_blocks; ++b, block += Type::BLOCK_BYTES) {
        Scales scales;
        scales.read(block + Type::CODES);
        for (int64_t g = 0; g < Scales::GROUPS; ++g, out += GROUP) {
            const uint8_t* codes = block + g * CODE_BYTES<Type::BITS>;
            float scale[Scales::SCALES][TILE], minimum[TILE] = {};
            for (int64_t part = 0; part < Scales::SCALES; ++part) convert(scale[part], scales.scale(g, part));
            if constexpr (Scales::HAS_MINIMUMS) convert(minimum, scales.minimum(g));
            for (int64_t i = 0; i < GROUP; ++i) {
                const float number = static_cast<float>(number_at<Type>(codes, i / 4 * 4 * TILE + lane * 4 + i % 4));
                out[i] = scale[i * Scales::SCALES / GROUP][lane] * number + minimum[lane];
            }
        }
    }
}

template <typename Type>
void quantized_rows(float* out, const uint8_t* blocks, const int64_t* rows, int64_t num_rows, int64_t num_groups) {
    parallel_for(num_rows, 1.0 * num_groups * GROUP, [&](int64_t i) { quantized_row<Type>(out + i * num_groups * GROUP, blocks, rows[i], num_groups); });
}

}  // namespace
