// Sums of products with a group of codes: by instructions that sum four products of bytes, or two, or on any processor.

#pragma once

#ifndef __AVX512VNNI__

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "quantized_rows.h"
#include "quantized_types.h"
#include "vector.h"

namespace {

// A type's GroupCodes has NUM_STEPS steps of a group's codes in REGISTERS values of type Code each, which `read` unpacks from memory. `multiply` sums up
// rows' products with part `part` of a group, whose codes read(step, i) gives. It calls use(r, sums) with all sums of row r, or use(r, i, sums) with
// register i of them as soon as it has that.

#if defined(__AVX2__)

constexpr int64_t HALVES = 2;  // of a tile's rows

inline __m256i four_codes_at(const RowGroup& x, int64_t step) {
    int32_t four;
    std::memcpy(&four, x.codes + 4 * step, sizeof(four));
    return _mm256_set1_epi32(four);
}

// 16 in each byte whose bit is set, of 32.
inline __m256i sixteens(const uint8_t* bits) {
    int32_t word;
    std::memcpy(&word, bits, sizeof(word));
    const __m256i byte_of_bit = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i place = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i found = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of_bit), place);
    return _mm256_and_si256(_mm256_cmpeq_epi8(found, place), _mm256_set1_epi8(16));
}

// Keeps the compiler from reordering additions: it would sum all steps at the end, and spill them until then.
inline __m256i in_order(__m256i sum) {
#ifdef __AVX512F__
    asm("" : "+v"(sum));
#else
    asm("" : "+x"(sum));
#endif
    return sum;
}

// How many steps' sums of two products fit into 16 bits.
template <typename Type>
constexpr int64_t steps_to_sum() {
    int64_t most = Type::BITS == 8 ? 128 : (1 << Type::BITS) - 1;
    if constexpr (Type::HAS_LEVELS) {
        most = 0;
        for (int64_t i = 0; i < 16; ++i) most = std::max<int64_t>(most, Type::LEVELS[i] < 0 ? -Type::LEVELS[i] : Type::LEVELS[i]);
    }
    int64_t steps = STEPS / Type::Scales::SCALES;
    while (steps > 1 && steps * 2 * 127 * most > 32767) steps /= 2;
    return steps;
}

template <typename Type>
struct GroupCodes {
#ifdef __AVXVNNI__
    static constexpr bool IS_SIGNED = false;
#else
    static constexpr bool IS_SIGNED = Type::BITS == 8 || Type::HAS_LEVELS;  // codes as what they stand for
#endif

    static constexpr int64_t NUM_STEPS = STEPS, REGISTERS = HALVES;
    typedef __m256i Code;

    static __m256i load(const uint8_t* group, int64_t row, int64_t half) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group) + HALVES * row + half);
    }

    static __m256i read(const uint8_t* group, int64_t step, int64_t half) {
        const __m256i offset = _mm256_set1_epi8(-128);
        if constexpr (Type::BITS == 8) return IS_SIGNED ? _mm256_xor_si256(load(group, step, half), offset) : load(group, step, half);
        const __m256i bytes = load(group, step % 4, half);
        const __m256i lower = _mm256_and_si256(step < 4 ? bytes : _mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15));
        if constexpr (Type::BITS == 5) return _mm256_or_si256(lower, sixteens(group + HALF_BYTES + 8 * step + 4 * half));
        if constexpr (Type::BITS == 6) {
            const __m256i pairs = load(group + HALF_BYTES, step / 4, half);
            const int shift = static_cast<int>(4 - 2 * (step % 4));
            const __m256i upper = shift > 0 ? _mm256_slli_epi16(pairs, shift) : _mm256_srli_epi16(pairs, -shift);
            return _mm256_or_si256(lower, _mm256_and_si256(upper, _mm256_set1_epi8(48)));
        }
        if constexpr (Type::HAS_LEVELS) {
            const __m256i levels = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(Type::LEVELS)));
            return _mm256_shuffle_epi8(IS_SIGNED ? levels : _mm256_xor_si256(levels, offset), lower);
        }
        return lower;
    }

    template <int ROWS, typename Read, typename Use>
    static inline __attribute__((always_inline)) void multiply(const RowGroup* x, int64_t stride, int64_t part, const Read& read, const Use& use) {
        constexpr int64_t PART_STEPS = STEPS / Type::Scales::SCALES;
        __m256i sums[ROWS][HALVES];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int64_t h = 0; h < HALVES; ++h) sums[r][h] = _mm256_set1_epi32(IS_SIGNED ? 0 : correction<Type>(x[r * stride], part));
#ifdef __AVXVNNI__
#pragma GCC unroll 8
        for (int64_t i = 0; i < PART_STEPS; ++i) {
            const int64_t step = PART_STEPS * part + i;
            const Code codes[] = {read(step, 0), read(step, 1)};
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) {
                const __m256i four = four_codes_at(x[r * stride], step);
#pragma GCC unroll 2
                for (int64_t h = 0; h < HALVES; ++h) sums[r][h] = _mm256_dpbusd_avx_epi32(sums[r][h], codes[h], four);
            }
        }
#else
        constexpr int64_t SUM_STEPS = steps_to_sum<Type>();  // at least one: 128 times 127, twice, fits
#pragma GCC unroll 8
        for (int64_t first = PART_STEPS * part; first < PART_STEPS * (part + 1); first += SUM_STEPS) {
            __m256i pairs[ROWS][HALVES];
#pragma GCC unroll 8
            for (int64_t i = 0; i < SUM_STEPS; ++i) {
                const Code codes[] = {read(first + i, 0), read(first + i, 1)};
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    const __m256i four = four_codes_at(x[r * stride], first + i);
#pragma GCC unroll 2
                    for (int64_t h = 0; h < HALVES; ++h) {
                        // One factor has to be without a sign, and only codes of the weight may be -128.
                        const __m256i products = IS_SIGNED ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes[h]), _mm256_sign_epi8(four, codes[h]))
                                                           : _mm256_maddubs_epi16(codes[h], four);
                        pairs[r][h] = i == 0 ? products : in_order(_mm256_add_epi16(pairs[r][h], products));
                    }
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int64_t h = 0; h < HALVES; ++h)
                    sums[r][h] = in_order(_mm256_add_epi32(sums[r][h], _mm256_madd_epi16(pairs[r][h], _mm256_set1_epi16(1))));
        }
#endif
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
#ifdef __AVX512F__
            use(r, IntVector{{(IntRegister)_mm512_inserti64x4(_mm512_castsi256_si512(sums[r][0]), sums[r][1], 1)}});
#else
            use(r, IntVector{{(IntRegister)sums[r][0], (IntRegister)sums[r][1]}});
#endif
        }
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

// Calls function(step) for each step, as a constant.
template <typename Function, int64_t... STEP>
inline __attribute__((always_inline)) void for_steps(std::integer_sequence<int64_t, STEP...>, const Function& function) {
    (function(std::integral_constant<int64_t, STEP>{}), ...);
}

// A quarter of a tile at a time: all of its sums would leave no registers for the rows' codes.
template <typename Type>
struct GroupCodes {
    static constexpr int64_t NUM_STEPS = STEPS, REGISTERS = QUARTERS;
    typedef int8x16_t Code;  // as what they stand for

    static int8x16_t read(const uint8_t* group, int64_t step, int64_t quarter) {
        if constexpr (Type::BITS == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(group + 64 * step + 16 * quarter), vdupq_n_u8(128)));
        const uint8x16_t bytes = vld1q_u8(group + 64 * (step % 4) + 16 * quarter);
        uint8x16_t code = step < 4 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4);
        if constexpr (Type::BITS == 5) code = vorrq_u8(code, sixteens(group + HALF_BYTES + 8 * step + 2 * quarter));
        if constexpr (Type::BITS == 6) {
            const uint8x16_t pairs = vld1q_u8(group + HALF_BYTES + 64 * (step / 4) + 16 * quarter);
            const uint8x16_t upper = vshlq_u8(pairs, vdupq_n_s8(static_cast<int8_t>(4 - 2 * (step % 4))));
            code = vorrq_u8(code, vandq_u8(upper, vdupq_n_u8(48)));
        }
        if constexpr (Type::HAS_LEVELS) return vqtbl1q_s8(vld1q_s8(Type::LEVELS), code);
        return vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(Type::HAS_LEVELS || Type::BITS == 8 ? 0 : Type::OFFSET));
    }

    template <int ROWS, typename Read, typename Use>
    static inline __attribute__((always_inline)) void multiply(const RowGroup* x, int64_t stride, int64_t part, const Read& read, const Use& use) {
        constexpr int64_t PART_STEPS = STEPS / Type::Scales::SCALES, SIXTEENS = PART_STEPS / 4;
        int8x16_t rows[ROWS][SIXTEENS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int64_t i = 0; i < SIXTEENS; ++i) rows[r][i] = vld1q_s8(x[r * stride].codes + 16 * (SIXTEENS * part + i));
#pragma GCC unroll 4
        for (int64_t q = 0; q < QUARTERS; ++q) {
            int32x4_t sums[ROWS] = {};
            for_steps(std::make_integer_sequence<int64_t, PART_STEPS>{}, [&](auto step) {
                constexpr int64_t STEP = decltype(step)::value;
                const Code codes = read(PART_STEPS * part + STEP, q);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) sums[r] = vdotq_laneq_s32(sums[r], codes, rows[r][STEP / 4], STEP % 4);
            });
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) use(r, q, (IntRegister)sums[r]);
        }
    }
};

#ifdef __ARM_FEATURE_MATMUL_INT8
#define PENSTOCK_MULTIPLIES_PAIRS

// The same in half as many products, where one instruction multiplies eight codes of two rows of activations by those of two rows of a tile.
template <typename Type>
struct PairedCodes {
    static constexpr int64_t NUM_STEPS = STEPS / 2, REGISTERS = 2 * QUARTERS;
    typedef int8x16_t Code;  // eight of a row, then those of the next

    static int8x16_t read(const uint8_t* group, int64_t step, int64_t pair) {
        const int32x4_t lower = vreinterpretq_s32_s8(GroupCodes<Type>::read(group, 2 * step, pair / 2));
        const int32x4_t upper = vreinterpretq_s32_s8(GroupCodes<Type>::read(group, 2 * step + 1, pair / 2));
        return vreinterpretq_s8_s32(pair % 2 ? vzip2q_s32(lower, upper) : vzip1q_s32(lower, upper));
    }

    template <int ROWS, typename Read, typename Use>
    static inline __attribute__((always_inline)) void multiply(const RowGroup* x, int64_t stride, int64_t part, const Read& read, const Use& use) {
        constexpr int64_t PART_STEPS = NUM_STEPS / Type::Scales::SCALES;
        constexpr int ROW_PAIRS = (ROWS + 1) / 2;  // of an odd number, the last row is in one twice
        int8x16_t rows[ROW_PAIRS][PART_STEPS];
#pragma GCC unroll 2
        for (int r = 0; r < ROW_PAIRS; ++r)
#pragma GCC unroll 4
            for (int64_t i = 0; i < PART_STEPS; ++i) {
                const auto eight = [&](int row) { return vld1_s8(x[std::min(row, ROWS - 1) * stride].codes + 8 * (PART_STEPS * part + i)); };
                rows[r][i] = vcombine_s8(eight(2 * r), eight(2 * r + 1));
            }
#pragma GCC unroll 4
        for (int64_t q = 0; q < QUARTERS; ++q) {
            int32x4_t sums[ROW_PAIRS][2] = {};
#pragma GCC unroll 4
            for (int64_t i = 0; i < PART_STEPS; ++i)
#pragma GCC unroll 2
                for (int64_t pair = 0; pair < 2; ++pair) {
                    const Code codes = read(PART_STEPS * part + i, 2 * q + pair);
#pragma GCC unroll 2
                    for (int r = 0; r < ROW_PAIRS; ++r) sums[r][pair] = vmmlaq_s32(sums[r][pair], rows[r][i], codes);
                }
#pragma GCC unroll 2
            for (int r = 0; r < ROW_PAIRS; ++r) {
                const int64x2_t lower = vreinterpretq_s64_s32(sums[r][0]), upper = vreinterpretq_s64_s32(sums[r][1]);
                use(2 * r, q, (IntRegister)vzip1q_s64(lower, upper));
                if (2 * r + 1 < ROWS) use(2 * r + 1, q, (IntRegister)vzip2q_s64(lower, upper));
            }
        }
    }
};
#endif

#else

typedef int16_t Shorts __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int64_t Longs __attribute__((vector_size(16)));

template <typename Type>
struct GroupCodes {
    static constexpr int64_t EIGHTHS = 8;
    // Sixteen bits hold as many pairs of products: of 15, or of up to 128, and 127.
    static constexpr int64_t STEPS_TO_SUM = Type::BITS == 4 && !Type::HAS_LEVELS ? 8 : 2;

    static constexpr int64_t NUM_STEPS = STEPS, REGISTERS = 1;

    struct Code {
        Shorts eighths[EIGHTHS];  // as what they stand for
    };

    static inline __attribute__((always_inline)) Code read(const uint8_t* group, int64_t step, int64_t) {
        int16_t unpacked[4 * TILE];
        for (int64_t i = 0; i < 4 * TILE; ++i) unpacked[i] = static_cast<int16_t>(number_at<Type>(group, 4 * TILE * step + i));
        Code code;
        std::memcpy(&code, unpacked, sizeof(code));
        return code;
    }

    template <int ROWS, typename Read, typename Use>
    static void multiply(const RowGroup* x, int64_t stride, int64_t part, const Read& read, const Use& use) {
        constexpr int64_t PART_STEPS = STEPS / Type::Scales::SCALES;
        Shorts sums[ROWS][EIGHTHS] = {};
        Ints pairs[ROWS][EIGHTHS] = {};
        for (int64_t step = PART_STEPS * part; step < PART_STEPS * (part + 1); ++step) {
            const Code code = read(step, 0);
            for (int r = 0; r < ROWS; ++r) {
                int16_t four[4];
                for (int64_t i = 0; i < 4; ++i) four[i] = x[r * stride].codes[4 * step + i];
                int64_t pattern;
                std::memcpy(&pattern, four, sizeof(pattern));
                for (int64_t e = 0; e < EIGHTHS; ++e) sums[r][e] += code.eighths[e] * (Shorts)(Longs{} + pattern);
                if (step % STEPS_TO_SUM != STEPS_TO_SUM - 1) continue;
                for (int64_t e = 0; e < EIGHTHS; ++e) {
                    const Ints both = (Ints)sums[r][e];
                    pairs[r][e] += ((both << 16) >> 16) + (both >> 16);
                    sums[r][e] = Shorts{};
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            int32_t halves[2 * TILE], all[TILE];
            std::memcpy(halves, pairs[r], sizeof(halves));
            for (int64_t o = 0; o < TILE; ++o) all[o] = halves[2 * o] + halves[2 * o + 1];
            IntVector dots;
            std::memcpy(&dots, all, sizeof(all));
            use(r, dots);
        }
    }
};

#endif

// What a panel has. To bring codes into pairs each time that they are unpacked would cost what it saves.
#ifdef PENSTOCK_MULTIPLIES_PAIRS
template <typename Type>
using PanelCodes = PairedCodes<Type>;
#else
template <typename Type>
using PanelCodes = GroupCodes<Type>;
#endif

}  // namespace

#endif
