// Low-rank adapters: what each row's own one adds to the result of a linear layer.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common.h"
#include "parallel.h"
#include "quantized_product.h"
#include "tile.h"
#include "vector.h"

namespace penstock {

constexpr int64_t MAX_RANK = 1024;
constexpr int64_t MAX_PARTS = 3;       // of a layer: linear layers that are fused in one
constexpr int64_t RANKS_TOGETHER = 8;  // rows of A that lie side by side
constexpr int64_t STEP = 2 * LANES;    // numbers of each of them

// Adds B (A x) to the columns [first, first + outputs) of a layer's result. The rank is even. The parts of a layer have one A, whose rows
// are those of all of them and then zeros, up to a multiple of 8: [ranks / 8, inputs / 32, 8, 32], where 16 inputs that are left over come
// last, [8, 16]. B is [outputs / 16, rank / 2, 16, 2]. An adapter's weights lie one behind the other in the order in which they are read.
// inputs and outputs are multiples of 16. Rank 0: nothing.
struct LowRank {
    const BFloat16 *down, *up;
    int64_t rank, first, outputs;
};

// Of the layers that are fused in one, each may have its own.
struct LayerAdapter {
    LowRank query_key_value[3], output[1], gate_up[2], down[1];
};

// Rows [first, first + count) of a batch have the same adapter, with an entry in `layers` for each layer; null: none.
struct AdapterRun {
    int64_t first, count;
    const LayerAdapter* layers;
};

// Runs of at most `ROWS_AT_ONCE` rows that are all tokens and, for the last layer, those that are kept.
struct Adapters {
    const AdapterRun* runs;
    int64_t num_runs;
    const AdapterRun* kept_runs;
    int64_t num_kept_runs;
};

}  // namespace penstock

namespace {

constexpr int64_t ROWS_AT_ONCE = 3;
constexpr int64_t SUMS_AT_ONCE = WIDTH == 16 ? RANKS_TOGETHER : 2;  // of ranks and for each row: as many as registers hold
constexpr int64_t WEIGHTS_AHEAD = 4096;  // weights that are fetched before they are read: each is read once in a step
constexpr int64_t MOST_RANKS = MAX_PARTS * MAX_RANK + RANKS_TOGETHER;

// What A x is multiplied as by B.
struct Reduced {
    Factor numbers[ROWS_AT_ONCE][MOST_RANKS];
};

// RANKS of eight rows of A, times x.
template <int64_t ROWS, int64_t RANKS>
inline void reduce(Reduced& reduced, int64_t rank, const BFloat16* x, int64_t inputs, const BFloat16* weights, int64_t place) {
    Vector sums[RANKS][ROWS] = {};
    int64_t i = 0;
    const BFloat16* weight = weights + place * STEP;
    for (; i + STEP <= inputs; i += STEP, weight += RANKS_TOGETHER * STEP) {
#ifdef PENSTOCK_BFLOAT16_PRODUCTS
        Pairs rows[ROWS];
        for (int64_t row = 0; row < ROWS; ++row) rows[row] = load_pairs(x + row * inputs + i);
        for (int64_t r = 0; r < RANKS; ++r) {
            __builtin_prefetch(weight + r * STEP + WEIGHTS_AHEAD);
            const Pairs numbers = load_pairs(weight + r * STEP);
            for (int64_t row = 0; row < ROWS; ++row) sums[r][row] = add_products(sums[r][row], numbers, rows[row]);
        }
#else
        for (int64_t half = 0; half < STEP; half += LANES) {
            Vector rows[ROWS];
            for (int64_t row = 0; row < ROWS; ++row) rows[row] = load(x + row * inputs + i + half);
            for (int64_t r = 0; r < RANKS; ++r) {
                const Vector numbers = load(weight + r * STEP + half);
                for (int64_t row = 0; row < ROWS; ++row) sums[r][row] = multiply_add(numbers, rows[row], sums[r][row]);
            }
        }
#endif
    }
    if (i < inputs) {
        weight += place * (LANES - STEP);
        for (int64_t r = 0; r < RANKS; ++r)
            for (int64_t row = 0; row < ROWS; ++row)
                sums[r][row] = multiply_add(load(weight + r * LANES), load(x + row * inputs + i), sums[r][row]);
    }
    for (int64_t r = 0; r < RANKS; ++r)
        for (int64_t row = 0; row < ROWS; ++row) convert(&reduced.numbers[row][rank + r], sum_of(sums[r][row]));
}

// Adds to `out` [ROWS, out_stride] what an adapter makes of `x` [ROWS, inputs].
template <int64_t ROWS>
void add_low_rank(BFloat16* out, int64_t out_stride, const BFloat16* x, int64_t inputs, const LowRank* parts, int64_t num_parts) {
    int64_t ranks = 0;
    for (int64_t part = 0; part < num_parts; ++part) ranks += parts[part].rank;
    Reduced reduced;
    for (int64_t rank = 0; rank < ranks; rank += RANKS_TOGETHER)
        for (int64_t place = 0; place < RANKS_TOGETHER; place += SUMS_AT_ONCE)
            reduce<ROWS, SUMS_AT_ONCE>(reduced, rank + place, x, inputs, parts[0].down + rank * inputs, place);
    int64_t start = 0;
    for (int64_t part = 0; part < num_parts; start += parts[part++].rank) {
        const LowRank& update = parts[part];
        if (!update.rank) continue;
        const BFloat16* weights = update.up;
        BFloat16* columns = out + update.first;
        for (int64_t o = 0; o < update.outputs; o += LANES, weights += update.rank * LANES) {
            for (int64_t i = 0; i < update.rank * LANES; i += STEP) __builtin_prefetch(weights + i + WEIGHTS_AHEAD);
            Vector sums[ROWS][1] = {};
            multiply_tile(sums, &reduced.numbers[0][start], MOST_RANKS, weights, STEP, update.rank);
            for (int64_t row = 0; row < ROWS; ++row) convert(columns + row * out_stride + o, load(columns + row * out_stride + o) + sums[row][0]);
        }
    }
}

// The weights of the runs' adapters for a layer.
template <int64_t NUM_PARTS, typename Updates>
std::vector<Following> weights_of(const AdapterRun* runs, int64_t num_runs, const Updates& updates, int64_t inputs) {
    std::vector<Following> found;
    for (int64_t i = 0; i < num_runs; ++i) {
        if (!runs[i].layers || (i && runs[i].layers == runs[i - 1].layers)) continue;
        const LowRank* parts = updates(runs[i]);
        int64_t num_weights = 0;
        for (int64_t part = 0; part < NUM_PARTS; ++part) num_weights += parts[part].rank * (inputs + parts[part].outputs);
        if (num_weights) found.push_back({reinterpret_cast<const char*>(parts[0].down), num_weights * static_cast<int64_t>(sizeof(BFloat16))});
    }
    return found;
}

// function(t) for each row t of a layer's result `out` [num_rows, out_stride], to which the row's adapter adds its part before. Runs may go
// beyond the rows: those are padding.
template <int64_t NUM_PARTS, typename Updates, typename Function>
void for_adapted_rows(BFloat16* out, int64_t out_stride, const BFloat16* x, int64_t inputs, int64_t num_rows, const AdapterRun* runs,
                      int64_t num_runs, const Updates& updates, double nanoseconds, const Function& function) {
    static constexpr decltype(&add_low_rank<1>) kernels[] = {add_low_rank<1>, add_low_rank<2>, add_low_rank<3>};
    int64_t num_weights = 0;
    for (int64_t i = 0; i < num_runs; ++i)
        for (int64_t part = 0; runs[i].layers && part < NUM_PARTS; ++part)
            num_weights += updates(runs[i])[part].rank * (inputs + updates(runs[i])[part].outputs);
    const double work = num_rows * nanoseconds + reading(num_weights * sizeof(BFloat16));
    parallel_for<UNEQUAL>(num_runs, work / std::max<int64_t>(num_runs, 1), [&](int64_t index) {
        const AdapterRun& run = runs[index];
        const int64_t end = std::min(run.first + run.count, num_rows);
        if (run.layers && run.first < end) {
            const auto add = kernels[end - run.first - 1];
            add(out + run.first * out_stride, out_stride, x + run.first * inputs, inputs, updates(run), NUM_PARTS);
        }
        for (int64_t row = run.first; row < end; ++row) turn<Function>(&function, row);  // the machine code that rows without adapters take
    });
}

}  // namespace
