// The most probable token of a row of logits among those that may come.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "bitmask.h"
#include "common.h"
#include "parallel.h"

namespace {

constexpr int64_t PART = 256;  // how far the maximum is looked up in vectors
constexpr int64_t PART_WORDS = PART / WORD_BITS;

// Which tokens of a row may come: bits as in `apply_bitmask_row`; all of them where `words` is null.
struct Allowed {
    const uint32_t* words;
    int64_t num_words;

    uint32_t operator[](int64_t word) const { return words == nullptr ? UINT32_MAX : word < num_words ? words[word] : 0; }

    bool any(int64_t part) const {
        uint32_t found = 0;
        for (int64_t w = 0; w < PART_WORDS; ++w) found |= (*this)[part * PART_WORDS + w];
        return found != 0;
    }
};

// The first index of the maximum of what is allowed in the row; -1 where that is not finite, or anything allowed is not a number.
template <typename T>
int64_t most_probable(const T* logits, int64_t size, const Allowed& allowed) {
    constexpr float never = -std::numeric_limits<float>::infinity();
    float highest = never;
    int64_t best_part = -1;
    bool is_number = true;
    float values[PART];
    const auto read = [&](int64_t first, int64_t count) {
        for (int64_t w = 0; w < PART_WORDS; ++w) {
            const uint32_t word = allowed[first / WORD_BITS + w];
            const int64_t start = w * WORD_BITS;
            const int64_t stop = std::min(start + WORD_BITS, count);
            for (int64_t i = start; i < stop; ++i) {
                const float x = to_float(logits[first + i]);
                values[i] = (word >> (i - start) & 1) ? x : never;
            }
        }
    };
    for (int64_t first = 0; first < size; first += PART) {
        if (!allowed.any(first / PART)) continue;
        const int64_t count = std::min(PART, size - first);
        read(first, count);
        float part_highest = never;
        int num_odd = 0;
#pragma omp simd reduction(max : part_highest) reduction(+ : num_odd)
        for (int64_t i = 0; i < count; ++i) {
            const float x = values[i];
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
    read(best_part, std::min(PART, size - best_part));
    return best_part + (std::find(values, values + PART, highest) - values);
}

// words: [num_rows, num_words], rows `words_stride` apart; null where all tokens of all rows are allowed.
template <typename T>
void most_probable_of_rows(int64_t* token_ids, const T* logits, int64_t num_rows, int64_t vocab_size, int64_t stride, const uint32_t* words,
                           int64_t num_words, int64_t words_stride) {
    parallel_for(num_rows, elementwise(vocab_size), [&](int64_t row) {
        const Allowed allowed{words == nullptr ? nullptr : words + row * words_stride, num_words};
        token_ids[row] = most_probable(logits + row * stride, vocab_size, allowed);
    });
}

}  // namespace
