// Attention over a part of a sequence's keys, and over all of its parts: each is scaled to the highest score so far (as in Flash-Decoding,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Within a part the softmax is computed online, a tile of keys at a time (Milakov and
// Gimelshein, arXiv:1805.02867).
//
// Tiles and parts begin at multiples of their sizes, and prompts and decodes add up in the same order. So what a query gets depends neither on how many
// others are computed with it nor on which of its keys were computed before, and greedy answers are the same whatever was cached, preempted or
// speculated.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common.h"
#include "vector.h"

namespace {

constexpr int64_t KEY_TILE = 64;
constexpr int64_t KEYS_OF_PART = 1024;  // long contexts are split, so that a single one keeps all threads busy
constexpr int64_t TILES_OF_PART = KEYS_OF_PART / KEY_TILE;
constexpr int64_t SCORE_VECTORS = KEY_TILE / LANES;

// For each query head of a group: the weighted sum of values, the sum of weights, and the highest score, in powers of two.
struct Part {
    float *sums, *totals, *maxima;  // [group, value_size], [group], [group]

    static int64_t size(int64_t group, int64_t value_size) { return group * (value_size + 2); }

    Part(float* memory, int64_t group, int64_t value_size)
        : sums(memory), totals(memory + group * value_size), maxima(memory + group * (value_size + 1)) {}
};

// Of one query's weights, which are added up lane by lane. This and what follows is the same instructions for prompts and decodes: compilers
// adapt none of it to its callers.
PENSTOCK_APART inline float total_of(const Vector& lanes) { return sum_of(lanes); }

// Two to the power of a number that is at most zero. The library takes ten times as long where the result is too small for a number.
inline float power_at_most_one(float x) { return x < -150.0f ? 0.0f : std::exp2(x); }

struct Scaling {
    float before, part;
};

// Adds a part's sum of weights to that of the parts before, and returns what the sums of values of both are to be multiplied by.
inline Scaling join_totals(float& total, float& maximum, float part_total, float part_maximum) {
    const float highest = std::max(maximum, part_maximum);
    const Scaling scaling{power_at_most_one(maximum - highest), power_at_most_one(part_maximum - highest)};
    total = std::fma(part_total, scaling.part, total * scaling.before);
    maximum = highest;
    return scaling;
}

// Adds one head's part to the parts before.
PENSTOCK_APART inline void join(float* sums, float& total, float& maximum, const float* part_sums, float part_total, float part_maximum, int64_t value_size) {
    const Scaling scaling = join_totals(total, maximum, part_total, part_maximum);
#pragma omp simd
    for (int64_t d = 0; d < value_size; ++d) sums[d] = std::fma(part_sums[d], scaling.part, sums[d] * scaling.before);
}

// Writes one head's output. A query without a visible key gets zeros.
template <typename T>
PENSTOCK_APART void store_attended(T* out, const float* sums, float total, int64_t value_size) {
    const float scale = total > 0.0f ? 1.0f / total : 0.0f;
#pragma omp simd
    for (int64_t d = 0; d < value_size; ++d) store(out + d, sums[d] * scale);
}

// Writes the output of one group, heads from `first_head` on, from its parts, which lie one after the other.
template <typename T>
void join_parts(T* out, float* parts, int64_t num_parts, int64_t first_head, int64_t group, int64_t value_size, const float* sinks) {
    const int64_t size = Part::size(group, value_size);
    for (int64_t g = 0; g < group; ++g) {
        const float *totals = parts + group * value_size + g, *maxima = totals + group;
        float *sums = parts + g * value_size, total = totals[0], maximum = maxima[0];
        if (sinks) {
            float sink_total = 1.0f, sink = sinks[first_head + g] * LOG2_E;
            const Scaling scaling = join_totals(sink_total, sink, total, maximum);
            for (int64_t d = 0; d < value_size; ++d) sums[d] *= scaling.part;
            total = sink_total;
            maximum = sink;
        }
        for (int64_t p = 1; p < num_parts; ++p)
            join(sums, total, maximum, sums + p * size, totals[p * size], maxima[p * size], value_size);
        store_attended(out + (first_head + g) * value_size, sums, total, value_size);
    }
}

// Which keys of a tile are visible, and the scales of its keys and values where the caches have 8 bits.
struct TileView {
    int64_t begin, end;
    const float *key_scales, *value_scales;  // null: none
};

// scores * scales, where there are any, as `softcap` * tanh(. * `scaling` / `softcap`), without the factor before the tangent.
PENSTOCK_APART inline void cap(float* scores, const float* scales, const Options& options) {
    for (int64_t i = 0; i < KEY_TILE; ++i)
        scores[i] = std::tanh((scales ? scores[i] * scales[i] : scores[i]) * options.scaling / options.softcap);
}

// Turns one query's scores of a tile into weights, and rescales what it has summed up so far where its maximum rises.
template <typename Element>
PENSTOCK_APART void weigh(float* scores, Element* weights, float* sums, float& maximum, Vector& total, int64_t columns, const TileView& view,
                          const Options& options) {
    const bool is_capped = options.softcap > 0.0f;
    if (is_capped) cap(scores, view.key_scales, options);
    Vector row[SCORE_VECTORS];  // loops over them are unrolled, since GCC would keep them in memory otherwise
#pragma GCC unroll 4
    for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] = load(scores + LANES * v);
    if (view.key_scales && !is_capped) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] *= load(view.key_scales + LANES * v);
    }
    const float factor = (is_capped ? options.softcap : options.scaling) * LOG2_E;  // scores are in powers of two from here on
#pragma GCC unroll 4
    for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] *= broadcast(factor);
    const bool hides = view.end < KEY_TILE || view.begin > 0;
    const auto visible = [&](int64_t v) { return lanes_between(view.begin - LANES * v, view.end - LANES * v); };
    if (hides) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] = select(visible(v), row[v], HIDDEN);
    }
    Vector highest_lanes = row[0];
#pragma GCC unroll 4
    for (int64_t v = 1; v < SCORE_VECTORS; ++v) highest_lanes = highest(highest_lanes, row[v]);
    if (any_greater(highest_lanes, maximum)) {  // rarely: what follows need not wait for the highest of all lanes
        const float most = highest_of(highest_lanes);
        const Vector correction = power_of_two(broadcast(maximum - most));
        total *= correction;
        for (int64_t d = 0; d < columns; d += LANES) convert(sums + d, load(sums + d) * correction);
        maximum = most;
    }
    const Vector lowered = broadcast(maximum);
#pragma GCC unroll 4
    for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] = power_of_two(row[v] - lowered);
    if (hides) {  // not 2^-126, which some products' rounding shows
#pragma GCC unroll 4
        for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] = select(visible(v), row[v], 0.0f);
    }
    total += (row[0] + row[1]) + (row[2] + row[3]);
    if (view.value_scales) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < SCORE_VECTORS; ++v) row[v] *= load(view.value_scales + LANES * v);
    }
#pragma GCC unroll 4
    for (int64_t v = 0; v < SCORE_VECTORS; v += 2) convert(weights + LANES * v, row[v], row[v + 1]);
}

}  // namespace
