// AMX's tiles (Intel, Architecture Instruction Set Extensions Programming Reference, chapter 3): registers of up to 16 rows of 64 bytes. Without
// AMX they are only how operands are laid.

#pragma once

#include "integers.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t STEP = 64;           // bytes of K of one tile
constexpr int64_t TILE_ROWS = 16;      // rows of x, or quads of K, of one tile
constexpr int64_t TILE_BYTES = 1024;

#ifdef __AMX_TILE__
// Linux gives a process the tiles' registers when it asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
inline bool tiles_permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// GCC's _tile_loadconfig says that 8 of these bytes are read, and the others need not be written before.
inline void configure(const uint8_t (&config)[64]) { asm volatile("ldtilecfg\t%X0" ::"m"(config)); }

// What was written before is in memory: GCC's _tile_loadd does not say that it reads any.
inline void before_tiles() { asm volatile("" ::: "memory"); }

// The registers of a thread: 0 to 3 the sums of two by two tiles, 4 and 5 rows of x, 6 and 7 of W; until `~Tiles`. Rows of x may be fewer
// than 16: that takes less time, and nothing is read beyond them.
struct Tiles {
    int64_t heights[2] = {0, 0};

    void of(int64_t first, int64_t second) {
        if (first == heights[0] && second == heights[1]) return;
        heights[0] = first, heights[1] = second;
        alignas(64) uint8_t config[64] = {1};
        const int64_t rows[8] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
        for (int t = 0; t < 8; t++)
            if (rows[t]) config[16 + 2 * t] = STEP, config[48 + t] = (uint8_t)rows[t];
        configure(config);
    }
    ~Tiles() { _tile_release(); }
};
#else
inline bool tiles_permitted() { return true; }

struct Tiles {
    void of(int64_t, int64_t) {}
};
#endif

}  // namespace
