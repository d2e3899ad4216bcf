// What the kernels share: the element types that caches hold, and what varies from layer to layer.

#pragma once

#include <cstdint>
#include <cstring>

// A function that compilers neither inline nor adapt to its callers.
#if defined(__clang__)
#define PENSTOCK_APART __attribute__((noinline))
#else
#define PENSTOCK_APART __attribute__((noipa))
#endif

namespace penstock {

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
    uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof(result));
    return result;
}

inline void store(float* to, float x) { *to = x; }

inline void store(BFloat16* to, float x) {
    uint32_t wide;
    std::memcpy(&wide, &x, sizeof(wide));
    // Round to nearest even; NaN stays NaN because its payload is never all zero after the shift of a quiet NaN.
    to->bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);
}

// By hand: not every compiler has a type for half precision.
inline float half_to_float(uint16_t half) {
    // The exponent counts from another number, which a product makes up for; infinity and NaN have exponents of their own.
    const uint32_t wide = static_cast<uint32_t>(half & 0x7fff) << 13, sign = static_cast<uint32_t>(half & 0x8000) << 16;
    float result;
    std::memcpy(&result, &wide, sizeof(result));
    result *= 0x1p112f;
    uint32_t bits;
    std::memcpy(&bits, &result, sizeof(bits));
    bits = (wide >= 31u << 23 ? wide | 0x7f800000u : bits) | sign;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

// The same from one type to another.
inline void convert(float* to, float x) { *to = x; }
inline void convert(float* to, BFloat16 x) { *to = to_float(x); }
inline void convert(BFloat16* to, BFloat16 x) { *to = x; }
inline void convert(BFloat16* to, float x) { store(to, x); }

struct Options {
    float scaling;
    int64_t window;        // keys further back than this many positions are invisible; 0: no limit
    float softcap;         // 0: none
    const float* sinks;    // one logit per query head that takes part in the denominator only; null: none
};

}  // namespace penstock

using namespace penstock;
