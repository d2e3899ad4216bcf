// The most probable token of a row of logits, as they are.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common.h"
#include "parallel.h"

namespace {

// The first index of the row's maximum; -1 where that is not finite, or anything is not a number.
template <typename T>
int64_t most_probable(const T* logits, int64_t size) {
    constexpr int64_t PART = 256;  // how far the maximum is looked up in vectors
    float highest = -std::numeric_limits<float>::infinity();
    int64_t best_part = -1;
    bool is_number = true;
    for (int64_t first = 0; first < size; first += PART) {
        const int64_t count = size - first < PART ? size - first : PART;
        float part_highest = -std::numeric_limits<float>::infinity();
        int num_odd = 0;
#pragma omp simd reduction(max : part_highest) reduction(+ : num_odd)
        for (int64_t i = 0; i < count; ++i) {
            const float x = to_float(logits[first + i]);
            part_highest = x > part_highest ? x : part_highest;
            num_odd += x != x;
        }
        is_number &= num_odd == 0;
        if (part_highest > highest) {
            highest = part_highest;
            best_part = first;
        }
    }
    if (!is_number || best_part < 0 || highest > std::numeric_limits<float>::max()) return -1;
    int64_t index = best_part;
    while (to_float(logits[index]) != highest) ++index;
    return index;
}

template <typename T>
void most_probable_of_rows(int64_t* token_ids, const T* logits, int64_t num_rows, int64_t vocab_size, int64_t stride) {
    parallel_for(num_rows, [&](int64_t row) { token_ids[row] = most_probable(logits + row * stride, vocab_size); });
}

}  // namespace
