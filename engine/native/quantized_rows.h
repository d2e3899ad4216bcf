// Rows of activations as signed bytes, each group of 32 with its own scale.

#pragma once

#include <cmath>
#include <cstdint>

#include "common.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t GROUP = 32;

struct RowGroup {
    int8_t codes[GROUP];
    float scale;
    float sum;  // of what the codes stand for
};

constexpr float SMALLEST = 1e-30f;  // the reciprocal of what is less is no number; such groups count as zeros

#ifdef __AVX512VNNI__

inline __m512 load_floats(const float* x) { return _mm512_loadu_ps(x); }

inline __m512 load_floats(const BFloat16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
}

template <typename T>
inline void quantize_group(RowGroup* to, const T* x) {
    const __m512 low = load_floats(x), high = load_floats(x + 16);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    // As integers, so that NaN is greater than all numbers and makes the scale NaN.
    const __m512i greatest = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(low), magnitude), _mm512_and_si512(_mm512_castps_si512(high), magnitude));
    const float highest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epu32(greatest))));
    const __m512 inverse = _mm512_set1_ps(highest < SMALLEST ? 0.0f : 127.0f / highest);
    const __m512i low_codes = _mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), high_codes = _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->codes), _mm512_cvtsepi32_epi8(low_codes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->codes + 16), _mm512_cvtsepi32_epi8(high_codes));
    to->scale = highest / 127.0f;
    to->sum = to->scale * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(low_codes, high_codes)));
}

#else

template <typename T>
inline void quantize_group(RowGroup* to, const T* x) {
    uint32_t greatest = 0;
    for (int64_t i = 0; i < GROUP; ++i) {
        const float value = to_float(x[i]);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        bits &= 0x7fffffff;
        greatest = bits > greatest ? bits : greatest;
    }
    float highest;
    std::memcpy(&highest, &greatest, sizeof(highest));
    const float inverse = highest < SMALLEST ? 0.0f : 127.0f / highest;
    int32_t sum = 0;
    for (int64_t i = 0; i < GROUP; ++i) {
        const float scaled = std::nearbyint(to_float(x[i]) * inverse);
        to->codes[i] = scaled >= -127.0f && scaled <= 127.0f ? static_cast<int8_t>(scaled) : 0;  // what is not finite has no code
        sum += to->codes[i];
    }
    to->scale = highest / 127.0f;
    to->sum = to->scale * static_cast<float>(sum);
}

#endif

}  // namespace
