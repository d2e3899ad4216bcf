// Sums of products with a block of codes: by instructions that sum four products of bytes, or two, or on any processor.

#pragma once

#ifndef __AVX512VNNI__

#include <cstdint>
#include <cstring>

#include "quantized_product.h"
#include "vector.h"

namespace {

constexpr int64_t STEPS = 8;  // of four columns each

inline int32_t four_codes_at(const RowGroup& x, int64_t step) {
    int32_t four;
    std::memcpy(&four, x.codes + 4 * step, sizeof(four));
    return four;
}

#if defined(__AVX2__)

constexpr int64_t HALVES = 2;  // of a tile's rows

// 16 in each byte whose bit is set, of 32.
inline __m256i sixteens(const uint8_t* bits) {
    int32_t word;
    std::memcpy(&word, bits, sizeof(word));
    const __m256i byte_of_bit = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i place = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of_bit), place);
    return _mm256_and_si256(_mm256_cmpeq_epi8(found, place), _mm256_set1_epi8(16));
}

template <int BITS>
struct UnpackedBlock {
    __m256i codes[STEPS][HALVES];

    explicit UnpackedBlock(const uint8_t* block) {
        for (int64_t step = 0; step < CODE_ROWS<BITS>; ++step)
            for (int64_t h = 0; h < HALVES; ++h) {
                const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block) + HALVES * step + h);
                if constexpr (BITS != 8) {
                    const __m256i lower_half = _mm256_set1_epi8(15);
                    codes[step][h] = _mm256_and_si256(bytes, lower_half);
                    codes[step + 4][h] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), lower_half);
                    if constexpr (BITS == 5) {
                        const uint8_t* fifth_bits = block + HALF_BYTES + 8 * step + 4 * h;
                        codes[step][h] = _mm256_or_si256(codes[step][h], sixteens(fifth_bits));
                        codes[step + 4][h] = _mm256_or_si256(codes[step + 4][h], sixteens(fifth_bits + 32));
                    }
                } else {
#ifdef __AVXVNNI__
                    codes[step][h] = bytes;
#else
                    codes[step][h] = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));  // without the 128 that they are more
#endif
                }
            }
    }

    // For each row of the tile the sum of its products with the group.
    IntVector multiply(const RowGroup& x) const {
        __m256i sums[HALVES];
        for (int64_t h = 0; h < HALVES; ++h) {
#ifdef __AVXVNNI__
            sums[h] = _mm256_set1_epi32(BITS == 8 ? x.offset : 0);
            for (int64_t step = 0; step < STEPS; ++step)
                sums[h] = _mm256_dpbusd_avx_epi32(sums[h], codes[step][h], _mm256_set1_epi32(four_codes_at(x, step)));
#else
            const __m256i ones = _mm256_set1_epi16(1);
            sums[h] = _mm256_setzero_si256();
            for (int64_t step = 0; step < STEPS; ++step) {
                const __m256i four = _mm256_set1_epi32(four_codes_at(x, step));
                if constexpr (BITS == 4) {  // sixteen bits hold all eight pairs of products of 15 and 127
                    sums[h] = _mm256_add_epi16(sums[h], _mm256_maddubs_epi16(codes[step][h], four));
                } else if constexpr (BITS == 5) {
                    sums[h] = _mm256_add_epi32(sums[h], _mm256_madd_epi16(_mm256_maddubs_epi16(codes[step][h], four), ones));
                } else {  // one factor has to be without a sign, and only codes of the weight may be -128
                    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[step][h]), _mm256_sign_epi8(four, codes[step][h]));
                    sums[h] = _mm256_add_epi32(sums[h], _mm256_madd_epi16(pairs, ones));
                }
            }
            if constexpr (BITS == 4) sums[h] = _mm256_madd_epi16(sums[h], ones);
#endif
        }
#ifdef __AVX512F__
        return {{(IntRegister)_mm512_inserti64x4(_mm512_castsi256_si512(sums[0]), sums[1], 1)}};
#else
        return {{(IntRegister)sums[0], (IntRegister)sums[1]}};
#endif
    }
};

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int64_t QUARTERS = 4;  // of a tile's rows

// 16 in each byte whose bit is set, of 16.
inline uint8x16_t sixteens(const uint8_t* bits) {
    const uint8x16_t bytes = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    const uint8x16_t place = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    return vandq_u8(vtstq_u8(bytes, place), vdupq_n_u8(16));
}

template <int BITS>
struct UnpackedBlock {
    int8x16_t codes[STEPS][QUARTERS];

    explicit UnpackedBlock(const uint8_t* block) {
        for (int64_t step = 0; step < CODE_ROWS<BITS>; ++step)
            for (int64_t q = 0; q < QUARTERS; ++q) {
                const uint8x16_t bytes = vld1q_u8(block + 64 * step + 16 * q);
                if constexpr (BITS != 8) {
                    uint8x16_t lower = vandq_u8(bytes, vdupq_n_u8(15)), upper = vshrq_n_u8(bytes, 4);
                    if constexpr (BITS == 5) {
                        const uint8_t* fifth_bits = block + HALF_BYTES + 8 * step + 2 * q;
                        lower = vorrq_u8(lower, sixteens(fifth_bits));
                        upper = vorrq_u8(upper, sixteens(fifth_bits + 32));
                    }
                    codes[step][q] = vreinterpretq_s8_u8(lower);
                    codes[step + 4][q] = vreinterpretq_s8_u8(upper);
                } else {
                    codes[step][q] = vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));  // without the 128 that they are more
                }
            }
    }

    // For each row of the tile the sum of its products with the group.
    IntVector multiply(const RowGroup& x) const {
        int32x4_t sums[QUARTERS] = {};
        for (int64_t step = 0; step < STEPS; ++step) {
            const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(four_codes_at(x, step)));
            for (int64_t q = 0; q < QUARTERS; ++q) sums[q] = vdotq_s32(sums[q], codes[step][q], four);
        }
        return {{(IntRegister)sums[0], (IntRegister)sums[1], (IntRegister)sums[2], (IntRegister)sums[3]}};
    }
};

#else

typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int64_t Longs __attribute__((vector_size(16)));

template <int BITS>
struct UnpackedBlock {
    static constexpr int64_t EIGHTHS = 8;
    static constexpr int64_t STEPS_TO_SUM = BITS == 4 ? 8 : 2;  // sixteen bits hold as many pairs of products: of 15, or of 31 or 128, and 127

    Shorts codes[STEPS][EIGHTHS];  // those of 8 bits without the 128 that they are more than what they stand for

    explicit UnpackedBlock(const uint8_t* block) {
        int16_t unpacked[STEPS * EIGHTHS * 8];
        for (int64_t i = 0; i < 64 * CODE_ROWS<BITS>; ++i) {
            unpacked[i] = static_cast<int16_t>(BITS == 8 ? block[i] - 128 : block[i] & 15);
            if constexpr (BITS != 8) unpacked[i + HALF_BYTES] = block[i] >> 4;
        }
        if constexpr (BITS == 5)
            for (int64_t i = 0; i < TILE * GROUP; ++i) unpacked[i] += (block[HALF_BYTES + i / 8] >> i % 8 & 1) * 16;
        std::memcpy(codes, unpacked, sizeof(codes));
    }

    // For each row of the tile the sum of its products with the group.
    IntVector multiply(const RowGroup& x) const {
        Shorts sums[EIGHTHS] = {};
        Ints pairs[EIGHTHS] = {};
        for (int64_t step = 0; step < STEPS; ++step) {
            int16_t four[4];
            for (int64_t i = 0; i < 4; ++i) four[i] = x.codes[4 * step + i];
            int64_t pattern;
            std::memcpy(&pattern, four, sizeof(pattern));
            for (int64_t e = 0; e < EIGHTHS; ++e) sums[e] += codes[step][e] * (Shorts)(Longs{} + pattern);
            if (step % STEPS_TO_SUM != STEPS_TO_SUM - 1) continue;
            for (int64_t e = 0; e < EIGHTHS; ++e) {
                const Ints both = (Ints)sums[e];
                pairs[e] += ((both << 16) >> 16) + (both >> 16);
                sums[e] = Shorts{};
            }
        }
        int32_t halves[2 * TILE], dots[TILE];
        std::memcpy(halves, pairs, sizeof(halves));
        for (int64_t o = 0; o < TILE; ++o) dots[o] = halves[2 * o] + halves[2 * o + 1];
        IntVector all;
        std::memcpy(&all, dots, sizeof(all));
        return all;
    }
};

#endif

}  // namespace

#endif
