// Products by AMX tiles: 16 rows of 64 bytes of s8 times 16 outputs of 64 bytes of u8, summed in 32 bits, exactly. A tile of W is sixteen quads
// of the interleaving [N / 16][K / 4][16][4], 1024 bytes in a row, which is what TDPBSUD reads. With FLOATS pairs of bf16 stand where four bytes
// do, [N / 16][K / 2][16][2], summed in fp32 by TDPBF16PS.

#pragma once

#include "tiles.h"

#include <algorithm>
#include <cstring>

namespace {

#ifdef FLOATS
#define TILE_PRODUCT _tile_dpbf16ps
#else
#define TILE_PRODUCT _tile_dpbsud
#endif

// Codes of x as tiles read them: rows in blocks of up to 16, each [K / 64][rows of the block][64] from row * stride on; sixteen lines side by
// side, since lines that are a row apart would share few sets of a cache. This is where the first 64 codes of a row begin.
inline int8_t* tiled_row(int8_t* codes, int64_t row, int64_t stride) { return codes + row / TILE_ROWS * TILE_ROWS * stride + row % TILE_ROWS * STEP; }
inline int64_t tiled_height(int64_t row, int64_t rows) { return std::min(TILE_ROWS, rows - row / TILE_ROWS * TILE_ROWS); }

// Weights that are read next: columns of `quads` lines, `apart` bytes apart; `each` of their lines are asked for at a time.
struct TilesAhead {
    const uint8_t* line;
    int64_t quads, apart, each = 0;
    const uint8_t* end = line + quads * 64;

    inline void ask() {
        for (int64_t i = 0; i < each; i++) _mm_prefetch((const char*)(line + i * 64), _MM_HINT_T1);
        if ((line += each * 64) >= end) line += apart - quads * 64, end += apart;
    }
};

// Products of C columns of tiles of W, `apart` bytes apart, from a given depth on.
template <int C>
struct TilePanel {
    const uint8_t* weight;
    int64_t apart;

    // Adds to the sums of two blocks of rows, or of one where heights[1] is 0, [2][16][C][16], the products of `whole` tiles of K, and
    // of `rest`, [C][16][64], if there is one; from nothing, if `first`. Each step asks for more of `next`, and does one of
    // `whole` parts of other work, which vector registers do while tiles multiply.
    template <int R, typename Work>
    void multiply(const int8_t* a, const int8_t* below, const int64_t* heights, int64_t whole, const uint8_t* rest, bool first, int32_t* sums,
                  TilesAhead& next, const Work& work) const {
        before_tiles();
        if (first) {
            _tile_zero(0);
            if constexpr (C > 1) _tile_zero(1);
            if constexpr (R > 1) _tile_zero(2);
            if constexpr (R > 1 && C > 1) _tile_zero(3);
        } else {
            _tile_loadd(0, sums, C * 64);
            if constexpr (C > 1) _tile_loadd(1, sums + W, C * 64);
            if constexpr (R > 1) _tile_loadd(2, sums + C * 256, C * 64);
            if constexpr (R > 1 && C > 1) _tile_loadd(3, sums + C * 256 + W, C * 64);
        }
        const int64_t of_a = heights[0] * STEP, of_below = heights[1] * STEP;
        const uint8_t* w = weight;
        for (int64_t step = 0; step < whole; step++) {
            add<R>(a, below, w, w + apart);
            next.ask();
            a += of_a, below += of_below, w += TILE_BYTES;
            work(step, whole);
        }
        if (!whole) work(0, 1);
        if (rest) add<R>(a, below, rest, rest + TILE_BYTES);
        _tile_stored(0, sums, C * 64);
        if constexpr (C > 1) _tile_stored(1, sums + W, C * 64);
        if constexpr (R > 1) _tile_stored(2, sums + C * 256, C * 64);
        if constexpr (R > 1 && C > 1) _tile_stored(3, sums + C * 256 + W, C * 64);
    }

    template <int R>
    static inline void add(const int8_t* a, const int8_t* below, const uint8_t* b0, const uint8_t* b1) {
        _tile_loadd(6, b0, 64);
        _tile_loadd(4, a, 64);
        TILE_PRODUCT(0, 4, 6);
        if constexpr (C > 1) {
            _tile_loadd(7, b1, 64);
            TILE_PRODUCT(1, 4, 7);
        }
        if constexpr (R > 1) {
            _tile_loadd(5, below, 64);
            TILE_PRODUCT(2, 5, 6);
            if constexpr (C > 1) TILE_PRODUCT(3, 5, 7);
        }
    }

    // What is left of K behind whole tiles, filled with zeros: [C][16][64].
    void rest_of(int64_t quads, uint8_t* rest) const {
        const int64_t bytes = quads % TILE_ROWS * 64;
        for (int c = 0; c < C; c++) {
            std::memcpy(rest + c * TILE_BYTES, weight + c * apart + quads / TILE_ROWS * TILE_BYTES, bytes);
            std::memset(rest + c * TILE_BYTES + bytes, 0, TILE_BYTES - bytes);
        }
    }
};

}  // namespace
