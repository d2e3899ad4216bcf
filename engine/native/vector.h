// Sixteen floats at a time, and what a softmax needs of them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "common.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace penstock {

typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVector __attribute__((vector_size(64), aligned(4), may_alias));

constexpr float LOG2_E = 1.44269504f;
constexpr float HIDDEN = -1e30f;  // finite, so that a tile with nothing to see makes no NaN; what it adds is wiped out by the first real score

#ifdef __AVX512F__
inline __m512 load_floats(const float* x) { return _mm512_loadu_ps(x); }

inline __m512 load_floats(const BFloat16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
}
#endif

// 2^f for f within half of 0, to about 1e-7 relative.
inline Vector power_within_half(Vector f) {
    Vector p = 1.5403530e-4f * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    return p * f + 1.0f;
}

// 2^x for x <= 0. What is too small for a number comes out as 0 or as 2^-126.
inline Vector power_of_two(Vector x) {
#ifdef __AVX512F__
    const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Vector)_mm512_scalef_ps((__m512)power_within_half(x - (Vector)n), n);
#else
    x = x > -126.0f ? x : -126.0f - Vector{};
    const IntVector n = __builtin_convertvector(x - 0.5f, IntVector);  // truncated: the nearest integer, as x is not positive
    return (Vector)((IntVector)power_within_half(x - __builtin_convertvector(n, Vector)) + (n << 23));
#endif
}

inline float highest_of(Vector x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x);
#else
    float highest = x[0];
    for (int64_t i = 1; i < 16; ++i) highest = std::max(highest, x[i]);
    return highest;
#endif
}

inline void convert(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }

inline void convert(BFloat16* to, Vector x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    for (int64_t i = 0; i < 16; ++i) store(to + i, x[i]);
#endif
}

}  // namespace penstock
