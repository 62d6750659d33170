// Linears in 8 bits on a CPU: y = f(dequantised(codes(x) W^T) + bias), activations quantised row by row inside.
//
// Compiled once per instruction set by machine/native.py, which passes as macros:
//   WIDTH  32-bit words of a vector register
//   ROWS, VECS  the register tile: ROWS rows of x times VECS vectors of outputs
//
// Codes of x are s8, x ~ scale * code with one scale per row; codes of W are kept as u8, code + 128, because x86 multiplies unsigned by
// signed bytes (VPDPBUSD); that adds 128 * sum(codes of the row of x), which is taken off again. The four-byte interleaving
// [N / 16][K / 4][16][4] is what VPDPBUSD reads as one register, and also what an AMX tile of 16 rows is (Intel, Optimization Reference
// Manual, 8.2.1 and 20.5; oneDNN: BA16b4a; FBGEMM: Khudia et al. 2021, arXiv 2101.05615).
// All of a panel of outputs is summed in registers before anything is written: codes of x and a panel of W stay in the L2 cache.

#define KIND 0
#include "integers.h"

namespace {

constexpr int LANES = 16;  // outputs that are interleaved
constexpr int PER_LANES = LANES / W;
constexpr int PANEL = VECS * W;  // outputs of a tile

// ------------------------------------------------------------------ the product

struct Linear {
    int64_t m, n, k, quads;
    const uint8_t* weight;  // [N / LANES][quads][LANES][4]
    const float* scales;    // (N)
    const float* bias;      // (N) or null
    int after;
    const int8_t* codes;  // (M, 4 * quads)
    const float* row_scales;
    const int32_t* offsets;
    float* y;
    int64_t ldy;

    // R rows from row i times the outputs [from, from + V * W).
    template <int R, int NV>
    void tile(int64_t i, int64_t from) const {
        VI acc[R][NV] = {};
        const int8_t* a = codes + i * 4 * quads;
        const int64_t apart = quads * LANES * 4;
        const uint8_t* w = weight + from / LANES * apart;
        for (int64_t q = 0; q < quads; q++) {
            VI ws[NV];
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) ws[v] = load_ints(w + v / PER_LANES * apart + q * LANES * 4 + v % PER_LANES * W * 4);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const VI code = repeated(a + r * 4 * quads + q * 4);
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], ws[v], code);
            }
        }
        VI sums[R * NV];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) sums[r * NV + v] = acc[r][v];
        write(i, R, from, NV, sums);
    }

    // The vectors of sums of some rows as outputs.
    __attribute__((noinline)) void write(int64_t i, int rows, int64_t from, int vecs, const VI* sums) const {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) write(i + r, from + v * W, sums[r * vecs + v]);
    }

    inline void write(int64_t row, int64_t from, VI sums) const {
#ifndef SIGNED
        sums -= offsets[row];
#endif
        const int64_t here = std::min<int64_t>(W, n - from);
        V z = as_floats(sums) * ((here < W ? (V)words_of(scales + from, here) : load(scales + from)) * row_scales[row]);
        if (bias) z = z + (here < W ? (V)words_of(bias + from, here) : load(bias + from));
        if (after) z = followed(z, after);
        std::memcpy(y + row * ldy + from, &z, here * sizeof(float));
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
};

}  // namespace

// x (M, K), fp32, rows ldx apart → y (M, N). `codes` (M, 4 * quads), `row_scales` (M) and `offsets` (M) are workspace. Rows are taken in
// chunks of `chunk`, so that their codes stay in a core's cache.
extern "C" void int8_linear(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* weight, const float* scales, const float* bias,
                            int64_t n, int64_t after, float* y, int8_t* codes, float* row_scales, int32_t* offsets, int64_t chunk,
                            int64_t threads) {
    const int64_t quads = (k + 3) / 4, vectors = (n + W - 1) / W, panels = (vectors + VECS - 1) / VECS, chunks = (m + chunk - 1) / chunk;
    const Linear linear{m, n, k, quads, weight, scales, bias, (int)after, codes, row_scales, offsets, y, n};
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) offsets[i] = quantize(x + i * ldx, k, 4 * quads, codes + i * 4 * quads, row_scales + i);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t c = task / panels, p = task % panels;
            linear.panel<VECS>(std::min<int64_t>(VECS, vectors - p * VECS), c * chunk, std::min(m, (c + 1) * chunk), p * PANEL);
        }
    }
}
