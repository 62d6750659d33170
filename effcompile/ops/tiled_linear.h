// A linear of codes, or with FLOATS of bf16, by AMX tiles, a panel of outputs at a time; what becomes of the sums says who asks.

#pragma once

#include "tiles_of_bytes.h"

#include "integers.h"

namespace {

constexpr int LANES = 16;       // outputs that are interleaved
constexpr int64_t CHUNK = 256;  // rows of x that are multiplied with a panel, at most
constexpr int64_t PART = 12;    // tiles of K: 24 KiB of a panel
constexpr int64_t PAIR = 32;    // rows of a block of tiles, and outputs of a panel

// Sums of tiles, [rows][columns][16], that are not outputs yet.
struct Block {
    int64_t row = 0, rows = 0, from = 0;
    int columns = 0;
    const int32_t* sums = nullptr;
};

struct TileThread {
    Tiles tiles;
    Block before;
    alignas(64) int32_t sums[CHUNK / PAIR][4 * 256];
};

// Sums as numbers: y = f(sum * scale of the row * scale of the output + bias), where a row was lowered with that times the sums of W added; with
// FLOATS f(sum + bias).
struct Scaled {
    int64_t n;
    const float *scales, *bias;  // (N); the bias may be null
    const float* row_scales;
    const int32_t* offsets;
    const int32_t *lower = nullptr, *sums = nullptr;  // of rows of x, and of W (N), if they are lowered

    // The numbers of rows [first, end) of a block, two vectors each, to `put(row, z0, z1)`.
    template <int AFTER, bool WHOLE, typename Put>
    inline void each(const Block& block, int64_t first, int64_t end, const Put& put) const {
        const int64_t left = WHOLE ? PAIR : n - block.from, second = WHOLE || block.columns > 1 ? W : 0;  // the first again, where there is one
        const V b0 = bias ? some_of(bias + block.from, left) : V{}, b1 = bias ? some_of(bias + block.from + W, left - W) : V{};
        const int64_t apart = WHOLE ? PAIR : block.columns * W;
        const int32_t* sum = block.sums + first * apart;
#ifndef FLOATS
        const V s0 = some_of(scales + block.from, left), s1 = some_of(scales + block.from + W, left - W);
        const float* own = row_scales + block.row;
        const int32_t* offset = offsets + block.row;
#endif
        for (int64_t r = first; r < end; r++, sum += apart) {
#ifdef FLOATS
            V z0 = (V)load_ints(sum) + b0, z1 = (V)load_ints(sum + second) + b1;
#else
            const V both = V{} + own[r];
            VI i0 = load_ints(sum) - offset[r], i1 = load_ints(sum + second) - offset[r];
            if (sums) {  // read anew for each row: registers are few
                const int32_t by = lower[block.row + r];
                i0 += some_ints(sums + block.from, left) * by, i1 += some_ints(sums + block.from + W, left - W) * by;
            }
            V z0 = as_floats(i0) * (s0 * both) + b0, z1 = as_floats(i1) * (s1 * both) + b1;
#endif
            if constexpr (AFTER) z0 = followed(z0, AFTER), z1 = followed(z1, AFTER);
            put(block.row + r, z0, z1);
        }
    }
};

// Who takes sums: `out.write<AFTER, WHOLE>(block, first, end)` those of rows [first, end) of a block, WHOLE if all its outputs are there.
template <typename Out>
using Write = void (*)(const Out&, const Block&, int64_t first, int64_t end);

template <typename Out, int AFTER, bool WHOLE>
__attribute__((noinline)) void written(const Out& out, const Block& block, int64_t first, int64_t end) { out.template write<AFTER, WHOLE>(block, first, end); }

template <bool WHOLE, typename Out>
Write<Out> write_of(int after) {
    return made_for(after, [](auto known) -> Write<Out> { return written<Out, decltype(known)::value, WHOLE>; });
}

// Results in fp32 or bf16, rows ldy apart; fp32 may be added `onto` what is there.
template <typename T>
struct Results {
    Scaled sums;
    int after;
    T* y;
    int64_t ldy;
    bool onto = false;

    // Lines of y that are written next, which come from memory as those that are read do.
    __attribute__((always_inline)) void ask(int64_t row, int64_t from) const {
        const T* to = y + row * ldy + from;
        __builtin_prefetch(to, 1);
        if constexpr (sizeof(T) == sizeof(float)) __builtin_prefetch(to + W, 1);
    }

    template <int AFTER, bool WHOLE>
    inline void write(const Block& block, int64_t first, int64_t end) const {
        const int64_t left = WHOLE ? PAIR : sums.n - block.from;
        sums.each<AFTER, WHOLE>(block, first, end, [&](int64_t row, V z0, V z1) __attribute__((always_inline)) {
            T* to = y + row * ldy + block.from;
            if constexpr (sizeof(T) == sizeof(float))
                if (onto) z0 += some_of(to, left), z1 += some_of(to + W, left - W);
            put(to, z0, left);
            if (left > W) put(to + W, z1, left - W);
        });
    }
};

// `out.write`: see Write.
template <typename Out>
struct TiledLinear {
    int64_t m, n, quads;
    const uint8_t* weight;  // [N / LANES][quads][LANES][4]
    const int8_t* codes;    // (M, stride) as tiles_of_bytes.h has them
    int64_t stride;
    const Out& out;
    int64_t apart = quads * 64;  // bytes from LANES outputs to the next ones: more, where only some of K are multiplied

    // Outputs [from, from + C * LANES) of the rows [top, bottom), K in parts, so that a part of W stays in the L1 cache for all rows.
    // Meanwhile what the next task of this thread reads, `ahead` panels on, comes nearer, and the sums of the blocks before become outputs.
    template <int C>
    void panel(TileThread& thread, int64_t top, int64_t bottom, int64_t from, int64_t ahead) const {
        const Write<Out> some = write_of<false, Out>(out.after), full = write_of<true, Out>(out.after);
        const int64_t whole = quads / TILE_ROWS, blocks = (bottom - top + PAIR - 1) / PAIR;
        const uint8_t* here = weight + from / LANES * apart;
        TilesAhead next{here + ahead * C * apart, quads, apart};
        const bool there = next.line + C * apart <= weight + (n + LANES - 1) / LANES * apart;
        if (there && whole) next.each = C * quads / (blocks * whole);
        alignas(64) uint8_t rest[C * TILE_BYTES];
        if (quads % TILE_ROWS) TilePanel<C>{here, apart}.rest_of(quads, rest);
        for (int64_t part = 0, begin = 0; part == 0 || begin < whole; part++, begin += PART) {
            const TilePanel<C> panel{here + begin * TILE_BYTES, apart};
            const int64_t steps = std::min(PART, whole - begin);
            const bool last = begin + steps == whole;
            const uint8_t* left = last && quads % TILE_ROWS ? rest : nullptr;
            for (int64_t i = top, block = 0; i < bottom; i += PAIR, block++) {
                const int64_t heights[2] = {tiled_height(i, m), i + TILE_ROWS < bottom ? tiled_height(i + TILE_ROWS, m) : 0};
                
                const int8_t* a = codes + i * stride + begin * STEP * heights[0];
                const int8_t* below = codes + (i + TILE_ROWS) * stride + begin * STEP * heights[1];
                thread.tiles.of(heights[0], heights[1]);
                int32_t* sums = thread.sums[whole <= PART ? 0 : block];  // where all of K is one part, those before are outputs when these are written
                const int64_t asked = last && steps ? (heights[0] + heights[1] + steps - 1) / steps : 0;
                const auto work = [&](int64_t step, int64_t of) __attribute__((always_inline)) {
                    for (int64_t r = step * asked; r < std::min((step + 1) * asked, heights[0] + heights[1]); r++) out.ask(i + r, from);
                    write(thread.before, step, of, some, full);
                };
                if (heights[1]) panel.template multiply<2>(a, below, heights, steps, left, !part, sums, next, work);
                else panel.template multiply<1>(a, below, heights, steps, left, !part, sums, next, work);
                thread.before = last ? Block{i, heights[0] + heights[1], from, C, sums} : Block{};
            }
        }
    }

    // All outputs of rows [top, bottom).
    void all(TileThread& thread, int64_t top, int64_t bottom) const {
        for (int64_t from = 0; from < n; from += PAIR) {
            if (n - from > LANES) panel<2>(thread, top, bottom, from, 1);
            else panel<1>(thread, top, bottom, from, 1);
        }
        finish(thread);
    }

    void finish(TileThread& thread) const {
        write(thread.before, 0, 1, write_of<false, Out>(out.after), write_of<true, Out>(out.after));
        thread.before = {};
    }

    // Part `step` of so many parts of a block: at least four rows.
    inline void write(const Block& block, int64_t step, int64_t of, Write<Out> some, Write<Out> full) const {
        const int64_t rows = block.rows <= 4 * of ? 4 : (block.rows + of - 1) / of, first = step * rows;
        if (first < block.rows) (n - block.from >= PAIR ? full : some)(out, block, first, std::min(block.rows, first + rows));
    }
};

}  // namespace
