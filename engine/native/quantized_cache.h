// Keys or values of 8 bits in a cache: each token's head has codes and a scale of its own, so that a large number costs precision in its row only.
//
// A block holds [num_kv_heads][block_size][size] codes, then [num_kv_heads][block_size] scales of float32, so that a head's share of a block, which
// is read at once, lies together.

#pragma once

#include <cstdint>

#include "common.h"
#include "vector.h"

namespace {

// Codes are multiplied as numbers, which bfloat16 holds without rounding; the scales of keys then count in scores, and those of values in weights.
constexpr int64_t MAX_CODES = 128;  // of a row

// Rows of one KV head. `size` is a multiple of 32.
struct CodeRows {
    int8_t* codes;
    float* scales;
    int64_t size;

    CodeRows(void* cache, int64_t block, int64_t head, int64_t num_kv_heads, int64_t block_size, int64_t size) : size(size) {
        int8_t* const first = static_cast<int8_t*>(cache) + block * block_size * num_kv_heads * (size + sizeof(float));
        codes = first + head * block_size * size;
        scales = reinterpret_cast<float*>(first + num_kv_heads * block_size * size) + head * block_size;
    }

    template <typename T>
    void write(int64_t row, const T* numbers) const {
        Vector magnitudes{};
        for (int64_t d = 0; d < size; d += LANES) magnitudes = highest(magnitudes, highest(load(numbers + d), Vector{} - load(numbers + d)));
        const float most = highest_of(magnitudes), inverse = most > 0.0f ? 127.0f / most : 0.0f;
        scales[row] = most / 127.0f;
        const auto code = [&](int64_t d) { return to_nearest(load(numbers + d) * inverse); };
        for (int64_t d = 0; d < size; d += 2 * LANES) store_bytes(codes + row * size + d, code(d), code(d + LANES));
    }

    // The row's codes as numbers.
    template <typename T>
    void read(T* numbers, int64_t row) const {
        const int8_t* from = codes + row * size;
        for (int64_t d = 0; d < size; d += 2 * LANES) convert(numbers + d, load_codes(from + d), load_codes(from + d + LANES));
    }
};

}  // namespace
