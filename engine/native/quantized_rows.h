// Rows of activations as signed bytes, each group of 32 with its own scale.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "vector.h"

namespace {

constexpr int64_t GROUP = 32;

struct RowGroup {
    int8_t codes[GROUP];
    float scale;
    float sum;  // of what the codes stand for: what a minimum of the weight is multiplied by
    // -128 times the sum of the codes, and -32 times that of the first half: what to add to their products with codes that are 128 or 32
    // more than what they stand for.
    int32_t minus_128, minus_32;
};

constexpr float SMALLEST = 1e-30f;  // the reciprocal of what is less is no number; such groups count as zeros

inline void set_sums(RowGroup* to, int32_t first, int32_t second) {
    to->sum = to->scale * static_cast<float>(first + second);
    to->minus_128 = -128 * (first + second);
    to->minus_32 = -32 * first;
}

#ifdef __AVX512VNNI__

// The largest magnitude among 32 numbers. Compared as integers, so that NaN is greater than all numbers.
inline float highest_of_group(const float* x) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i greatest = _mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x), magnitude), _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epu32(greatest))));
}

inline float highest_of_group(const BFloat16* x) {
    // Inverted, because there is an instruction for the least of eight.
    const __m512i inverted = _mm512_andnot_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(inverted), _mm512_extracti64x4_epi64(inverted, 1));
    const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return to_float(BFloat16{static_cast<uint16_t>(0x7fff - _mm_extract_epi16(_mm_minpos_epu16(quarter), 0))});
}

inline int32_t sum_of_codes(__m128i codes) {
    // Bytes can be summed without a sign: each is taken as 128 more.
    const __m128i eights = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_unpackhi_epi64(eights, eights))) - 128 * static_cast<int32_t>(GROUP / 2);
}

template <typename T>
inline void quantize_group(RowGroup* to, const T* x) {
    const float highest = highest_of_group(x);
    const __m512 inverse = _mm512_set1_ps(highest < SMALLEST ? 0.0f : 127.0f / highest);
    const __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load_floats(x), inverse)));
    const __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load_floats(x + 16), inverse)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to->codes), _mm256_set_m128i(high, low));
    to->scale = highest * (1.0f / 127.0f);
    set_sums(to, sum_of_codes(low), sum_of_codes(high));
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
    int32_t sums[2] = {};
    for (int64_t i = 0; i < GROUP; ++i) {
        const float scaled = std::nearbyint(to_float(x[i]) * inverse);
        to->codes[i] = scaled >= -127.0f && scaled <= 127.0f ? static_cast<int8_t>(scaled) : 0;  // what is not finite has no code
        sums[2 * i / GROUP] += to->codes[i];
    }
    to->scale = highest * (1.0f / 127.0f);
    set_sums(to, sums[0], sums[1]);
}

#endif

}  // namespace
