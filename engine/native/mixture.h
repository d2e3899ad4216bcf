// A mixture of experts in place of an MLP: each row goes to the few experts that a router chooses for it (Shazeer et al., arXiv:1701.06538).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "activation.h"
#include "common.h"
#include "linear.h"
#include "parallel.h"
#include "vector.h"

namespace penstock {

using AddUp = void (*)(BFloat16* values, int64_t count);  // makes them the sums over all ranks; null: there is one rank

struct Mixture {
    Linear router;         // with an output for each expert, and others up to a multiple of 16, which are not looked at
    Linear gate_up, down;  // of the first expert: see `apply_grouped`
    int64_t num_experts, num_chosen;
    int64_t normalizes;  // weights of a row's experts add up to one
};

}  // namespace penstock

namespace {

// What the mixtures of a step need room for; nothing where there is no mixture.
struct MixtureScratch {
    std::unique_ptr<BFloat16[]> logits, rows, inner, activated;  // but for the logits, a row for each expert of each row
    std::unique_ptr<float[]> weights;                            // [rows, chosen]
    std::unique_ptr<int64_t[]> experts, places;                  // the same: numbers, and where among the rows by expert
    std::unique_ptr<int64_t[]> starts;                           // [experts + 1]: of each expert's rows

    MixtureScratch(const Mixture* mixture, int64_t hidden_size, int64_t num_rows) {
        if (!mixture) return;
        const int64_t num_chosen = num_rows * mixture->num_chosen;
        logits.reset(new BFloat16[num_rows * mixture->router.outputs]);
        rows.reset(new BFloat16[num_chosen * hidden_size]);
        inner.reset(new BFloat16[num_chosen * mixture->gate_up.outputs]);
        activated.reset(new BFloat16[num_chosen * mixture->down.inputs]);
        weights.reset(new float[num_chosen]);
        experts.reset(new int64_t[num_chosen]);
        places.reset(new int64_t[num_chosen]);
        starts.reset(new int64_t[mixture->num_experts + 1]);
    }
};

// The experts with the highest logits, of equal ones the first, and the softmax: of these alone, or of all.
inline void choose_experts(const Mixture& mixture, int64_t* experts, float* weights, const BFloat16* logits) {
    const auto is_chosen = [&](int64_t count, int64_t expert) { return std::find(experts, experts + count, expert) != experts + count; };
    for (int64_t i = 0; i < mixture.num_chosen; ++i) {
        int64_t best = -1;
        for (int64_t e = 0; e < mixture.num_experts; ++e)
            if ((best < 0 || to_float(logits[e]) > to_float(logits[best])) && !is_chosen(i, e)) best = e;
        experts[i] = best;
    }
    const float highest = to_float(logits[experts[0]]);
    float total = 0.0f;
    for (int64_t i = 0; i < mixture.num_chosen; ++i) total += weights[i] = std::exp(to_float(logits[experts[i]]) - highest);
    if (!mixture.normalizes) {
        total = 0.0f;
        for (int64_t e = 0; e < mixture.num_experts; ++e) total += std::exp(to_float(logits[e]) - highest);
    }
    for (int64_t i = 0; i < mixture.num_chosen; ++i) weights[i] /= total;
}

// Where each expert's rows begin, and the place among them of each row for each of its experts.
inline void group_rows(const Mixture& mixture, const MixtureScratch& scratch, int64_t num_rows) {
    int64_t* const starts = scratch.starts.get();
    const int64_t count = num_rows * mixture.num_chosen;
    std::fill_n(starts, mixture.num_experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) scratch.places[i] = starts[scratch.experts[i] + 1]++;
    for (int64_t e = 0; e < mixture.num_experts; ++e) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < count; ++i) scratch.places[i] += starts[scratch.experts[i]];
}

// out [num_rows, size]: what the mixture makes of x, of whose sum each rank has a part if there is `add_up`. Then function(row) for each row.
template <typename Function>
void apply_mixture(const Mixture& mixture, const MixtureScratch& scratch, const Activation& activation, BFloat16* out, const BFloat16* x,
                   int64_t num_rows, int64_t size, AddUp add_up, const Function& function) {
    constexpr int64_t EXPONENTIAL = 20;  // takes as long as so many simple operations
    const int64_t num_chosen = mixture.num_chosen, count = num_rows * num_chosen, inner = mixture.down.inputs;
    BFloat16* const rows = scratch.rows.get();
    apply(mixture.router, scratch.logits.get(), x, num_rows);
    parallel_for(num_rows, elementwise(mixture.num_experts * (num_chosen + EXPONENTIAL)), [&](int64_t row) {
        const int64_t first = row * num_chosen;
        choose_experts(mixture, &scratch.experts[first], &scratch.weights[first], &scratch.logits[row * mixture.router.outputs]);
    });
    group_rows(mixture, scratch, num_rows);
    parallel_for(count, elementwise(size), [&](int64_t i) {
        std::memcpy(rows + scratch.places[i] * size, x + i / num_chosen * size, size * sizeof(BFloat16));
    });
    apply_grouped(mixture.gate_up, scratch.inner.get(), rows, scratch.starts.get(), mixture.num_experts);
    parallel_for(count, elementwise(2 * inner),
                 [&](int64_t i) { activate(activation, &scratch.activated[i * inner], &scratch.inner[2 * i * inner], inner); });
    apply_grouped(mixture.down, rows, scratch.activated.get(), scratch.starts.get(), mixture.num_experts);
    const auto add_experts = [&](int64_t row) {
        for (int64_t i = 0; i < size; i += LANES) {
            Vector sum{};
            for (int64_t j = row * num_chosen; j < (row + 1) * num_chosen; ++j)
                sum = multiply_add(load(rows + scratch.places[j] * size + i), broadcast(scratch.weights[j]), sum);
            convert(out + row * size + i, sum);
        }
    };
    const double nanoseconds = elementwise(num_chosen * size);
    if (!add_up)
        return parallel_for(num_rows, nanoseconds, [&](int64_t row) {
            add_experts(row);
            function(row);
        });
    parallel_for(num_rows, nanoseconds, add_experts);
    add_up(out, num_rows * size);
    parallel_for(num_rows, elementwise(size), function);
}

}  // namespace
