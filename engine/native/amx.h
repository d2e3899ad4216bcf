// Tile registers of Intel's AMX: eight matrices of up to 16 rows of 64 bytes, and the instructions that multiply them.
//
// With PENSTOCK_EMULATED_TILES, amx_emulated.h takes the instructions' place, so that all but these runs, and is tested, on any processor.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(PENSTOCK_EMULATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)) || \
    (defined(__AMXTILE__) && defined(__AMXINT8__) && defined(__AMXBF16__))  // of clang before 15
#define PENSTOCK_TILES
#endif

namespace amx {
namespace {

constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();

// From how many rows on a product goes by tiles. All are NEVER until `choose_tiles` finds that tiles pay.
struct Use {
    int64_t bfloat16_rows = NEVER, quantized_rows = NEVER, attention_rows = NEVER;
};

Use use;

#ifndef PENSTOCK_TILES

inline void release() {}

#else

constexpr int64_t ROWS = 16;      // of a tile, at most
constexpr int64_t COLUMNS = 16;   // of 4 bytes
constexpr int64_t ROW_BYTES = 64;
constexpr int64_t NUMBERS = 32;   // bfloat16 of a row
constexpr double SPEED = 8;       // times that of vectors, roughly: 16 * 16 * 32 products of bfloat16 in 16 cycles, against 32 or 64 in one

// What a tile register holds in every kernel: sums, left factors [rows, depth] or right factors [depth / 4, 16, 4] of bytes.
constexpr int FIRST_LEFT = 4, FIRST_RIGHT = 6, NUM_TILES = 8;

// As the instruction reads it.
struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

static_assert(sizeof(Configuration) == 64 && offsetof(Configuration, row_bytes) == 16 && offsetof(Configuration, rows) == 48);

#ifdef PENSTOCK_EMULATED_TILES

}  // namespace
}  // namespace amx

#include "amx_emulated.h"

namespace amx {
namespace {

#else

// By hand rather than by the compilers' functions: those take literal register numbers only, and GCC's loads do not say that they read memory.
inline void load_configuration(const Configuration& configuration) { asm volatile("ldtilecfg %0" ::"m"(configuration)); }
inline void release_registers() { asm volatile("tilerelease"); }

template <int TILE>
inline void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int SUMS, int LEFT, int RIGHT>
inline void add_bfloat16_products() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// The left bytes have signs, the right ones have not.
template <int SUMS, int LEFT, int RIGHT>
inline void add_byte_products() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// Linux keeps room for a thread's tiles only in processes that ask for it.
inline bool request() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#endif

struct Shape {
    int64_t rows = 0, depth = 0;
};

thread_local Shape shape;  // of this thread's tiles; no rows: they are released

// Sums get `rows` rows, left factors as many of `depth` bytes, right factors one row for every 4 of these.
inline void configure(int64_t rows, int64_t depth) {
    if (shape.rows == rows && shape.depth == depth) return;
    Configuration configuration;
    for (int tile = 0; tile < NUM_TILES; ++tile) {
        const bool is_left = tile >= FIRST_LEFT && tile < FIRST_RIGHT;
        configuration.rows[tile] = static_cast<uint8_t>(tile < FIRST_RIGHT ? rows : depth / 4);
        configuration.row_bytes[tile] = static_cast<uint16_t>(is_left ? depth : ROW_BYTES);
    }
    load_configuration(configuration);
    shape = {rows, depth};
}

// To be called before a thread sleeps: the system then saves no tiles when it switches threads.
inline void release() {
    if (shape.rows == 0) return;
    release_registers();
    shape = {};
}

#endif

}  // namespace
}  // namespace amx
