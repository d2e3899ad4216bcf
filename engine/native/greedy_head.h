// The most probable tokens of few rows, without all of their logits.
//
// A second weight, of fewer bits, replaces the output layer's. The norm of the difference between a token's rows of the two, times the
// norm of the activations, bounds how far its logit is from the one that the second weight gives (the Cauchy-Schwarz inequality). Only tiles
// that may hold the maximum are multiplied by the output layer's own weight, as its other products are: what is found is the same to the bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common.h"
#include "greedy.h"
#include "parallel.h"
#include "quantized_linear.h"
#include "vector.h"

namespace {

// `errors` are of whole tiles: at least the norms of the rows' differences, with room for the rounding of sums.
struct GreedyHead {
    QuantizedPart exact, coarse;
    const float* errors;
    int64_t num_groups, vocab_size;

    int64_t num_tiles() const { return (vocab_size + TILE - 1) / TILE; }
};

// The product of a whole weight's tiles, to be multiplied one by one.
inline Strips tiles_of(const QuantizedPart& part, const GreedyHead& head, const RowGroup* rows, void* out, bool is_bfloat16) {
    const int64_t width = head.num_tiles() * TILE;
    return strips_of({out, nullptr, part.blocks, rows, head.num_groups, width, width, is_bfloat16}, part.type, head.num_tiles());
}

inline double tile_nanoseconds(const QuantizedPart& part, const GreedyHead& head) { return reading(head.num_groups * group_bytes(part.type)); }

// A little more than the row's norm.
inline float norm_of(const RowGroup* row, int64_t num_groups) {
    double squares = 0.0;
    for (int64_t g = 0; g < num_groups; ++g) {
        int64_t of_codes = 0;
        for (const int8_t code : row[g].codes) of_codes += code * code;
        squares += static_cast<double>(row[g].scale) * row[g].scale * of_codes;
    }
    return static_cast<float>(std::sqrt(squares) * 1.001);
}

// The index of the greatest of `count` numbers, or of any where one is not a number.
inline int64_t index_of_highest(const float* numbers, int64_t count) {
    Vector most = broadcast(NEVER);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) most = highest(load(numbers + i), most);
    float highest = highest_of(most);
    for (; i < count; ++i) highest = std::max(highest, numbers[i]);
    return std::min<int64_t>(std::find(numbers, numbers + count, highest) - numbers, count - 1);
}

// The tiles whose tokens' logits may be as high as `least`, which one token's is, once they are rounded to bfloat16.
inline std::vector<int64_t> possible_tiles(const GreedyHead& head, const float* approximate, float norm, float least) {
    const float bound = least - std::fabs(least) / 128;
    std::vector<int64_t> found;
    for (int64_t tile = 0; tile < head.num_tiles(); ++tile) {
        const Vector most = load(approximate + tile * TILE) + load(head.errors + tile * TILE) * norm;
        if (!(highest_of(most) < bound)) found.push_back(tile);
    }
    return found;
}

// The first index of the highest logit; -1 where that is not finite.
inline int64_t most_probable_token(const GreedyHead& head, const RowGroup* row, const float* approximate) {
    static thread_local std::vector<BFloat16> memory;
    if (static_cast<int64_t>(memory.size()) < head.num_tiles() * TILE) memory.resize(head.num_tiles() * TILE);
    BFloat16* const logits = memory.data();
    const Strips exact = tiles_of(head.exact, head, row, logits, true);
    const auto multiply = [&](int64_t tile) { penstock_multiply_block(&exact.product, exact.type, 0, 1, tile, 1); };
    const int64_t first = index_of_highest(approximate, head.vocab_size);
    multiply(first / TILE);
    const std::vector<int64_t> tiles = possible_tiles(head, approximate, norm_of(row, head.num_groups), to_float(logits[first]));
    parallel_for(tiles.size(), tile_nanoseconds(head.exact, head), [&](int64_t i) { multiply(tiles[i]); });
    float highest = NEVER;
    int64_t token = -1;
    for (const int64_t tile : tiles)
        for (int64_t i = tile * TILE; i < std::min((tile + 1) * TILE, head.vocab_size); ++i) {
            const float logit = to_float(logits[i]);
            if (!(std::fabs(logit) <= std::numeric_limits<float>::max())) return -1;
            if (logit > highest) highest = logit, token = i;
        }
    return token;
}

// token_ids and x are [num_rows] and [num_rows, 32 num_groups]. Where drafted[r] is a token, the row after r follows on it, a draft token, and is
// not looked at, nor are those that follow on that one, unless the token is row r's most probable one; -1 where the row after r follows on nothing.
inline void most_probable_tokens(int64_t* token_ids, const GreedyHead& head, const BFloat16* x, int64_t num_rows, const int64_t* drafted) {
    static thread_local std::vector<float> memory;
    const int64_t width = head.num_tiles() * TILE;
    if (static_cast<int64_t>(memory.size()) < num_rows * width) memory.resize(num_rows * width);
    float* const approximate = memory.data();
    const RowGroup* rows = quantized(x, num_rows, head.num_groups, true);
    const Strips coarse = tiles_of(head.coarse, head, rows, approximate, false);
    const int64_t num_blocks = num_blocks_for(num_rows);
    parallel_for(head.num_tiles(), tile_nanoseconds(head.coarse, head), [&](int64_t tile) {
        for (int64_t i = 0; i < num_blocks; ++i) {
            const int64_t start = num_rows * i / num_blocks, stop = num_rows * (i + 1) / num_blocks;
            penstock_multiply_block(&coarse.product, coarse.type, start, stop - start, tile, 1);
        }
    });
    bool is_right = true;
    for (int64_t r = 0; r < num_rows; ++r) {
        if (r > 0) is_right = drafted[r - 1] < 0 || (is_right && token_ids[r - 1] == drafted[r - 1]);
        token_ids[r] = is_right ? most_probable_token(head, rows + r * head.num_groups, approximate + r * width) : 0;
    }
}

}  // namespace
