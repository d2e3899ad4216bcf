// Rows of activations as signed bytes, each group of 32 with its own scale.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

inline float inverse_scale(float highest) { return highest < SMALLEST ? 0.0f : 127.0f / highest; }

inline void set_sums(RowGroup* to, int32_t first, int32_t second) {
    to->sum = to->scale * static_cast<float>(first + second);
    to->minus_128 = -128 * (first + second);
    to->minus_32 = -32 * first;
}

// The largest magnitude among 32 numbers. Compared as integers, so that NaN is greater than all numbers.
inline float highest_of_group(const float* x) {
#if defined(__AVX512F__)
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i greatest = _mm512_max_epu32(_mm512_and_si512(_mm512_loadu_si512(x), magnitude), _mm512_and_si512(_mm512_loadu_si512(x + 16), magnitude));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epu32(greatest))));
#else
    IntRegister most{};
    for (int64_t i = 0; i < GROUP; i += WIDTH) {
        const IntRegister magnitudes = (IntRegister)(*reinterpret_cast<const Words*>(x + i) & 0x7fffffff);
        most = magnitudes > most ? magnitudes : most;
    }
    int32_t greatest = most[0];
    for (int64_t i = 1; i < WIDTH; ++i) greatest = std::max(greatest, most[i]);
    float highest;
    std::memcpy(&highest, &greatest, sizeof(highest));
    return highest;
#endif
}

inline float highest_of_group(const BFloat16* x) {
#if defined(__AVX2__)
    // Inverted, because there is an instruction for the least of eight.
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    const __m256i* const halves = reinterpret_cast<const __m256i*>(x);
    const auto inverted = [&](int64_t i) { return _mm256_andnot_si256(_mm256_loadu_si256(halves + i), magnitude); };
    const __m256i half = _mm256_min_epu16(inverted(0), inverted(1));
    const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return to_float(BFloat16{static_cast<uint16_t>(0x7fff - _mm_extract_epi16(_mm_minpos_epu16(quarter), 0))});
#else
    typedef int16_t Shorts __attribute__((vector_size(16), aligned(2), may_alias));
    constexpr int64_t SHORTS = sizeof(Shorts) / sizeof(int16_t);
    Shorts most{};
    for (int64_t i = 0; i < GROUP; i += SHORTS) {
        const Shorts magnitudes = *reinterpret_cast<const Shorts*>(x + i) & 0x7fff;
        most = magnitudes > most ? magnitudes : most;
    }
    int16_t greatest = most[0];
    for (int64_t i = 1; i < SHORTS; ++i) greatest = std::max(greatest, most[i]);
    return to_float(BFloat16{static_cast<uint16_t>(greatest)});
#endif
}

// The codes of a group, which stand for as many `1 / inverse` as they say. What is not finite has any.
template <typename T>
inline void round_group(int8_t* codes, const T* x, const Vector& inverse) {
    const Vector most = broadcast(127.0f), least = broadcast(-127.0f);
    const auto rounded = [&](int64_t i) { return to_nearest(highest(lowest(load(x + i) * inverse, most), least)); };  // NaN becomes the most
    store_bytes(codes, rounded(0), rounded(LANES));
}

// Of half a group.
inline int32_t sum_of_codes(const int8_t* codes) {
#if defined(__SSE2__)
    // Bytes can be summed without a sign: each is taken as 128 more.
    const __m128i raised = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), _mm_set1_epi8(-128));
    const __m128i eights = _mm_sad_epu8(raised, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_unpackhi_epi64(eights, eights))) - 128 * static_cast<int32_t>(GROUP / 2);
#elif defined(__aarch64__)
    return vaddlvq_s8(vld1q_s8(codes));
#else
    int32_t sum = 0;
    for (int64_t i = 0; i < GROUP / 2; ++i) sum += codes[i];
    return sum;
#endif
}

template <typename T>
inline void quantize_group(RowGroup* to, const T* x) {
    const float highest = highest_of_group(x);
    round_group(to->codes, x, broadcast(inverse_scale(highest)));
    to->scale = highest * (1.0f / 127.0f);
    set_sums(to, sum_of_codes(to->codes), sum_of_codes(to->codes + GROUP / 2));
}

#ifdef __AVX512VNNI__

// Four groups in half the time, with the same results for numbers that are finite. Of what they have one each of, every quarter of a register is a
// group's.
constexpr int64_t GROUPS_AT_ONCE = 4;

struct Magnitudes {
    __m512 highest, inverse;  // of a step
};

inline Magnitudes magnitudes_of(const BFloat16* x) {
    const auto read = [&](int64_t g) { return _mm512_and_si512(_mm512_loadu_si512(x + g * GROUP), _mm512_set1_epi16(0x7fff)); };
    const auto greater = [](__m512i a, __m512i b) {
        return _mm512_max_epu16(_mm512_shuffle_i32x4(a, b, EVEN_QUARTERS), _mm512_shuffle_i32x4(a, b, ODD_QUARTERS));
    };
    __m512i most = greater(greater(read(0), read(1)), greater(read(2), read(3)));
    most = _mm512_max_epu16(most, _mm512_shuffle_epi32(most, _MM_PERM_BADC));
    most = _mm512_max_epu16(most, _mm512_shuffle_epi32(most, _MM_PERM_CDAB));
    most = _mm512_max_epu16(most, _mm512_rol_epi32(most, 16));
    const __m512 highest = _mm512_castsi512_ps(_mm512_slli_epi32(most, 16));
    const __mmask16 counts = _mm512_cmp_ps_mask(highest, _mm512_set1_ps(SMALLEST), _CMP_NLT_UQ);
    return {highest, _mm512_maskz_div_ps(counts, _mm512_set1_ps(127.0f), highest)};
}

inline void quantize_groups(RowGroup* to, const BFloat16* x, const Magnitudes& magnitudes) {
    const __m512 inverse = magnitudes.inverse;
    __m256i sums[4];  // of four codes each
    const auto quantize = [&](int64_t g, const __m512& scale) {
        const __m512i numbers = _mm512_loadu_si512(x + g * GROUP);
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(numbers, 16));
        const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(numbers, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000))));
        const __m512i lower = _mm512_cvtps_epi32(_mm512_mul_ps(even, scale)), upper = _mm512_cvtps_epi32(_mm512_mul_ps(odd, scale));
        const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xff), lower, _mm512_slli_epi32(upper, 8), 0xca);  // bits of one or the other
        const __m256i codes = _mm512_cvtepi32_epi16(both);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[g].codes), codes);
        sums[g] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), codes);
    };
    quantize(0, _mm512_shuffle_f32x4(inverse, inverse, 0x00));
    quantize(1, _mm512_shuffle_f32x4(inverse, inverse, 0x55));
    quantize(2, _mm512_shuffle_f32x4(inverse, inverse, 0xaa));
    quantize(3, _mm512_shuffle_f32x4(inverse, inverse, 0xff));
    const auto together = [](__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); };
    const auto added = [](__m512i quarters) {
        quarters = _mm512_add_epi32(quarters, _mm512_shuffle_epi32(quarters, _MM_PERM_BADC));
        return _mm512_add_epi32(quarters, _mm512_shuffle_epi32(quarters, _MM_PERM_CDAB));
    };
    const __m512i lower = together(sums[0], sums[1]), upper = together(sums[2], sums[3]);
    const __m512i first = added(_mm512_shuffle_i32x4(lower, upper, EVEN_QUARTERS)), second = added(_mm512_shuffle_i32x4(lower, upper, ODD_QUARTERS));
    const __m512i total = _mm512_add_epi32(first, second), zero = _mm512_setzero_si512();
    const __m512 scale = _mm512_mul_ps(magnitudes.highest, _mm512_set1_ps(1.0f / 127.0f)), sum = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(total));
    __m512i rest = _mm512_castps_si512(_mm512_mask_mov_ps(scale, 0x2222, sum));  // what a group has beside codes, in its order
    rest = _mm512_mask_sub_epi32(rest, 0x4444, zero, _mm512_slli_epi32(total, 7));
    rest = _mm512_mask_sub_epi32(rest, 0x8888, zero, _mm512_slli_epi32(first, 5));
    _mm_storeu_ps(&to[0].scale, _mm_castsi128_ps(_mm512_castsi512_si128(rest)));
    _mm_storeu_ps(&to[1].scale, _mm_castsi128_ps(_mm512_extracti32x4_epi32(rest, 1)));
    _mm_storeu_ps(&to[2].scale, _mm_castsi128_ps(_mm512_extracti32x4_epi32(rest, 2)));
    _mm_storeu_ps(&to[3].scale, _mm_castsi128_ps(_mm512_extracti32x4_epi32(rest, 3)));
}

// As many of a row's groups as are done at once; returns how many.
inline int64_t quantize_most_groups(RowGroup* to, const BFloat16* x, int64_t num_groups) {
    if (num_groups < GROUPS_AT_ONCE) return 0;
    Magnitudes next = magnitudes_of(x);  // while those before are quantized, since each takes long for one and little for many
    int64_t g = 0;
    for (; g + GROUPS_AT_ONCE <= num_groups; g += GROUPS_AT_ONCE) {
        const Magnitudes own = next;
        if (g + 2 * GROUPS_AT_ONCE <= num_groups) next = magnitudes_of(x + (g + GROUPS_AT_ONCE) * GROUP);
        quantize_groups(to + g, x + g * GROUP, own);
    }
    return g;
}

#endif

template <typename T>
inline void quantize_row(RowGroup* to, const T* x, int64_t num_groups) {
    int64_t g = 0;
#ifdef __AVX512VNNI__
    if constexpr (std::is_same_v<T, BFloat16>) g = quantize_most_groups(to, x, num_groups);
#endif
    for (; g < num_groups; ++g) quantize_group(to + g, x + g * GROUP);
}

}  // namespace
