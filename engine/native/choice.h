// Each row's next token: penalties, blocked tokens, masks, temperature, top-k, top-p and min-p, row by row, so that a row's logits stay in a core's cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "bitmask.h"
#include "common.h"
#include "greedy.h"
#include "parallel.h"
#include "vector.h"

namespace {

constexpr int64_t NO_TOKEN = -1;        // none is allowed, or a logit is NaN or infinity
constexpr int64_t MORE_UNIFORMS = -2;   // all were used up by draws outside the nucleus
constexpr int64_t SPAN = 64;            // numbers of which the highest is looked up first
constexpr int64_t SUMMED = 256;         // weights of which the sum is kept
constexpr float LEAST_POWER = -124.0f;  // of two; what is smaller counts as 0

// All that decides on a row's token except its logits. Penalties apply to the tokens `counted`; `counts` says how often each is in the output so
// far, and `pending` is one more token of the output, or -1. The tokens `banned` are blocked. Numbers that are no tokens are ignored.
struct Choice {
    const int64_t* counted;
    const float* counts;
    int64_t num_counted;
    const int64_t* banned;
    int64_t num_banned, pending, top_k;  // no top_k: 0
    float repetition, presence, frequency, temperature, min_p;  // a temperature of 0 takes the most probable token
    double top_p;
    const double* uniforms;  // in [0, 1), one for each draw
    int64_t num_uniforms;
};

// Repetition is that of CTRL (arXiv:1909.05858), presence and frequency OpenAI's.
inline float penalized(const Choice& choice, float logit, float occurrences) {
    // Volatile: each is rounded, as torch does it, so that logits which tie there do here.
    const volatile float repeated = logit > 0.0f ? logit / choice.repetition : logit * choice.repetition;
    const volatile float of_frequency = choice.frequency * occurrences;
    const volatile float rest = repeated - of_frequency;
    return rest - (occurrences > 0.0f ? choice.presence : 0.0f);
}

inline bool is_token(int64_t token, int64_t vocab_size) { return token >= 0 && token < vocab_size; }

inline void penalize(float* logits, const Choice& choice, int64_t vocab_size) {
    bool is_counted = false;
    for (int64_t i = 0; i < choice.num_counted; ++i) {
        const int64_t token = choice.counted[i];
        const bool is_pending = token == choice.pending;
        is_counted |= is_pending;
        if (is_token(token, vocab_size)) logits[token] = penalized(choice, logits[token], choice.counts[i] + (is_pending ? 1.0f : 0.0f));
    }
    if (is_token(choice.pending, vocab_size) && !is_counted)
        logits[choice.pending] = penalized(choice, logits[choice.pending], 1.0f);
}

// The highest logit; minus infinity where one is not a number or plus infinity.
inline float highest_finite(const float* logits, int64_t count) {
    float highest = NEVER;
    int num_odd = 0;
#pragma omp simd reduction(max : highest) reduction(+ : num_odd)
    for (int64_t i = 0; i < count; ++i) {
        highest = logits[i] > highest ? logits[i] : highest;
        num_odd += !(logits[i] <= std::numeric_limits<float>::max());
    }
    return num_odd ? NEVER : highest;
}

// Tokens in ascending order and their logits, and then their weights; what is beyond `count` up to a multiple of SUMMED is 0.
struct Candidates {
    std::vector<float> values;
    std::vector<int64_t> tokens;
    std::vector<double> sums;
    int64_t count = 0;
    bool are_all = true;  // token i is at place i

    void resize(int64_t size) {
        const int64_t whole = (size + SUMMED - 1) / SUMMED * SUMMED;
        if (static_cast<int64_t>(values.size()) < whole) values.resize(whole);
        sums.resize(whole / SUMMED);
        count = size;
    }

    int64_t token(int64_t place) const { return are_all ? place : tokens[place]; }

    // Keeps the k highest, and all that tie with the last of them. Those lie in the k spans that have the highest maxima, so the k-th of these is
    // no higher than the k-th logit, and few are.
    void keep_highest(int64_t k) {
        static thread_local std::vector<float> maxima, highest;
        const int64_t num_spans = (count + SPAN - 1) / SPAN;
        maxima.resize(num_spans);
        for (int64_t span = 0; span < num_spans; ++span) {
            const int64_t end = std::min((span + 1) * SPAN, count);
            float most = NEVER;
            for (int64_t i = span * SPAN; i < end; ++i) most = values[i] > most ? values[i] : most;
            maxima[span] = most;
        }
        highest = maxima;
        float bound = NEVER;
        if (k < num_spans) {
            std::nth_element(highest.begin(), highest.begin() + (k - 1), highest.end(), std::greater<float>());
            bound = highest[k - 1];
        }
        tokens.clear();
        for (int64_t span = 0; span < num_spans; ++span) {
            if (maxima[span] < bound) continue;
            const int64_t end = std::min((span + 1) * SPAN, count);
            for (int64_t i = span * SPAN; i < end; ++i)
                if (values[i] >= bound && values[i] > NEVER) tokens.push_back(i);
        }
        if (static_cast<int64_t>(tokens.size()) > k) {
            highest.clear();
            for (const int64_t token : tokens) highest.push_back(values[token]);
            std::nth_element(highest.begin(), highest.begin() + (k - 1), highest.end(), std::greater<float>());
            const float last = highest[k - 1];
            tokens.erase(std::remove_if(tokens.begin(), tokens.end(), [&](int64_t token) { return values[token] < last; }), tokens.end());
        }
        for (size_t place = 0; place < tokens.size(); ++place) values[place] = values[tokens[place]];
        are_all = false;
        resize(tokens.size());
    }

    // Logits become weights, of which that of the highest logit is 1.
    void weigh(float highest, float temperature) {
        const int64_t whole = static_cast<int64_t>(sums.size()) * SUMMED;
        std::fill(values.begin() + count, values.begin() + whole, NEVER);
        const float factor = LOG2_E / temperature;
        for (int64_t i = 0; i < whole; i += LANES) {
            const Vector powers = ::highest((load(&values[i]) - highest) * factor, broadcast(LEAST_POWER - 1.0f));
            float exponents[LANES], weights[LANES];
            convert(exponents, powers);
            convert(weights, power_of_two(powers));
            for (int64_t lane = 0; lane < LANES; ++lane) values[i + lane] = exponents[lane] < LEAST_POWER ? 0.0f : weights[lane];
        }
    }

    // Sets weights that are not `kept` to 0. Returns the sum of the others.
    template <typename Kept>
    double keep(const Kept& kept) {
        double total = 0.0;
        for (size_t block = 0; block < sums.size(); ++block) {
            float* const weights = &values[block * SUMMED];
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < SUMMED; ++i) {
                weights[i] = kept(weights[i]) ? weights[i] : 0.0f;
                sum += weights[i];
            }
            total += sums[block] = sum;
        }
        return total;
    }

    // The place at which the running sum of weights passes this share of their sum. It never is one of weight 0, however sums round.
    int64_t place_at(double uniform, double total) const {
        double rest = uniform * total;
        int64_t last = -1;
        for (size_t block = 0; block < sums.size(); ++block) {
            if (sums[block] == 0.0) continue;
            if (rest >= sums[block] && has_weight_after(block)) {
                rest -= sums[block];
                continue;
            }
            for (int64_t place = block * SUMMED; place < static_cast<int64_t>(block + 1) * SUMMED; ++place) {
                if (values[place] == 0.0f) continue;
                last = place;
                if (rest < values[place]) break;
                rest -= values[place];
            }
            break;
        }
        return last;
    }

  private:
    bool has_weight_after(size_t block) const {
        return std::any_of(sums.begin() + block + 1, sums.end(), [](double sum) { return sum > 0.0; });
    }
};

// Draws from the nucleus: the smallest set of the most probable tokens that together reach top_p (arXiv:1904.09751), with those that tie with its
// last one. Instead of sorting, a token is drawn from all and rejected where the likelier ones reach top_p without it; the next is drawn among these.
inline int64_t drawn(Candidates& candidates, const Choice& choice) {
    const double whole = candidates.keep([](float) { return true; });
    double total = choice.min_p > 0.0f ? candidates.keep([least = choice.min_p](float weight) { return weight >= least; }) : whole;
    for (int64_t draw = 0; draw < choice.num_uniforms; ++draw) {
        const int64_t place = candidates.place_at(choice.uniforms[draw], total);
        if (place < 0) return NO_TOKEN;
        if (choice.top_p >= 1.0) return candidates.token(place);
        const float weight = candidates.values[place];
        total = candidates.keep([weight](float other) { return other > weight; });
        if (total < choice.top_p * whole) return candidates.token(place);
    }
    return MORE_UNIFORMS;
}

// Not inlined: a row is chosen from by the same instructions, however many there are.
template <typename T>
PENSTOCK_APART int64_t chosen(const T* logits, int64_t vocab_size, const uint32_t* words, int64_t num_words, const Choice& choice) {
    static thread_local Candidates candidates;
    candidates.are_all = true;
    candidates.resize(vocab_size);
    float* const values = candidates.values.data();
    const int64_t num_vectors = vocab_size / LANES * LANES;
    for (int64_t i = 0; i < num_vectors; i += LANES) convert(values + i, load(logits + i));
    for (int64_t i = num_vectors; i < vocab_size; ++i) values[i] = to_float(logits[i]);
    penalize(values, choice, vocab_size);
    for (int64_t i = 0; i < choice.num_banned; ++i)
        if (is_token(choice.banned[i], vocab_size)) values[choice.banned[i]] = NEVER;
    if (words) apply_bitmask_row(values, words, vocab_size, num_words);
    const float highest = highest_finite(values, vocab_size);
    if (highest == NEVER) return NO_TOKEN;
    if (choice.temperature == 0.0f) return std::find(values, values + vocab_size, highest) - values;
    if (choice.top_k > 0 && choice.top_k < vocab_size) candidates.keep_highest(choice.top_k);
    candidates.weigh(highest, choice.temperature);
    return drawn(candidates, choice);
}

constexpr int64_t NUM_INTEGERS = 7, NUM_REALS = 6;  // of a row in `choose`

// For each row the token that is chosen, NO_TOKEN or MORE_UNIFORMS. `integers` [num_rows, 7] are the number of a row's logits, the place of its first
// counted token and how many there are, the same of the banned ones, the pending token, and top_k; `reals` [num_rows, num_reals] are the repetition,
// presence and frequency penalties, temperature, top_p, min_p, and uniform numbers. Row r of `words`, if not null, is for row r of the logits.
template <typename T>
void choose(int64_t* token_ids, const T* logits, int64_t vocab_size, int64_t stride, const uint32_t* words, int64_t num_words, int64_t words_stride,
            const int64_t* integers, const double* reals, int64_t num_rows, int64_t num_reals, const int64_t* counted, const float* counts,
            const int64_t* banned) {
    constexpr int64_t PASSES = 8;  // over the logits, each of them simple
    parallel_for<UNEQUAL>(num_rows, elementwise(vocab_size * PASSES), [&](int64_t i) {
        const int64_t* const n = integers + i * NUM_INTEGERS;
        const double* const x = reals + i * num_reals;
        const auto real = [&](int64_t place) { return static_cast<float>(x[place]); };
        const Choice choice{counted + n[1], counts + n[1], n[2],    banned + n[3], n[4],          n[5], n[6],          real(0),
                            real(1),        real(2),       real(3), real(5),       x[4],          x + NUM_REALS, num_reals - NUM_REALS};
        token_ids[i] = chosen(logits + n[0] * stride, vocab_size, words ? words + n[0] * words_stride : nullptr, num_words, choice);
    });
}

}  // namespace
