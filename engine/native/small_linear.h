// A linear layer over a few rows, with AVX-512's bfloat16 products: it takes as long as reading the weight from memory does.

#pragma once

#ifdef __AVX512BF16__

#include <cstdint>

#include "common.h"
#include "decode_bfloat16.h"
#include "vector.h"

namespace {

constexpr int64_t OUTPUTS = 16;  // computed together, so that their sums fill a vector

// out [num_rows, outputs] = x [num_rows, inputs] times weight [outputs, inputs] transposed.
inline void small_linear(BFloat16* out, const BFloat16* x, const BFloat16* weight, int64_t num_rows, int64_t inputs, int64_t outputs) {
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < outputs; first += OUTPUTS) {
        const BFloat16* rows = weight + first * inputs;
        for (int64_t m = 0; m < num_rows; ++m) {
            __m512 sums[OUTPUTS];
            for (int64_t o = 0; o < OUTPUTS; ++o) sums[o] = _mm512_setzero_ps();
            for (int64_t i = 0; i < inputs; i += 32) {
                const __m512bh part = (__m512bh)_mm512_loadu_si512(x + m * inputs + i);
#pragma GCC unroll 16
                for (int64_t o = 0; o < OUTPUTS; ++o) {
                    const BFloat16* row = rows + o * inputs + i;
                    // The row that is read 16 outputs later: too many streams for the processor to foresee.
                    if (m == 0) _mm_prefetch(reinterpret_cast<const char*>(row + OUTPUTS * inputs), _MM_HINT_T0);
                    sums[o] = _mm512_dpbf16_ps(sums[o], part, (__m512bh)_mm512_loadu_si512(row));
                }
            }
            convert(out + m * outputs + first, (Vector)sums_of(sums));
        }
    }
}

}  // namespace

#endif
