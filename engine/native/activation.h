// What an MLP computes between its two linear layers.

#pragma once

#include <cstdint>

#include "common.h"
#include "tile.h"
#include "vector.h"

namespace penstock {

enum ActivationKind : int64_t { SILU, GELU_TANH, CLAMPED_SWIGLU };

struct Activation {
    int64_t kind;
    float alpha, limit;  // of CLAMPED_SWIGLU
};

}  // namespace penstock

namespace {

// x times the sigmoid of `inner`.
inline Vector times_sigmoid(const Vector& x, const Vector& inner) {
    const Vector one = broadcast(1.0f);
    const Vector smaller = power_of_two(lowest(inner, Vector{} - inner) * LOG2_E);  // e^-|inner|
    const Vector larger = for_parts([&](int64_t p) { return inner.parts[p] > 0.0f ? one.parts[p] : smaller.parts[p]; });
    return x * (larger / (one + smaller));
}

// out = activation(gate) * up; `gate_up` holds the one before the other. GELU as approximated by a tanh (Hendrycks and Gimpel, arXiv:1606.08415), which is
// gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3)).
template <int64_t KIND>
inline void activate(BFloat16* out, const BFloat16* gate_up, int64_t size) {
    constexpr float TWICE_ROOT = 1.5957691216f, CUBIC = 0.044715f;
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector gate = load(gate_up + i);
        const Vector inner = KIND == GELU_TANH ? (gate + gate * gate * gate * CUBIC) * TWICE_ROOT : gate;
        convert(out + i, times_sigmoid(gate, inner) * load(gate_up + size + i));
    }
}

// gpt-oss's: out = gate * sigmoid(alpha * gate) * (up + 1) of bounded numbers, of which `gate_up` holds pairs.
inline void clamped_swiglu(BFloat16* out, const BFloat16* gate_up, int64_t size, float alpha, float limit) {
    const Vector most = broadcast(limit), least = broadcast(-limit);
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector gate = lowest(of_pairs<0>(gate_up + 2 * i), most);
        const Vector up = highest(lowest(of_pairs<1>(gate_up + 2 * i), most), least);
        convert(out + i, times_sigmoid(gate, gate * alpha) * (up + broadcast(1.0f)));
    }
}

// gate_up [2 size] to out [size], a multiple of 16.
inline void activate(const Activation& activation, BFloat16* out, const BFloat16* gate_up, int64_t size) {
    if (activation.kind == CLAMPED_SWIGLU) return clamped_swiglu(out, gate_up, size, activation.alpha, activation.limit);
    const auto function = activation.kind == GELU_TANH ? &activate<GELU_TANH> : &activate<SILU>;
    function(out, gate_up, size);
}

}  // namespace
