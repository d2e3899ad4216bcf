// The most probable token of a row of logits among those that may come.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "bitmask.h"
#include "common.h"
#include "parallel.h"

namespace {

constexpr int64_t PART = 256;  // how far the maximum is looked up in vectors
constexpr int64_t STRIP = 32;  // parts that one thread looks through at a time, so that a single row keeps several threads busy
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

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The highest of some of a row's logits, and the part that it is in; -1: none of them is allowed.
struct Highest {
    float value = NEVER;
    int64_t part = -1;
    bool is_number = true;  // all of them are

    // With those of later parts, which count only where they are higher.
    void add(const Highest& later) {
        is_number &= later.is_number;
        if (later.value > value) {
            value = later.value;
            part = later.part;
        }
    }
};

// The part's logits, minus infinity where they are not allowed. Returns how many they are.
template <typename T>
int64_t read_part(float* values, const T* logits, int64_t part, int64_t size, const Allowed& allowed) {
    const int64_t first = part * PART, count = std::min(PART, size - first);
    for (int64_t w = 0; w < PART_WORDS; ++w) {
        const uint32_t word = allowed[part * PART_WORDS + w];
        const int64_t start = w * WORD_BITS;
        const int64_t stop = std::min(start + WORD_BITS, count);
        for (int64_t i = start; i < stop; ++i) {
            const float x = to_float(logits[first + i]);
            values[i] = (word >> (i - start) & 1) ? x : NEVER;
        }
    }
    return count;
}

template <typename T>
Highest highest_of_parts(const T* logits, int64_t begin, int64_t end, int64_t size, const Allowed& allowed) {
    Highest found;
    float values[PART];
    for (int64_t part = begin; part < end; ++part) {
        if (!allowed.any(part)) continue;
        const int64_t count = read_part(values, logits, part, size, allowed);
        float highest = NEVER;
        int num_odd = 0;
#pragma omp simd reduction(max : highest) reduction(+ : num_odd)
        for (int64_t i = 0; i < count; ++i) {
            const float x = values[i];
            highest = x > highest ? x : highest;
            num_odd += x != x;
        }
        found.add({highest, part, num_odd == 0});
    }
    return found;
}

// For each row, the first index of the maximum of what is allowed; -1 where that is not finite, or anything allowed is not a number.
// words: [num_rows, num_words], rows `words_stride` apart; null where all tokens of all rows are allowed.
template <typename T>
void most_probable_of_rows(int64_t* token_ids, const T* logits, int64_t num_rows, int64_t vocab_size, int64_t stride, const uint32_t* words,
                           int64_t num_words, int64_t words_stride) {
    static thread_local std::vector<Highest> scratch;
    const int64_t num_parts = (vocab_size + PART - 1) / PART, num_strips = (num_parts + STRIP - 1) / STRIP;
    if (static_cast<int64_t>(scratch.size()) < num_rows * num_strips) scratch.resize(num_rows * num_strips);
    Highest* const strips = scratch.data();  // this thread's, whichever thread runs a turn
    const auto allowed_in = [&](int64_t row) { return Allowed{words == nullptr ? nullptr : words + row * words_stride, num_words}; };
    parallel_for(num_rows * num_strips, elementwise(std::min(vocab_size, STRIP * PART)), [&](int64_t i) {
        const int64_t row = i / num_strips, begin = i % num_strips * STRIP;
        strips[i] = highest_of_parts(logits + row * stride, begin, std::min(begin + STRIP, num_parts), vocab_size, allowed_in(row));
    });
    parallel_for(num_rows, elementwise(PART + num_strips), [&](int64_t row) {
        Highest best;
        for (int64_t s = 0; s < num_strips; ++s) best.add(strips[row * num_strips + s]);
        token_ids[row] = -1;
        if (!best.is_number || best.part < 0 || best.value > std::numeric_limits<float>::max()) return;
        float values[PART];
        const int64_t count = read_part(values, logits + row * stride, best.part, vocab_size, allowed_in(row));
        token_ids[row] = best.part * PART + (std::find(values, values + count, best.value) - values);
    });
}

}  // namespace
