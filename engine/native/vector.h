// Sixteen floats at a time, in as many registers as the processor takes for them, and what the kernels need of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common.h"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace penstock {

#if defined(__AVX512F__)
constexpr int64_t WIDTH = 16;  // floats of a register
#elif defined(__AVX2__)
constexpr int64_t WIDTH = 8;
#else
constexpr int64_t WIDTH = 4;
#endif
constexpr int64_t LANES = 16, PARTS = LANES / WIDTH;

typedef float Register __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntRegister __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t UIntRegister __attribute__((vector_size(4 * WIDTH)));

// The same anywhere in memory.
typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH), aligned(2), may_alias));
typedef uint16_t HalfWords __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

// Not a vector type of 64 bytes: where registers are shorter, compilers keep those in memory.
struct Vector {
    Register parts[PARTS];
};

struct IntVector {
    IntRegister parts[PARTS];
};

constexpr float LOG2_E = 1.44269504f;
constexpr float HIDDEN = -1e30f;  // finite, so that a tile with nothing to see makes no NaN; what it adds is wiped out by the first real score

// Written out, because compilers find the registers of a loop's array too late.
template <typename Function>
inline __attribute__((always_inline)) Vector for_parts(const Function& part) {
    if constexpr (PARTS == 1) {
        return {{part(0)}};
    } else if constexpr (PARTS == 2) {
        return {{part(0), part(1)}};
    } else {
        return {{part(0), part(1), part(2), part(3)}};
    }
}

inline Vector broadcast(float x) {
    return for_parts([&](int64_t) { return Register{} + x; });
}

inline Vector operator+(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return a.parts[p] + b.parts[p]; });
}

inline Vector operator-(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return a.parts[p] - b.parts[p]; });
}

inline Vector operator*(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return a.parts[p] * b.parts[p]; });
}

inline Vector operator/(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return a.parts[p] / b.parts[p]; });
}

inline Vector operator-(const Vector& a, float b) { return a - broadcast(b); }
inline Vector operator*(const Vector& a, float b) { return a * broadcast(b); }
inline Vector& operator+=(Vector& a, const Vector& b) { return a = a + b; }
inline Vector& operator*=(Vector& a, const Vector& b) { return a = a * b; }

// a * b + c. By name, since a compiler that may reorder sums could do so in one loop and not in another, and what a row gives would depend on
// how many rows there are.
inline Register multiply_add(Register a, Register b, Register c) {
#if defined(__AVX512F__)
    return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Register)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__SSE2__)
    asm("" : "+x"(a), "+x"(b));  // which hides from the compiler where they come from
    Register result = a * b;
    asm("" : "+x"(result));
    result += c;
    asm("" : "+x"(result));
    return result;
#else
    return a * b + c;
#endif
}

inline Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
    return for_parts([&](int64_t p) { return multiply_add(a.parts[p], b.parts[p], c.parts[p]); });
}

// a * b, rounded before anything is multiplied by it, for the same reason.
inline Register rounded_product(Register a, Register b) {
    Register result = a * b;
#if defined(__AVX512F__)
    asm("" : "+v"(result));
#elif defined(__SSE2__)
    asm("" : "+x"(result));
#elif defined(__aarch64__)
    asm("" : "+w"(result));
#endif
    return result;
}

inline Vector rounded_product(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return rounded_product(a.parts[p], b.parts[p]); });
}

// Where either is NaN, the second one. Compilers take two instructions, since they do not know that of theirs.
inline Register highest(Register a, Register b) {
#if defined(__AVX512F__)
    return (Register)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Register)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (Register)_mm_max_ps((__m128)a, (__m128)b);
#else
    return a > b ? a : b;
#endif
}

inline Register lowest(Register a, Register b) {
#if defined(__AVX512F__)
    return (Register)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Register)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (Register)_mm_min_ps((__m128)a, (__m128)b);
#else
    return a < b ? a : b;
#endif
}

inline Vector highest(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return highest(a.parts[p], b.parts[p]); });
}

inline Vector lowest(const Vector& a, const Vector& b) {
    return for_parts([&](int64_t p) { return lowest(a.parts[p], b.parts[p]); });
}

inline Vector load(const float* from) {
    return for_parts([&](int64_t p) { return (Register)*reinterpret_cast<const Floats*>(from + WIDTH * p); });
}

#ifdef __AVX512F__
constexpr int EVEN_QUARTERS = 0x88, ODD_QUARTERS = 0xdd;  // of two registers: what shuffles of 16 bytes take
#endif

inline Register load_register(const BFloat16* from) {
#if defined(__AVX512F__)
    return (Register)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif defined(__AVX2__)
    return (Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#elif defined(__aarch64__)
    return (Register)vshll_n_u16(vld1_u16(&from->bits), 16);
#else
    return (Register)(__builtin_convertvector(*reinterpret_cast<const HalfWords*>(from), UIntRegister) << 16);
#endif
}

inline Vector load(const BFloat16* from) {
    return for_parts([&](int64_t p) { return load_register(from + WIDTH * p); });
}

inline Vector to_floats(const IntVector& x) {
    return for_parts([&](int64_t p) { return __builtin_convertvector(x.parts[p], Register); });
}

// Sixteen numbers of half precision.
inline Vector load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    return {{(Register)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}};
#elif defined(__AVX2__) && defined(__F16C__)
    return for_parts([&](int64_t p) { return (Register)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + p)); });
#elif defined(__aarch64__)
    return for_parts([&](int64_t p) {
        return (Register)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * WIDTH * p)));
    });
#else
    uint16_t halves[LANES];
    std::memcpy(halves, from, sizeof(halves));
    float numbers[LANES];
    for (int64_t i = 0; i < LANES; ++i) numbers[i] = half_to_float(halves[i]);
    return load(numbers);
#endif
}

// Sixteen signed bytes.
inline Vector load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
    return {{(Register)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))}};
#elif defined(__AVX2__)
    return for_parts([&](int64_t p) {
        return (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + WIDTH * p))));
    });
#else
    float numbers[LANES];
    for (int64_t i = 0; i < LANES; ++i) numbers[i] = from[i];
    return load(numbers);
#endif
}

// The nearest integers, of two the even one.
inline IntVector to_nearest(const Vector& x) {
    IntVector integers;
    for (int64_t p = 0; p < PARTS; ++p) {
#if defined(__AVX512F__)
        integers.parts[p] = (IntRegister)_mm512_cvtps_epi32((__m512)x.parts[p]);
#elif defined(__AVX2__)
        integers.parts[p] = (IntRegister)_mm256_cvtps_epi32((__m256)x.parts[p]);
#elif defined(__SSE2__)
        integers.parts[p] = (IntRegister)_mm_cvtps_epi32((__m128)x.parts[p]);
#elif defined(__aarch64__)
        integers.parts[p] = (IntRegister)vcvtnq_s32_f32((float32x4_t)x.parts[p]);
#else
        for (int64_t i = 0; i < WIDTH; ++i) integers.parts[p][i] = static_cast<int32_t>(std::nearbyint(x.parts[p][i]));
#endif
    }
    return integers;
}

// Thirty-two integers as bytes, each as the nearest that one holds.
inline void store_bytes(int8_t* to, const IntVector& low, const IntVector& high) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8((__m512i)low.parts[0]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm512_cvtsepi32_epi8((__m512i)high.parts[0]));
#elif defined(__AVX2__)
    const __m256i first = _mm256_packs_epi32((__m256i)low.parts[0], (__m256i)low.parts[1]);
    const __m256i second = _mm256_packs_epi32((__m256i)high.parts[0], (__m256i)high.parts[1]);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // these pack each half of a register on its own
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), in_order));
#elif defined(__SSE2__)
    for (const IntVector* half : {&low, &high}) {
        const __m128i first = _mm_packs_epi32((__m128i)half->parts[0], (__m128i)half->parts[1]);
        const __m128i second = _mm_packs_epi32((__m128i)half->parts[2], (__m128i)half->parts[3]);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (half == &high ? LANES : 0)), _mm_packs_epi16(first, second));
    }
#elif defined(__aarch64__)
    for (const IntVector* half : {&low, &high}) {
        const int16x8_t first = vcombine_s16(vqmovn_s32((int32x4_t)half->parts[0]), vqmovn_s32((int32x4_t)half->parts[1]));
        const int16x8_t second = vcombine_s16(vqmovn_s32((int32x4_t)half->parts[2]), vqmovn_s32((int32x4_t)half->parts[3]));
        vst1q_s8(to + (half == &high ? LANES : 0), vcombine_s8(vqmovn_s16(first), vqmovn_s16(second)));
    }
#else
    for (int64_t i = 0; i < LANES; ++i) {
        to[i] = static_cast<int8_t>(std::clamp(low.parts[i / WIDTH][i % WIDTH], -128, 127));
        to[LANES + i] = static_cast<int8_t>(std::clamp(high.parts[i / WIDTH][i % WIDTH], -128, 127));
    }
#endif
}

// Sixteen powers of two, of exponents that are 128 more than what they stand for. The two smallest give subnormal numbers.
inline Vector powers_of_two(const uint8_t* exponents) {
    const auto power = [](UIntRegister exponent) { return (Register)(exponent < 2 ? 0x200000 * (exponent + 1) : (exponent - 1) << 23); };
#if defined(__AVX512F__)
    return {{power((UIntRegister)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents))))}};
#elif defined(__AVX2__)
    return for_parts([&](int64_t p) {
        return power((UIntRegister)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents + WIDTH * p))));
    });
#else
    return for_parts([&](int64_t p) {
        typedef uint8_t Bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));
        return power(__builtin_convertvector(*reinterpret_cast<const Bytes*>(exponents + WIDTH * p), UIntRegister));
    });
#endif
}

inline void convert(float* to, const Vector& x) {
    for (int64_t p = 0; p < PARTS; ++p) *reinterpret_cast<Floats*>(to + WIDTH * p) = x.parts[p];
}

inline void convert(BFloat16* to, const Vector& x) {
    for (int64_t p = 0; p < PARTS; ++p) {
#if defined(__AVX512BF16__)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x.parts[p]));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
        vst1_u16(&to[WIDTH * p].bits, vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x.parts[p])));
#else
        const UIntRegister wide = (UIntRegister)x.parts[p], rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;  // as `store` does
        *reinterpret_cast<HalfWords*>(to + WIDTH * p) = __builtin_convertvector(rounded, HalfWords);
#endif
    }
}

// Thirty-two numbers, in one store where a register holds them: what is read in one piece soon after has to be written in one.
template <typename T>
inline void convert(T* to, const Vector& low, const Vector& high) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high.parts[0], (__m512)low.parts[0]));
        return;
    }
#endif
    convert(to, low);
    convert(to + LANES, high);
}

// Which of the lanes count: those from `begin` on that are before `end`, either of which may lie outside.
#ifdef __AVX512F__
struct Mask {
    __mmask16 bits;
};

inline Mask lanes_between(int64_t begin, int64_t end) {
    begin = std::clamp<int64_t>(begin, 0, LANES);
    end = std::clamp<int64_t>(end, 0, LANES);
    return {static_cast<__mmask16>((0xffffu << begin) & (0xffffu >> (LANES - end)))};
}

inline Vector select(const Mask& mask, const Vector& x, float otherwise) {
    return {{(Register)_mm512_mask_mov_ps(_mm512_set1_ps(otherwise), mask.bits, (__m512)x.parts[0])}};
}
#else
struct Mask {
    int32_t begin, end;
};

inline Mask lanes_between(int64_t begin, int64_t end) {
    return {static_cast<int32_t>(std::clamp<int64_t>(begin, 0, LANES)), static_cast<int32_t>(std::clamp<int64_t>(end, 0, LANES))};
}

inline Vector select(const Mask& mask, const Vector& x, float otherwise) {
    IntRegister lanes;
    for (int32_t i = 0; i < WIDTH; ++i) lanes[i] = i;
    return for_parts([&](int64_t p) {
        const IntRegister lane = lanes + static_cast<int32_t>(WIDTH * p);
        return ((lane >= mask.begin) & (lane < mask.end)) ? x.parts[p] : Register{} + otherwise;
    });
}
#endif

// 2^f for f within half of 0, to about 1e-7 relative.
inline Register power_within_half(Register f) {
    Register p = 1.5403530e-4f * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    return p * f + 1.0f;
}

// 2^x for x <= 0. What is too small for a number comes out as 0 or as 2^-126.
inline Register power_of_two(Register x) {
#ifdef __AVX512F__
    const __m512 n = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Register)_mm512_scalef_ps((__m512)power_within_half(x - (Register)n), n);
#else
    x = x > -126.0f ? x : -126.0f - Register{};
    const IntRegister n = __builtin_convertvector(x - 0.5f, IntRegister);  // truncated: the nearest integer, as x is not positive
    return (Register)((IntRegister)power_within_half(x - __builtin_convertvector(n, Register)) + (n << 23));
#endif
}

inline Vector power_of_two(const Vector& x) {
    return for_parts([&](int64_t p) { return power_of_two(x.parts[p]); });
}

inline float highest_of(const Vector& x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)x.parts[0]);
#else
    Register most = x.parts[0];
    for (int64_t p = 1; p < PARTS; ++p) most = x.parts[p] > most ? x.parts[p] : most;
    float highest = most[0];
    for (int64_t i = 1; i < WIDTH; ++i) highest = std::max(highest, most[i]);
    return highest;
#endif
}

inline bool any_greater(const Vector& x, float than) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x.parts[0], _mm512_set1_ps(than), _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    const __m256 limit = _mm256_set1_ps(than);
    const __m256 first = _mm256_cmp_ps((__m256)x.parts[0], limit, _CMP_GT_OQ), second = _mm256_cmp_ps((__m256)x.parts[1], limit, _CMP_GT_OQ);
    return _mm256_movemask_ps(_mm256_or_ps(first, second)) != 0;
#else
    return highest_of(x) > than;
#endif
}

inline float sum_of(const Vector& x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x.parts[0]);
#else
    Register sums = x.parts[0];
    for (int64_t p = 1; p < PARTS; ++p) sums += x.parts[p];
    float sum = sums[0];
    for (int64_t i = 1; i < WIDTH; ++i) sum += sums[i];
    return sum;
#endif
}

#ifndef __AVX512F__
template <int32_t... LANES_TAKEN>
inline Register shuffle(Register a, Register b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, LANES_TAKEN...);
#else
    return __builtin_shuffle(a, b, IntRegister{LANES_TAKEN...});
#endif
}

// Numbers, pairs or halves of two registers in turn: in each 128 bits the lower ones, or the upper ones.
#if defined(__AVX2__)
inline Register low_numbers(Register a, Register b) { return shuffle<0, 8, 1, 9, 4, 12, 5, 13>(a, b); }
inline Register high_numbers(Register a, Register b) { return shuffle<2, 10, 3, 11, 6, 14, 7, 15>(a, b); }
inline Register low_pairs(Register a, Register b) { return shuffle<0, 1, 8, 9, 4, 5, 12, 13>(a, b); }
inline Register high_pairs(Register a, Register b) { return shuffle<2, 3, 10, 11, 6, 7, 14, 15>(a, b); }
inline Register low_halves(Register a, Register b) { return shuffle<0, 1, 2, 3, 8, 9, 10, 11>(a, b); }
inline Register high_halves(Register a, Register b) { return shuffle<4, 5, 6, 7, 12, 13, 14, 15>(a, b); }
#else
inline Register low_numbers(Register a, Register b) { return shuffle<0, 4, 1, 5>(a, b); }
inline Register high_numbers(Register a, Register b) { return shuffle<2, 6, 3, 7>(a, b); }
inline Register low_pairs(Register a, Register b) { return shuffle<0, 1, 4, 5>(a, b); }
inline Register high_pairs(Register a, Register b) { return shuffle<2, 3, 6, 7>(a, b); }
#endif
#endif

// Sixteen pairs of bfloat16, which some processors multiply and add up at once.
#if defined(__AVX512BF16__)
#define PENSTOCK_BFLOAT16_PRODUCTS
constexpr bool HAS_BFLOAT16_PRODUCTS = true;

struct Pairs {
    __m512i all;
};

inline Pairs load_pairs(const BFloat16* from) { return {_mm512_loadu_si512(from)}; }

inline Pairs broadcast_pair(const BFloat16* from) {
    int32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    return {_mm512_set1_epi32(pair)};
}

inline Vector add_products(const Vector& sums, const Pairs& a, const Pairs& b) {
    return {{(Register)_mm512_dpbf16_ps((__m512)sums.parts[0], (__m512bh)a.all, (__m512bh)b.all)}};
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PENSTOCK_BFLOAT16_PRODUCTS
constexpr bool HAS_BFLOAT16_PRODUCTS = true;

struct Pairs {
    uint16x8_t parts[PARTS];
};

inline Pairs load_pairs(const BFloat16* from) {
    const uint16_t* bits = &from->bits;
    return {{vld1q_u16(bits), vld1q_u16(bits + 8), vld1q_u16(bits + 16), vld1q_u16(bits + 24)}};
}

inline Pairs broadcast_pair(const BFloat16* from) {
    uint32_t pair;
    std::memcpy(&pair, from, sizeof(pair));
    const uint16x8_t both = vreinterpretq_u16_u32(vdupq_n_u32(pair));
    return {{both, both, both, both}};
}

inline Vector add_products(const Vector& sums, const Pairs& a, const Pairs& b) {
    return for_parts([&](int64_t p) {
        return (Register)vbfdotq_f32((float32x4_t)sums.parts[p], vreinterpretq_bf16_u16(a.parts[p]), vreinterpretq_bf16_u16(b.parts[p]));
    });
}
#else
constexpr bool HAS_BFLOAT16_PRODUCTS = false;
#endif

// What bfloat16 is multiplied as, and how many steps of an inner product lie side by side in a packed row of it.
using Factor = std::conditional_t<HAS_BFLOAT16_PRODUCTS, BFloat16, float>;
constexpr int64_t FACTORS_OF_STEP = HAS_BFLOAT16_PRODUCTS ? 2 : 1;

}  // namespace penstock
