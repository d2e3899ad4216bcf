// The types that quantized weights have: how their blocks lie in memory, and what codes are multiplied by. They have GGUF's names and ggml's
// numbers; those of other checkpoints have numbers beyond.
//
// A tile is 16 rows of a weight, and a block is a tile's next 32 columns, 128 of the types whose scales are for so many, or 256 of those whose
// scales are integers with a factor. A block holds the codes of its groups of 32 columns, then their scales, one for each row, group after group; a type's block takes 16 times the
// bytes that it takes in a GGUF file.
//
// The codes of a group are four columns of each row, eight times ([8, 16, 4]). Of less than 8 bits, byte i holds the lower four of code i and,
// in its upper half, those of code i + 256. The fifth bits of 5 follow, eight in a byte, or the upper two bits of 6: those of the code at place
// i of 64, of four steps of four columns in a byte.

#pragma once

#include <cstdint>

#include "common.h"
#include "quantized_rows.h"
#include "vector.h"

namespace {

constexpr int64_t TILE = 16;  // rows of a weight, one in each lane
constexpr int64_t STEPS = 8;  // of four columns in a group

template <int BITS>
constexpr int64_t CODE_BYTES = TILE * GROUP * BITS / 8;
constexpr int64_t HALF_BYTES = TILE * GROUP / 2;  // of codes in halves of bytes

// What the codes of a type with levels stand for: numbers that lie closer to each other around zero, as weights do.
alignas(16) constexpr int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t E2M1_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Scales of a block, read once for all rows that it is multiplied by. `scale` is that of a group's columns, or of the half `part` of them
// where SCALES is 2; `minimum`, where there are any, is what zero stands for.
struct HalfScales {
    static constexpr int64_t GROUPS = 1, SCALES = 1, BYTES = 2 * TILE;
    static constexpr bool HAS_MINIMUMS = false;
    const uint8_t* from;

    void read(const uint8_t* bytes) { from = bytes; }
    Vector scale(int64_t, int64_t) const { return load_halves(from); }
};

struct HalfScalesAndMinimums : HalfScales {
    static constexpr int64_t BYTES = 4 * TILE;
    static constexpr bool HAS_MINIMUMS = true;

    Vector minimum(int64_t) const { return load_halves(from + 2 * TILE); }
};

// Of INT4: one for 128 columns.
struct LargeGroupScales : HalfScales {
    static constexpr int64_t GROUPS = 4;
};

// Of UINT4 and UINT8: one for 128 columns, or for 32, and the number that stands for zero, which is a signed byte.
template <int64_t GROUPS_>
struct ScalesAndZeroPoints : HalfScales {
    static constexpr int64_t GROUPS = GROUPS_, BYTES = 3 * TILE;
    static constexpr bool HAS_MINIMUMS = true;

    Vector minimum(int64_t) const {
        return Vector{} - rounded_product(load_bytes(reinterpret_cast<const int8_t*>(from) + 2 * TILE), load_halves(from));
    }
};

// Of MXFP4: the exponent of a power of two, 128 more than what it stands for.
struct ExponentScales {
    static constexpr int64_t GROUPS = 1, SCALES = 1, BYTES = TILE;
    static constexpr bool HAS_MINIMUMS = false;
    const uint8_t* from;

    void read(const uint8_t* bytes) { from = bytes; }
    Vector scale(int64_t, int64_t) const { return powers_of_two(from); }
};

// Of Q6_K: a signed byte for 16 columns, and a factor.
struct ByteScales {
    static constexpr int64_t GROUPS = 8, SCALES = 2, BYTES = GROUPS * SCALES * TILE + 2 * TILE;
    static constexpr bool HAS_MINIMUMS = false;
    const int8_t* integers;
    Vector factor;

    void read(const uint8_t* bytes) {
        integers = reinterpret_cast<const int8_t*>(bytes);
        factor = load_halves(bytes + GROUPS * SCALES * TILE);
    }
    Vector scale(int64_t group, int64_t part) const { return rounded_product(load_bytes(integers + (SCALES * group + part) * TILE), factor); }
};

// Of IQ4_XS: 6 bits for 32 columns, 32 more than what they stand for, and a factor. The lower four bits of group g share a byte with those of
// group g + 4, and the upper two with those of g + 2, g + 4 and g + 6.
struct SixBitScales {
    static constexpr int64_t GROUPS = 8, SCALES = 1, PAIR = 2 * TILE, BYTES = 6 * TILE + 2 * TILE;
    static constexpr bool HAS_MINIMUMS = false;
    alignas(64) int8_t integers[GROUPS * TILE];
    Vector factor;

    void read(const uint8_t* bytes) {
        for (int64_t i = 0; i < PAIR; ++i) {
            const uint8_t upper = bytes[2 * PAIR + i], first = bytes[i], second = bytes[PAIR + i];
            integers[i] = static_cast<int8_t>(((first & 15) | (upper << 4 & 48)) - 32);
            integers[PAIR + i] = static_cast<int8_t>(((second & 15) | (upper << 2 & 48)) - 32);
            integers[2 * PAIR + i] = static_cast<int8_t>(((first >> 4) | (upper & 48)) - 32);
            integers[3 * PAIR + i] = static_cast<int8_t>(((second >> 4) | (upper >> 2 & 48)) - 32);
        }
        factor = load_halves(bytes + 6 * TILE);
    }
    Vector scale(int64_t group, int64_t) const { return rounded_product(load_bytes(integers + group * TILE), factor); }
};

// Of Q4_K and Q5_K: 6 bits for the scale and 6 for the minimum of 32 columns, and a factor of either, that of minimums
// negated. A byte has the lower four bits of both,
// another the upper two of those of the groups g and g + 4.
struct SixBitScalesAndMinimums {
    static constexpr int64_t GROUPS = 8, SCALES = 1, LOWER = GROUPS * TILE, HALF = LOWER / 2, BYTES = LOWER + HALF + 4 * TILE;
    static constexpr bool HAS_MINIMUMS = true;
    alignas(64) int8_t integers[LOWER];
    alignas(64) int8_t minimums[LOWER];
    Vector factor, minimum_factor;

    void read(const uint8_t* bytes) {
        for (int64_t i = 0; i < HALF; ++i) {
            const uint8_t upper = bytes[LOWER + i], first = bytes[i], second = bytes[HALF + i];
            integers[i] = static_cast<int8_t>((first & 15) | (upper << 4 & 48));
            minimums[i] = static_cast<int8_t>((first >> 4) | (upper << 2 & 48));
            integers[HALF + i] = static_cast<int8_t>((second & 15) | (upper & 48));
            minimums[HALF + i] = static_cast<int8_t>((second >> 4) | (upper >> 2 & 48));
        }
        factor = load_halves(bytes + LOWER + HALF);
        minimum_factor = load_halves(bytes + LOWER + HALF + 2 * TILE);
    }
    Vector scale(int64_t group, int64_t) const { return rounded_product(load_bytes(integers + group * TILE), factor); }
    Vector minimum(int64_t group) const { return rounded_product(load_bytes(minimums + group * TILE), minimum_factor); }
};

// OFFSET is what codes are more than what they stand for; those of levels are taken as that many more. It is a power of two.
template <int NUMBER_, int BITS_, int OFFSET_, typename Scales_, const int8_t* LEVELS_ = nullptr>
struct WeightType {
    using Scales = Scales_;
    static constexpr int NUMBER = NUMBER_, BITS = BITS_, OFFSET = OFFSET_;
    static constexpr const int8_t* LEVELS = LEVELS_;
    static constexpr bool HAS_LEVELS = LEVELS != nullptr;
    static constexpr int64_t CODES = Scales::GROUPS * CODE_BYTES<BITS>, BLOCK_BYTES = CODES + Scales::BYTES;
};

using Q4_0 = WeightType<2, 4, 8, HalfScales>;
using Q4_1 = WeightType<3, 4, 0, HalfScalesAndMinimums>;
using Q5_0 = WeightType<6, 5, 16, HalfScales>;
using Q5_1 = WeightType<7, 5, 0, HalfScalesAndMinimums>;
using Q8_0 = WeightType<8, 8, 128, HalfScales>;
using Q4_K = WeightType<12, 4, 0, SixBitScalesAndMinimums>;
using Q5_K = WeightType<13, 5, 0, SixBitScalesAndMinimums>;
using Q6_K = WeightType<14, 6, 32, ByteScales>;
using IQ4_NL = WeightType<20, 4, 128, HalfScales, IQ4_LEVELS>;
using IQ4_XS = WeightType<23, 4, 128, SixBitScales, IQ4_LEVELS>;
using MXFP4 = WeightType<39, 4, 128, ExponentScales, E2M1_LEVELS>;
using INT4 = WeightType<256, 4, 8, LargeGroupScales>;
using UINT4 = WeightType<257, 4, 0, ScalesAndZeroPoints<4>>;
using UINT8 = WeightType<258, 8, 128, ScalesAndZeroPoints<1>>;

// What sums of products with a group's codes, or a part's, begin with, so that they are those of what the codes stand for.
template <typename Type>
inline int32_t correction(const RowGroup& x, int64_t part) {
    if constexpr (Type::OFFSET == 0) return 0;
    if constexpr (Type::Scales::SCALES == 2) {
        static_assert(Type::OFFSET == 32);
        return part == 0 ? x.minus_32 : x.minus_128 / 4 - x.minus_32;
    }
    constexpr int QUOTIENT = 128 / (Type::OFFSET ? Type::OFFSET : 1);
    return x.minus_128 / QUOTIENT;
}

// Calls a generic function with a value of the type that has this number.
template <typename Function>
inline auto with_type(int64_t number, const Function& function) {
    switch (number) {
        case Q4_0::NUMBER: return function(Q4_0{});
        case Q4_1::NUMBER: return function(Q4_1{});
        case Q5_0::NUMBER: return function(Q5_0{});
        case Q5_1::NUMBER: return function(Q5_1{});
        case Q4_K::NUMBER: return function(Q4_K{});
        case Q5_K::NUMBER: return function(Q5_K{});
        case Q6_K::NUMBER: return function(Q6_K{});
        case IQ4_NL::NUMBER: return function(IQ4_NL{});
        case IQ4_XS::NUMBER: return function(IQ4_XS{});
        case MXFP4::NUMBER: return function(MXFP4{});
        case INT4::NUMBER: return function(INT4{});
        case UINT4::NUMBER: return function(UINT4{});
        case UINT8::NUMBER: return function(UINT8{});
        default: return function(Q8_0{});
    }
}

// What the code at a place of a group stands for.
template <typename Type>
inline int32_t number_at(const uint8_t* codes, int64_t place) {
    if constexpr (Type::BITS == 8) return codes[place] - Type::OFFSET;
    int32_t code = codes[place % HALF_BYTES] >> place / HALF_BYTES * 4 & 15;
    if constexpr (Type::BITS == 5) code |= (codes[HALF_BYTES + place / 8] >> place % 8 & 1) << 4;
    if constexpr (Type::BITS == 6) code |= (codes[HALF_BYTES + place / 256 * 64 + place % 64] >> place / 64 % 4 * 2 & 3) << 4;
    if constexpr (Type::HAS_LEVELS) return Type::LEVELS[code];
    return code - Type::OFFSET;
}

}  // namespace
