// Which products go by AMX's tiles: those that a short trial finds to be faster so, at the start.

#pragma once

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <vector>

#include "amx.h"
#include "panel_linear.h"
#include "prefill.h"
#include "quantized_linear.h"

namespace amx {
namespace {

enum Mode : int64_t { NO_TILES, ALL_TILES, FASTER };

#ifdef PENSTOCK_TILES

// A single row of bfloat16 loses nothing by the numbers: 2 KiB of a panel take 16 cycles from the nearest cache into two tiles, and several times as
// long from memory. Quantized rows fill whole tiles: by the numbers of quantized_tiles.h, with some cycles to unpack a block, both take as long for
// about 8 rows, and vectors twice as long for 16. Attention's products are of bfloat16 only where vectors have such products too.
constexpr Use EVERYWHERE = {1, ROWS, HAS_BFLOAT16_PRODUCTS ? 1 : NEVER};

// A tie goes to tiles: what a row of bfloat16 comes to depends on which of the two computes it, and is to depend on nothing else.
constexpr double TIE = 1.05;

template <typename Function>
double fastest(const Function& run) {
    double best = 1e30;
    for (int i = 0; i < 4; ++i) {
        const auto start = std::chrono::steady_clock::now();
        run();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

// The least of these numbers of rows, which ascend, so that tiles are not slower for it nor for the greater ones. `limit` is of the use that
// `run` is to be timed with.
template <typename Function>
int64_t rows_from(int64_t& limit, std::initializer_list<int64_t> counts, const Function& run) {
    int64_t from = NEVER;
    for (auto count = std::rbegin(counts); count != std::rend(counts); ++count) {
        limit = NEVER;
        const double by_vectors = fastest([&] { run(*count); });
        limit = *std::begin(counts);
        if (fastest([&] { run(*count); }) > TIE * by_vectors) break;
        from = *count;
    }
    limit = from;
    return from;
}

// In the calling thread alone. A few milliseconds.
inline void choose_by_time() {
    constexpr int64_t MOST_ROWS = 64, SIZE = 1024, HEAD = 64, PAGE = 16;  // a weight as large as a core's cache
    const BFloat16 one{0x3f80};
    const std::vector<BFloat16> x(MOST_ROWS * SIZE, one), weight(SIZE * SIZE, one);
    const std::vector<uint8_t> blocks(SIZE * SIZE / (TILE * ::GROUP) * Q4_1::BLOCK_BYTES, 1);
    const QuantizedPart part{blocks.data(), Q4_1::NUMBER, SIZE};
    std::vector<BFloat16> out(MOST_ROWS * SIZE);
    rows_from(use.bfloat16_rows, {1, ROWS, MOST_ROWS},
              [&](int64_t rows) { panel_linear(out.data(), x.data(), weight.data(), nullptr, rows, SIZE, SIZE); });
    rows_from(use.quantized_rows, {ROWS, MOST_ROWS},
              [&](int64_t rows) { quantized_linear(out.data(), x.data(), &part, 1, nullptr, rows, SIZE / ::GROUP, true); });
    if (!HAS_BFLOAT16_PRODUCTS) return;
    std::vector<int32_t> table(SIZE / PAGE);
    std::iota(table.begin(), table.end(), 0);
    rows_from(use.attention_rows, {1, MOST_ROWS}, [&](int64_t rows) {
        std::vector<Prefill<BFloat16>> sequences{
            {out.data(), x.data(), weight.data(), weight.data(), table.data(), rows, SIZE, 4, 1, HEAD, HEAD, PAGE, false, {0.125f, 0, 0.0f, nullptr}}};
        prefill(sequences);
    });
}

// Returns whether there are tiles to choose from.
inline bool choose(Mode mode) {
    use = {};
    if (mode == NO_TILES || !request()) return false;
    if (mode == ALL_TILES) {
        use = EVERYWHERE;
        return true;
    }
    const int num_threads = omp_get_max_threads();
    omp_set_num_threads(1);
    choose_by_time();
    omp_set_num_threads(num_threads);
    return true;
}

#else

inline bool choose(Mode) { return false; }

#endif

}  // namespace
}  // namespace amx
