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

// Bytes of a row of codes.
inline int64_t row_bytes(int64_t quads) { return PAIRED ? (quads + 1) / 2 * 8 : 4 * quads; }

// Sums as numbers: f(sum * scale of the row * scale of the output + bias).
struct Numbers {
    int64_t n;
    const float *scales, *bias;  // (N); the bias may be null
    const float* row_scales;
    const int32_t* offsets;
    int after;

    // A vector of outputs from `from` on: zeros beyond the last.
    inline V of(int64_t row, int64_t from, VI sums) const {
        const int64_t here = n - from;
        if (here >= W) return result(row, sums, load(scales + from), bias ? load(bias + from) : V{});
        return result(row, sums, (V)words_of(scales + from, here), bias ? (V)words_of(bias + from, here) : V{});
    }

    inline V result(int64_t row, VI sums, V scale, V added) const {
#ifndef SIGNED
        sums -= offsets[row];
#endif
        V z = as_floats(sums) * (scale * row_scales[row]);
        if (bias) z = z + added;
        return after ? followed(z, after) : z;
    }
};

// They are written in fp32 or bf16, rows ldy apart.
template <typename T>
struct Outputs {
    Numbers numbers;
    T* y;
    int64_t ldy;

    inline void write(int64_t row, int64_t from, VI sums) const { put(y + row * ldy + from, numbers.of(row, from, sums), numbers.n - from); }
};

// `out.write(row, from, sums)` takes a vector of sums.
template <typename Out>
struct VectorLinear {
    int64_t n, quads;
    const uint8_t* weight;  // [N / LANES][quads][LANES][4]
    const int8_t* codes;    // (M, stride)
    int64_t stride;
    const Out& out;

    // R rows from row i times the outputs [from, from + V * W).
    template <int R, int NV>
    void tile(int64_t i, int64_t from) const {
        VI acc[held_rows(R)][NV] = {};
        const int8_t* a = codes + i * stride;
        const int64_t apart = quads * LANES * 4;
        const uint8_t* w = weight + from / LANES * apart + (PANEL % LANES ? from % LANES * 4 : 0);
        if constexpr (PAIRED && R > 1) {
            paired<R, NV>(acc, w, apart, a);
        } else {
            for (int64_t q = 0; q < quads; q++) {
                VI ws[NV];
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) {
                    const uint8_t* words = w + v / PER_LANES * apart + q * LANES * 4 + v % PER_LANES * W * 4;
                    ws[v] = load_ints(words);
                    __builtin_prefetch(words + AHEAD);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const auto code = repeated(a + r * stride + q * 4);
#pragma GCC unroll 8
                    for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], ws[v], code);
                }
            }
        }
        VI sums[R * NV];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) sums[r * NV + v] = acc[r][v];
        write(i, R, from, NV, sums);
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

    // The vectors of sums of some rows.
    __attribute__((noinline)) void write(int64_t i, int rows, int64_t from, int vecs, const VI* sums) const {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) out.write(i + r, from + v * W, sums[r * vecs + v]);
    }

    template <int R, int NV>
    void rows(int64_t count, int64_t i, int64_t from) const {
        if constexpr (R > 1)
            if (count < R) return rows<R - 1, NV>(count, i, from);
        tile<R, NV>(i, from);
    }

    // The outputs of one panel for the rows [top, bottom), in tiles of even height.
    template <int NV>
    void panel(int64_t vecs, int64_t top, int64_t bottom, int64_t from) const {
        if constexpr (NV > 1)
            if (vecs < NV) return panel<NV - 1>(vecs, top, bottom, from);
        const int64_t height = bottom - top, tiles = (height + ROWS - 1) / ROWS;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t i = top + height * t / tiles, end = top + height * (t + 1) / tiles;
            rows<ROWS, NV>(end - i, i, from);
        }
    }

    // Panel p of the rows [top, bottom).
    void panel(int64_t p, int64_t top, int64_t bottom) const {
        panel<VECS>(std::min<int64_t>(VECS, (n + W - 1) / W - p * VECS), top, bottom, p * PANEL);
    }

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

}  // namespace
