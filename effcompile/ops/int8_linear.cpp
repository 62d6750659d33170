// Linears in 8 bits on a CPU: y = f(dequantised(codes(x) W^T) + bias), activations quantised row by row inside.
//
// Compiled once per instruction set by machine/native.py, which passes as macros:
//   WIDTH  32-bit words of a vector register
//   ROWS, VECS  the register tile: ROWS rows of x times VECS vectors of outputs
//   TILED  rows of x from which on AMX tiles multiply; 0: there are none
//
// Codes of x are s8, x ~ scale * code with one scale per row; codes of W are kept as u8, code + 128, because x86 multiplies unsigned by
// signed bytes (VPDPBUSD); that adds 128 * sum(codes of the row of x), which is taken off again. ARM makes them signed instead. The four-byte interleaving
// [N / 16][K / 4][16][4] is what VPDPBUSD reads as one register, and also what an AMX tile of 16 rows is (Intel, Optimization Reference
// Manual, 8.2.1 and 20.5; oneDNN: BA16b4a; FBGEMM: Khudia et al. 2021, arXiv 2101.05615).
// All of a panel of outputs is summed in registers before anything is written: codes of x and a panel of W stay in the L2 cache.

#define KIND 0
#include "row_pairs.h"
#if TILED
#include "tiled_linear.h"
#endif

namespace {

#if !TILED
constexpr int LANES = 16;  // outputs that are interleaved
#endif
constexpr int PER_LANES = LANES / W;
constexpr int PANEL = VECS * W;  // outputs of a tile
constexpr int AHEAD = 512;       // bytes of W that are fetched before they are multiplied

// ------------------------------------------------------------------ the product

template <typename T>
struct Linear {
    int64_t m, n, k, quads;
    const uint8_t* weight;  // [N / LANES][quads][LANES][4]
    const float* scales;    // (N)
    const float* bias;      // (N) or null
    int after;
    const int8_t* codes;  // (M, stride), or for tiles as tiles_of_bytes.h has them
    int64_t stride;
    const float* row_scales;
    const int32_t* offsets;
    T* y;
    int64_t ldy;

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

    // The vectors of sums of some rows as outputs.
    __attribute__((noinline)) void write(int64_t i, int rows, int64_t from, int vecs, const VI* sums) const {
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) write(i + r, from + v * W, sums[r * vecs + v]);
    }

    inline void write(int64_t row, int64_t from, VI sums) const {
        const int64_t here = std::min<int64_t>(W, n - from);
        if (here == W) return put(y + row * ldy + from, result(row, sums, load(scales + from), bias ? load(bias + from) : V{}), W);
        const V z = result(row, sums, (V)words_of(scales + from, here), bias ? (V)words_of(bias + from, here) : V{});
        put(y + row * ldy + from, z, here);
    }

    inline V result(int64_t row, VI sums, V scale, V added) const {
#ifndef SIGNED
        sums -= offsets[row];
#endif
        V z = as_floats(sums) * (scale * row_scales[row]);
        if (bias) z = z + added;
        return after ? followed(z, after) : z;
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

#if TILED
extern "C" int64_t permitted() { return tiles_permitted(); }
#endif

namespace {

template <typename T>
void linear_of(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* weight, const float* scales, const float* bias, int64_t n,
               int64_t after, T* y, int8_t* codes, float* row_scales, int32_t* offsets, int64_t chunk, int64_t threads) {
    const int64_t quads = (k + 3) / 4, vectors = (n + W - 1) / W, panels = (vectors + VECS - 1) / VECS;
#if TILED
    const bool tiled = m >= TILED && k > 32;
    const int64_t stride = tiled ? (k + STEP - 1) / STEP * STEP : 4 * quads;
    if (tiled) chunk = CHUNK;
#else
    const int64_t stride = PAIRED ? (quads + 1) / 2 * 8 : 4 * quads;
#endif
    const int64_t chunks = (m + chunk - 1) / chunk;
    const Linear<T> linear{m, n, k, quads, weight, scales, bias, (int)after, codes, stride, row_scales, offsets, y, n};
#if TILED
    const Results<T> results{{n, scales, bias, row_scales, offsets}, (int)after, y, n};
    const TiledLinear<Results<T>> by_tiles{m, n, quads, weight, codes, stride, results};
#endif
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#if TILED
        TileThread thread;
#endif
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) {
#if TILED
            if (tiled) {
                const int64_t apart = tiled_height(i, m) * STEP;
                offsets[i] = quantize<STEP>(x + i * ldx, k, stride, tiled_row(codes, i, stride), row_scales + i, apart);
                continue;
            }
#endif
            offsets[i] = quantize(x + i * ldx, k, stride, codes + i * stride, row_scales + i);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t c = task / panels, p = task % panels, top = c * chunk, bottom = std::min(m, top + chunk);
            const int64_t vecs = std::min<int64_t>(VECS, vectors - p * VECS);
#if TILED
            if (tiled) {
                if (vecs > 1) by_tiles.template panel<2>(thread, top, bottom, p * PANEL, threads);
                else by_tiles.template panel<1>(thread, top, bottom, p * PANEL, threads);
                continue;
            }
#endif
            linear.template panel<VECS>(vecs, top, bottom, p * PANEL);
        }
#if TILED
        by_tiles.finish(thread);
#endif
    }
}

}  // namespace

// x (M, K), fp32, rows ldx apart → y (M, N), in fp32 or, by the second, in bf16. `codes` (M, K to the next multiple of four, by SMMLA of
// eight, or for tiles of 64, 64 bytes aligned), `row_scales` (M) and `offsets` (M) are workspace. Rows are taken in chunks of `chunk`, so that their codes stay in a
// core's cache.
#define EACH_ARGUMENT(T) \
    const float *x, int64_t ldx, int64_t m, int64_t k, const uint8_t *weight, const float *scales, const float *bias, int64_t n, int64_t after, \
        T *y, int8_t *codes, float *row_scales, int32_t *offsets, int64_t chunk, int64_t threads

extern "C" void int8_linear(EACH_ARGUMENT(float)) {
    linear_of(x, ldx, m, k, weight, scales, bias, n, after, y, codes, row_scales, offsets, chunk, threads);
}

extern "C" void int8_linear_narrow(EACH_ARGUMENT(uint16_t)) {
    linear_of(x, ldx, m, k, weight, scales, bias, n, after, y, codes, row_scales, offsets, chunk, threads);
}
