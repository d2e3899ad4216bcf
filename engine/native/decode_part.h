// What attention over some of a sequence's keys comes to, and how several such parts become one: each is scaled to the highest score of all
// (as in Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common.h"
#include "vector.h"

namespace {

// For each query head of a group: the weighted sum of values, the sum of weights, and the highest score, in powers of two.
struct Part {
    float *sums, *totals, *maxima;  // [group, value_size], [group], [group]

    static int64_t size(int64_t group, int64_t value_size) { return group * (value_size + 2); }

    Part(float* memory, int64_t group, int64_t value_size)
        : sums(memory), totals(memory + group * value_size), maxima(memory + group * (value_size + 1)) {}
};

// Writes the output of one group, heads from `first_head` on, from its parts, which lie one after the other.
template <typename T>
void join_parts(T* out, float* parts, int64_t num_parts, int64_t first_head, int64_t group, int64_t value_size, const float* sinks) {
    const int64_t size = Part::size(group, value_size);
    for (int64_t g = 0; g < group; ++g) {
        const float *totals = parts + group * value_size + g, *maxima = totals + group;
        const float sink = sinks ? sinks[first_head + g] * LOG2_E : HIDDEN;
        float highest = sink;
        for (int64_t p = 0; p < num_parts; ++p) highest = std::max(highest, maxima[p * size]);
        float* sums = parts + g * value_size;
        float total = sinks ? std::exp2(sink - highest) : 0.0f;
        for (int64_t p = 0; p < num_parts; ++p) {
            const float factor = std::exp2(maxima[p * size] - highest);
            const float* part = sums + p * size;
            total += totals[p * size] * factor;
            if (p == 0 && factor == 1.0f) continue;
#pragma omp simd
            for (int64_t d = 0; d < value_size; ++d) sums[d] = part[d] * factor + (p ? sums[d] : 0.0f);
        }
        const float scale = total > 0.0f ? 1.0f / total : 0.0f;
        T* row = out + (first_head + g) * value_size;
#pragma omp simd
        for (int64_t d = 0; d < value_size; ++d) store(row + d, sums[d] * scale);
    }
}

}  // namespace
