// Low-rank adapters: what each row's own one adds to the result of a linear layer.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"
#include "parallel.h"
#include "vector.h"

namespace penstock {

constexpr int64_t MAX_RANK = 1024;

// Adds B (A x) to the columns [first, first + outputs) of a layer's result. `weights` are in the order in which they are read: A as
// [rank / 4, inputs / 16, 4, 16], then what is left of its rows one by one, then B as [outputs / 16, rank, 16]. An adapter's updates lie one
// behind the other. inputs and outputs are multiples of 16. Rank 0: nothing.
struct LowRank {
    const BFloat16* weights;
    int64_t rank, first, outputs;
};

// Of the layers that are fused in one, each may have its own.
struct LayerAdapter {
    LowRank query_key_value[3], output[1], gate_up[2], down[1];
};

// Rows [first, first + count) of a batch have the same adapter, with an entry in `layers` for each layer.
struct AdapterRun {
    int64_t first, count;
    const LayerAdapter* layers;
};

// The runs of at most `ROWS_AT_ONCE` rows of all tokens and, for the last layer, of those that are kept.
struct Adapters {
    const AdapterRun* runs;
    int64_t num_runs;
    const AdapterRun* kept_runs;
    int64_t num_kept_runs;
};

}  // namespace penstock

namespace {

constexpr int64_t ROWS_AT_ONCE = 4;
constexpr int64_t RANKS_AT_ONCE = 4;

constexpr int64_t WEIGHTS_AHEAD = 1024;  // weights that are fetched before they are read: each is read once in a step

// reduced[row][rank] = A x, for RANKS ranks from `rank` on.
template <int64_t ROWS, int64_t RANKS>
void reduce(float (*reduced)[MAX_RANK], const BFloat16* x, int64_t inputs, const BFloat16* weights, int64_t rank) {
    Vector sums[RANKS][ROWS] = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        Vector rows[ROWS];
        for (int64_t row = 0; row < ROWS; ++row) rows[row] = load(x + row * inputs + i);
        for (int64_t r = 0; r < RANKS; ++r, weights += LANES) {
            if (r % 2 == 0) __builtin_prefetch(weights + WEIGHTS_AHEAD);
            const Vector weight = load(weights);
            for (int64_t row = 0; row < ROWS; ++row) sums[r][row] = multiply_add(weight, rows[row], sums[r][row]);
        }
    }
    for (int64_t r = 0; r < RANKS; ++r)
        for (int64_t row = 0; row < ROWS; ++row) reduced[row][rank + r] = sum_of(sums[r][row]);
}

template <int64_t ROWS>
void add_low_rank(BFloat16* out, int64_t out_stride, const BFloat16* x, int64_t inputs, const LowRank& update) {
    float reduced[ROWS][MAX_RANK];
    const BFloat16* weights = update.weights;
    int64_t rank = 0;
    for (; rank + RANKS_AT_ONCE <= update.rank; rank += RANKS_AT_ONCE, weights += RANKS_AT_ONCE * inputs)
        reduce<ROWS, RANKS_AT_ONCE>(reduced, x, inputs, weights, rank);
    for (; rank < update.rank; ++rank, weights += inputs) reduce<ROWS, 1>(reduced, x, inputs, weights, rank);
    for (int64_t o = 0; o < update.outputs; o += LANES) {
        Vector sums[ROWS] = {};
        for (int64_t r = 0; r < update.rank; ++r, weights += LANES) {
            if (r % 2 == 0) __builtin_prefetch(weights + WEIGHTS_AHEAD);
            const Vector weight = load(weights);
            for (int64_t row = 0; row < ROWS; ++row) sums[row] = multiply_add(weight, broadcast(reduced[row][r]), sums[row]);
        }
        for (int64_t row = 0; row < ROWS; ++row) {
            BFloat16* target = out + row * out_stride + update.first + o;
            convert(target, load(target) + sums[row]);
        }
    }
}

// Adds to `out` [rows, out_stride] what the rows' adapters make of `x` [rows, inputs]; `updates` gives those of a layer's adapter.
template <int64_t PARTS_OF_LAYER, typename Updates>
void add_adapters(BFloat16* out, int64_t out_stride, const BFloat16* x, int64_t inputs, const AdapterRun* runs, int64_t num_runs,
                  const Updates& updates) {
    if (!num_runs) return;
    const LowRank* first = updates(runs[0]);
    int64_t products = 0;
    for (int64_t part = 0; part < PARTS_OF_LAYER; ++part) products += first[part].rank * (inputs + first[part].outputs);
    parallel_for(num_runs, elementwise(products), [&](int64_t index) {
        static constexpr void (*kernels[])(BFloat16*, int64_t, const BFloat16*, int64_t, const LowRank&) = {
            add_low_rank<1>, add_low_rank<2>, add_low_rank<3>, add_low_rank<4>};
        const AdapterRun& run = runs[index];
        for (int64_t part = 0; part < PARTS_OF_LAYER; ++part)
            kernels[run.count - 1](out + run.first * out_stride, out_stride, x + run.first * inputs, inputs, updates(run)[part]);
    });
}

}  // namespace
