// A linear of codes by vector registers, a panel of outputs at a time; what becomes of the sums says who asks. ROWS, VECS: the register tile, ROWS
// rows of x times VECS vectors of outputs. All of a panel is summed in registers before anything is written.

#pragma once

#include "row_pairs.h"

namespace {

#if !TILED
constexpr int LANES = 16;  // outputs that are interleaved
#endif
constexpr int PER_LANES = LANES / W;
constexpr int PANEL = VECS * W;  // outputs of a tile
constexpr int AHEAD = 512;       // bytes of W that are fetched before they are multiplied
constexpr int LINE_BYTES = 64;   // of a cache

// Addresses that the compiler makes the others of, in each turn: of all that a tile reads it would keep one each, more than there are registers.
template <typename... P>
inline void held_in_registers(P&... addresses) {
#ifdef __x86_64__
    (..., [&] { asm("" : "+r"(addresses)); }());
#endif
}

#ifdef WORDS
typedef V Sum;  // of whole numbers, each taken before it can overflow: STEPS times two products of codes
constexpr int64_t BLOCK = STEPS;
inline V as_floats(V sum) { return sum; }
#else
typedef VI Sum;
constexpr int64_t BLOCK = 0;
#endif

// Bytes of a row of codes.
inline int64_t row_bytes(int64_t quads) { return PAIRED ? (quads + 1) / 2 * 8 : 4 * quads; }

// A tile's sums as numbers: f(sum * scale of the row * scale of the output + bias).
struct Numbers {
    int64_t n;
    const float *scales, *bias;  // (N); the bias may be null
    const float* row_scales;
    const int32_t* offsets;

    // Those of rows from `row` and vectors of outputs from `from` on, to `put(row, numbers)`, vecs at a time: zeros beyond the last.
    template <typename Put>
    inline void each(int after, int64_t row, int rows, int64_t from, int vecs, const Sum* sums, const Put& put) const {
        V scale[VECS], added[VECS] = {}, z[VECS];
        for (int v = 0; v < vecs; v++) {
            const int64_t at = from + v * W, left = n - at;
            scale[v] = some_of(scales + at, left);
            if (bias) added[v] = some_of(bias + at, left);
        }
        for (const int64_t end = row + rows; row < end; row++) {
#pragma GCC unroll 1
            for (int v = 0; v < vecs; v++) {
                Sum sum = *sums++;
#ifndef SIGNED
                sum -= offsets[row];
#endif
                z[v] = as_floats(sum) * (scale[v] * row_scales[row]) + added[v];
                if (after) z[v] = followed(z[v], after);
            }
            put(row, z);
        }
    }
};

// They are written in fp32 or bf16, rows ldy apart.
template <typename T>
struct Outputs {
    Numbers numbers;
    int after;
    T* y;
    int64_t ldy;

    __attribute__((noinline)) void write(int64_t row, int rows, int64_t from, int vecs, const Sum* sums) const {
        numbers.each(after, row, rows, from, vecs, sums, [&](int64_t to, V* z) __attribute__((always_inline)) {
#pragma GCC unroll 1
            for (int v = 0; v < vecs; v++) put(y + to * ldy + from + v * W, z[v], numbers.n - from - v * W);
        });
    }
};

// `out.write(row, rows, from, vecs, sums)` takes the sums of a tile.
template <typename Out>
struct VectorLinear {
    int64_t n, quads;
    const uint8_t* weight;  // [N / LANES][quads][LANES][4]
    const int8_t* codes;    // (M, stride)
    int64_t stride;
    const Out& out;

    template <int NV>
    static inline void ahead_of(const uint8_t* w, int64_t apart) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) __builtin_prefetch(w + v / PER_LANES * apart + v % PER_LANES * W * 4 + AHEAD);
    }

    // R rows from row i times the outputs [from, from + V * W), while [soon, end) of W is fetched for later; without an end, what comes next.
    template <int R, int NV>
    void tile(int64_t i, int64_t from, const uint8_t* soon, const uint8_t* end) const {
        VI acc[held_rows(R)][NV] = {};
        Sum sums[R * NV];
        if constexpr (BLOCK) std::fill_n(sums, R * NV, Sum{});
        const int8_t* a = codes + i * stride;
        const int64_t apart = quads * LANES * 4;
        const uint8_t* w = weight + from / LANES * apart + (PANEL % LANES ? from % LANES * 4 : 0);
        if constexpr (PAIRED && R > 1) {
            paired<R, NV>(acc, w, apart, a);
        } else {
            constexpr int HALF = (R + 1) / 2;  // two addresses, of which the others are few multiples of the stride away
            const int8_t* half = a + HALF * stride;
            int64_t taken = BLOCK;  // at which step sums are
            for (int64_t q = 0; q < quads; q++, w += LANES * 4, a += 4, half += 4) {
                if (BLOCK && q == taken) take<R, NV>(acc, sums), taken += BLOCK;
                held_in_registers(w, a, half);
                if (soon < end) __builtin_prefetch(soon, 0, 2), soon += LINE_BYTES;
                else if (!end) ahead_of<NV>(w, apart);
                VI ws[NV];
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) ws[v] = load_ints(w + v / PER_LANES * apart + v % PER_LANES * W * 4);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const auto code = repeated(r < HALF ? a + r * stride : half + (r - HALF) * stride);
#pragma GCC unroll 8
                    for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], ws[v], code);
                }
            }
        }
        take<R, NV>(acc, sums);
        out.write(i, R, from, NV, sums);
    }

    // What registers hold, as sums, or added to them, after which they hold nothing.
    template <int R, int NV>
    static inline void take(VI (&acc)[held_rows(R)][NV], Sum* sums) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                if constexpr (BLOCK) sums[r * NV + v] += as_floats(acc[r][v]), acc[r][v] = VI{};
                else sums[r * NV + v] = (Sum)acc[r][v];
            }
    }

    // The sums of a tile, two rows at once. Codes of x are zeros behind the last quad.
    template <int R, int NV>
    inline void paired(VI (&acc)[held_rows(R)][NV], const uint8_t* w, int64_t apart, const int8_t* a) const {
#ifdef __ARM_FEATURE_MATMUL_INT8
        const auto held = [&](int64_t q, int v) { return load_ints(w + v / PER_LANES * apart + q * LANES * 4 + v % PER_LANES * W * 4); };
        for (int64_t q = 0; q < quads; q += 2)
            add_pairs<R, NV>(acc, [&](int second, int v) { return lowered(held(std::min(q + second, quads - 1), v)); },
                             [&](int r, int s) { return two_rows(a + r * stride + q * 4, a + s * stride + q * 4); });
        part_pairs(acc);
#endif
    }

    template <int R, int NV>
    void rows(int64_t count, int64_t i, int64_t from, const uint8_t* soon, const uint8_t* end) const {
        if constexpr (R > 1)
            if (count < R) return rows<R - 1, NV>(count, i, from, soon, end);
        tile<R, NV>(i, from, soon, end);
    }

    // The outputs of panel p for the rows [top, bottom), in tiles of even height; each of them has its part of panel `next` fetched into the L2 cache.
    template <int NV>
    void panel(int64_t vecs, int64_t top, int64_t bottom, int64_t p, int64_t next) const {
        if constexpr (NV > 1)
            if (vecs < NV) return panel<NV - 1>(vecs, top, bottom, p, next);
        const int64_t height = bottom - top, tiles = (height + ROWS - 1) / ROWS;
        const int64_t bytes = PANEL * quads * 4, each = up((bytes + tiles - 1) / tiles, LINE_BYTES);
        const uint8_t *from = weight + next * bytes, *last = std::min(from + bytes, weight + up(n, LANES) * quads * 4);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t i = top + height * t / tiles, end = top + height * (t + 1) / tiles;
            const uint8_t* soon = from + t * each;
            if (tiles > 1) rows<ROWS, NV>(end - i, i, p * PANEL, soon, std::min(soon + each, last));
            else rows<ROWS, NV>(end - i, i, p * PANEL, nullptr, nullptr);
        }
    }

    // Panel p of the rows [top, bottom); `next` is the one that this thread will take then.
    void panel(int64_t p, int64_t top, int64_t bottom, int64_t next) const {
        panel<VECS>(std::min<int64_t>(VECS, (n + W - 1) / W - p * VECS), top, bottom, p, next);
    }

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

}  // namespace
