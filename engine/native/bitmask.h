// Packed bitmasks of the tokens that may come next, applied to logits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace {

constexpr int64_t WORD_BITS = 32;

// Sets the logits of all tokens whose bit is not set to minus infinity, those beyond the last word included.
inline void apply_bitmask_row(float* logits, const uint32_t* words, int64_t vocab_size, int64_t num_words) {
    constexpr float never = -std::numeric_limits<float>::infinity();
    const int64_t num_whole = std::min(num_words, vocab_size / WORD_BITS);
    for (int64_t w = 0; w < num_whole; ++w) {
        const uint32_t word = words[w];
        if (word == UINT32_MAX) continue;
        float* part = logits + w * WORD_BITS;
        for (int64_t bit = 0; bit < WORD_BITS; ++bit) part[bit] = (word >> bit & 1) ? part[bit] : never;
    }
    for (int64_t token = num_whole * WORD_BITS; token < vocab_size; ++token) {
        const int64_t w = token / WORD_BITS;
        if (w >= num_words || !(words[w] >> token % WORD_BITS & 1)) logits[token] = never;
    }
}

}  // namespace
