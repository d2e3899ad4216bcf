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
    union {
        float sum;       // of what the codes stand for: what a minimum of the weight counts by
        int32_t offset;  // of the sum of products with codes that are 128 more than what they stand for
    };
};

constexpr float SMALLEST = 1e-30f;  // the reciprocal of what is less is no number; such groups count as zeros

template <int BITS>
inline void set_sum(RowGroup* to, int32_t sum) {
    if constexpr (BITS == 8) {
        to->offset = -128 * sum;
    } else {
        to->sum = to->scale * static_cast<float>(sum);
    }
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

inline int32_t sum_of_codes(__m256i codes) {
    // Bytes can be summed without a sign: each is taken as 128 more.
    const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
    return _mm_cvtsi128_si32(_mm_add_epi64(pair, _mm_unpackhi_epi64(pair, pair))) - 128 * static_cast<int32_t>(GROUP);
}

template <int BITS, typename T>
inline void quantize_group(RowGroup* to, const T* x) {
    const float highest = highest_of_group(x);
    const __m512 inverse = _mm512_set1_ps(highest < SMALLEST ? 0.0f : 127.0f / highest);
    const __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load_floats(x), inverse)));
    const __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load_floats(x + 16), inverse)));
    const __m256i codes = _mm256_set_m128i(high, low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to->codes), codes);
    to->scale = highest / 127.0f;
    set_sum<BITS>(to, sum_of_codes(codes));
}

#else

template <int BITS, typename T>
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
    set_sum<BITS>(to, sum);
}

#endif

}  // namespace
