// Block-sparse products on a CPU: y = x W^T + bias, and dW = dy^T x at the kept blocks of W only.
//
// Compiled once per (BLOCK, KIND, instruction set) by native.py, which passes as macros:
//   BLOCK  b, rows and columns of a block
//   KIND   FP32: all fp32 | BF16: bf16 activations computed in fp32 | PAIRS: bf16, two products per lane (AVX512_BF16)
//   WIDTH  32-bit words of a vector register
//   ROWS, VECS  the register tile of the product: ROWS outputs x VECS vectors of rows of x. ROWS divides b.
//
// The idea: vectors run over the rows of x, so that any block size fills them. x (M, K) is transposed once, in registers, into panels
// xt[K][rows] that stay in the L2 cache; a tile reads VECS vectors of a panel and ROWS broadcast weights for ROWS * VECS
// multiply-adds; a finished tile is transposed back in registers and written as whole cache lines of y (M, N).
// The sampled product dW transposes both sides and keeps WIDTH dot products over M in registers, 4 columns x WIDTH/4 rows of a block.
//
// A "word" is 32 bits of the summed axis: one fp32, or two bf16 under PAIRS. All sums are fp32.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include "vectors.h"

namespace {

constexpr int PAIRS = 2;
constexpr int PER_WORD = KIND == PAIRS ? 2 : 1;
constexpr int STEPS = BLOCK / PER_WORD;               // words of a block's row
constexpr int GROUP = BLOCK > W ? BLOCK : W;          // outputs that are computed before they are written: whole cache lines
constexpr int COLS = BLOCK == 1 ? W : 4;              // the sampled product's tile: DOTS x COLS = W dot products
constexpr int DOTS = W / COLS;

// ------------------------------------------------------------------ rows of x into a transposed panel

// W rows and W words of a row-major matrix, transposed: r[k] holds word k of all rows. Missing rows and words are 0.
inline void transposed_square(const Element* x, int64_t ld, int64_t rows, int64_t words, V* r) {
    if (rows >= W && words >= W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = load_words(x + i * ld);
    } else {
        alignas(64) Element edge[W * W * PER_WORD] = {};
        for (int64_t i = 0; i < std::min<int64_t>(rows, W); i++)
            std::memcpy(edge + i * W * PER_WORD, x + i * ld, std::min<int64_t>(words, W) * PER_WORD * sizeof(Element));
        for (int i = 0; i < W; i++) r[i] = load_words(edge + i * W * PER_WORD);
    }
    transpose_stages<1>(r);
}

// Rows [0, rows) and words [from, to) of x into panel[word][vecs * W].
void pack(const Element* x, int64_t ld, int64_t rows, int64_t from, int64_t to, int vecs, float* panel) {
    for (int64_t k = from; k < to; k += W)
        for (int v = 0; v < vecs; v++) {
            V r[W];
            transposed_square(x + v * W * ld + k * PER_WORD, ld, rows - v * W, to - k, r);
            for (int i = 0; i < std::min<int64_t>(W, to - k); i++) store(panel + ((k + i) * vecs + v) * W, r[i]);
        }
}

// Columns [from, to) of `rows` rows of x into panel[column - from][vecs * W], words along the rows. Under PAIRS a word holds rows i
// and i + W of 2 W rows: any pairing is right for a dot product whose two sides have the same.
void pack_columns(const Element* x, int64_t ld, int64_t rows, int64_t from, int64_t to, int vecs, float* panel) {
#if KIND == 2
    for (int64_t k = from; k < to; k += 2 * W)
        for (int v = 0; v < vecs; v++) {
            V low[W], high[W];
            int64_t words = (to - k) / 2, top = v * 2 * W;
            transposed_square(x + top * ld + k, ld, rows - top, words, low);
            transposed_square(x + (top + W) * ld + k, ld, rows - top - W, words, high);
            for (int i = 0; i < std::min<int64_t>(W, words); i++) {
                VU a = (VU)low[i], b = (VU)high[i];
                store(panel + ((k - from + 2 * i) * vecs + v) * W, (V)((a & 0xffff) | (b << 16)));
                store(panel + ((k - from + 2 * i + 1) * vecs + v) * W, (V)((a >> 16) | (b & 0xffff0000)));
            }
        }
#else
    pack(x + from, ld, rows, 0, to - from, vecs, panel);
#endif
}

// ------------------------------------------------------------------ y = x W^T + bias

struct Product {
    const float* values;  // (Z, b, b) as words
    const int32_t *crow, *col;
    int64_t block_rows, n;
    const float* bias;  // (N) or null
    Element* y;
    int64_t ldy;
};

// ROWS outputs of one block row, from output `sub`, for NV vectors of rows.
template <int NV>
inline void tile(const float* panel, const float* values, const int32_t* col, int64_t count, int sub, float* out) {
    V acc[ROWS][NV] = {};
    const float* w = values + sub * STEPS;
    for (int64_t j = 0; j < count; j++, w += BLOCK * STEPS) {
        const float* x = panel + (int64_t)col[j] * STEPS * NV * W;
#pragma GCC unroll 8
        for (int s = 0; s < STEPS; s++) {
            V xs[NV];
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) xs[v] = load(x + (s * NV + v) * W);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) acc[r][v] = multiply_add(acc[r][v], w + r * STEPS + s, xs[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) store(out + (r * NV + v) * W, acc[r][v]);
}

// W outputs from output n, of `rows` rows from row m: transposed back, the bias added.
template <int NV>
inline void write(const Product& p, const float* tiles, int64_t m, int64_t rows, int64_t n) {
    int64_t there = std::min<int64_t>(W, p.n - n);
    V bias = {};
    if (p.bias) std::memcpy(&bias, p.bias + n, there * 4);
    for (int v = 0; v < NV && v * W < rows; v++) {
        V r[W];
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) r[i] = load(tiles + (i * NV + v) * W);
        transpose_stages<1>(r);
        int64_t valid = std::min<int64_t>(W, rows - v * W);
        Element* y = p.y + (m + v * W) * p.ldy + n;
        if (there == W && valid == W) {
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store_elements(y + i * p.ldy, r[i] + bias);
        } else {
            for (int64_t i = 0; i < valid; i++) {
                Element row[W];
                store_elements(row, r[i] + bias);
                std::memcpy(y + i * p.ldy, row, there * sizeof(Element));
            }
        }
    }
}

// GROUP outputs from output n, of a panel's rows.
template <int NV>
void group(const Product& p, const float* panel, int64_t m, int64_t rows, int64_t n) {
    alignas(64) float tiles[GROUP * NV * W];
    int64_t end = std::min<int64_t>(n + GROUP, p.n);
    for (int64_t i = n; i < end; i += ROWS) {
        int64_t row = i / BLOCK, first = p.crow[row];
        tile<NV>(panel, p.values + first * BLOCK * STEPS, p.col + first, p.crow[row + 1] - first, i % BLOCK, tiles + (i - n) * NV * W);
    }
    for (int64_t i = n; i < end; i += W) write<NV>(p, tiles + (i - n) * NV * W, m, rows, i);
}

template <int NV>
void dispatch(int vecs, const Product& p, const float* panel, int64_t m, int64_t rows, int64_t n) {
    if constexpr (NV > 1)
        if (vecs < NV) return dispatch<NV - 1>(vecs, p, panel, m, rows, n);
    group<NV>(p, panel, m, rows, n);
}

// How the M rows are cut into panels: as even as whole vectors allow, so that no panel is a thin rest.
struct Panels {
    int64_t rows, vectors, count;
    Panels(int64_t m, int64_t widest) : rows(m), vectors((m + W - 1) / W), count((vectors + widest - 1) / widest) {}
    int64_t start(int64_t i) const { return (vectors / count * i + std::min(i, vectors % count)) * W; }
    int vecs(int64_t i) const { return (int)(vectors / count + (i < vectors % count)); }
    int64_t height(int64_t i) const { return std::min(rows - start(i), (int64_t)vecs(i) * W); }
};

// 0, or which index is out of range: 1 row pointers, 2 columns.
int check(const int32_t* crow, const int32_t* col, int64_t block_rows, int64_t block_cols, int64_t capacity) {
    if (crow[0] != 0 || crow[block_rows] > capacity) return 1;
    for (int64_t i = 0; i < block_rows; i++)
        if (crow[i] > crow[i + 1]) return 1;
    uint32_t highest = 0;  // unsigned: negative ones are the highest
    for (int64_t j = 0; j < crow[block_rows]; j++) highest = std::max(highest, (uint32_t)col[j]);
    return crow[block_rows] > 0 && highest >= (uint64_t)block_cols ? 2 : 0;
}

}  // namespace

// y (M, N) = x (M, K) W^T + bias. Panels have up to `widest` vectors of rows, at most VECS; `stripe_panels` are transposed at a time, of
// which one core works on `cache_panels` at a time. Workspace: stripe_panels * K words * widest * W floats. Returns `check`'s verdict; on a bad index nothing
// is written.
extern "C" int linear(const Element* x, int64_t ldx, int64_t m, int64_t block_cols, const Weight* values, const int32_t* crow,
                      const int32_t* col, int64_t block_rows, int64_t capacity, const float* bias, Element* y, int64_t ldy,
                      float* workspace, int64_t widest, int64_t stripe_panels, int64_t cache_panels, int64_t threads) {
    if (int bad = check(crow, col, block_rows, block_cols, capacity)) return bad;
    const Product p{reinterpret_cast<const float*>(values), crow, col, block_rows, block_rows * BLOCK, bias, y, ldy};
    const Panels panels(m, widest);
    const int64_t words = block_cols * STEPS, slot = words * widest * W, groups = (p.n + GROUP - 1) / GROUP;
    const int64_t slice = std::max<int64_t>(W, (words + 15) / 16 / W * W);  // of a panel, per packing task
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    for (int64_t from = 0; from < panels.count; from += stripe_panels) {
        const int64_t here = std::min(stripe_panels, panels.count - from), slices = (words + slice - 1) / slice;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < here * slices; task++) {
            const int64_t i = from + task / slices, k = task % slices * slice;
            pack(x + panels.start(i) * ldx, ldx, panels.height(i), k, std::min(k + slice, words), panels.vecs(i),
                 workspace + (i - from) * slot);
        }
        const int64_t blocks = (here + cache_panels - 1) / cache_panels;  // of panels that share the cache
        const int64_t cuts = threads == 1 ? 1 : std::min(groups, std::max<int64_t>(1, 8 * threads / blocks));
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < blocks * cuts; task++) {
            const int64_t first = task / cuts * cache_panels, cut = task % cuts;
            for (int64_t g = groups * cut / cuts; g < groups * (cut + 1) / cuts; g++)
                for (int64_t i = first; i < std::min(first + cache_panels, here); i++)
                    dispatch<VECS>(panels.vecs(from + i), p, workspace + i * slot, panels.start(from + i), panels.height(from + i),
                                   g * GROUP);
        }
    }
    return 0;
}

// out[j] = values[perm[j]] transposed, for the j in use: the values of W^T. Returns 3 when a place is out of range.
extern "C" int transpose_values(const Weight* values, const int32_t* perm, int64_t used, int64_t capacity, Weight* out, int64_t threads) {
    uint32_t highest = 0;
    for (int64_t j = 0; j < used; j++) highest = std::max(highest, (uint32_t)perm[j]);
    if (used > capacity || (used > 0 && highest >= (uint64_t)capacity)) return 3;
#pragma omp parallel for num_threads((int)threads) if (threads > 1) schedule(static)
    for (int64_t j = 0; j < used; j++) {
        const Weight* from = values + (int64_t)perm[j] * BLOCK * BLOCK;
        Weight* to = out + j * BLOCK * BLOCK;
        for (int r = 0; r < BLOCK; r++)
            for (int c = 0; c < BLOCK; c++) to[r * BLOCK + c] = from[c * BLOCK + r];
    }
    return 0;
}

namespace {

#if BLOCK == 1
// W dot products over `vecs` vectors: of a with W rows. Eight at a time, for as many addresses are kept in registers.
inline V dots(const float* a, const float* const* rows, int vecs) {
    constexpr int PART = W < 8 ? W : 8;
    V sums[W];
    for (int part = 0; part < W; part += PART) {
        V acc[PART][2] = {};
        int v = 0;
        for (; v + 1 < vecs; v += 2) {
            V even = load(a + v * W), odd = load(a + (v + 1) * W);
#pragma GCC unroll 8
            for (int c = 0; c < PART; c++) {
                acc[c][0] = multiply_add(acc[c][0], even, load(rows[part + c] + v * W));
                acc[c][1] = multiply_add(acc[c][1], odd, load(rows[part + c] + (v + 1) * W));
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < PART; c++) {
            if (v < vecs) acc[c][0] = multiply_add(acc[c][0], load(a + v * W), load(rows[part + c] + v * W));
            sums[part + c] = acc[c][0] + acc[c][1];
        }
    }
    return lane_sums<W / 2>(sums);
}
#else
// W dot products over `vecs` vectors: DOTS rows of a with COLS rows of b, `stride` floats apart. Lane d * COLS + c is a[d] . b[c].
inline V dots(const float* a, const float* b, int64_t stride, int vecs) {
    V acc[W] = {};
    for (int v = 0; v < vecs; v++) {
        V bs[COLS];
#pragma GCC unroll 16
        for (int c = 0; c < COLS; c++) bs[c] = load(b + c * stride + v * W);
#pragma GCC unroll 16
        for (int d = 0; d < DOTS; d++) {
            V as = load(a + d * stride + v * W);
#pragma GCC unroll 16
            for (int c = 0; c < COLS; c++) acc[d * COLS + c] = multiply_add(acc[d * COLS + c], as, bs[c]);
        }
    }
    return lane_sums<W / 2>(acc);
}
#endif

// The blocks [first, last) of one block row: dy's rows in `grad` (b, stride), x's panel (K, stride).
void sampled_row(const float* grad, const float* panel, const int32_t* col, int64_t first, int64_t last, int vecs, float* out, bool add) {
    const int64_t stride = (int64_t)vecs * W;
#if BLOCK == 1
    for (int64_t j = first; j < last; j += COLS) {
        const int valid = (int)std::min<int64_t>(COLS, last - j);
        const float* rows[COLS];
        for (int c = 0; c < COLS; c++) rows[c] = panel + col[j + std::min(c, valid - 1)] * stride;
        V sums = dots(grad, rows, vecs);
        if (valid == W) {
            store(out + j, add ? load(out + j) + sums : sums);
        } else {
            for (int c = 0; c < valid; c++) out[j + c] = add ? out[j + c] + sums[c] : sums[c];
        }
    }
#else
    for (int64_t j = first; j < last; j++)
        for (int c = 0; c < BLOCK; c += COLS)
            for (int r = 0; r < BLOCK; r += DOTS) {
                const float* rows = panel + ((int64_t)col[j] * BLOCK + c) * stride;
                alignas(64) float sums[W];
                store(sums, dots(grad + r * stride, rows, stride, vecs));
                for (int d = 0; d < DOTS; d++) {
                    Quad* to = reinterpret_cast<Quad*>(out + (j * BLOCK + r + d) * BLOCK + c);
                    Quad four = *reinterpret_cast<Quad*>(sums + d * COLS);
                    *to = add ? *to + four : four;
                }
            }
#endif
}

}  // namespace

// out (Z, b, b), fp32 = dy (M, N)^T x (M, K) at the kept blocks; 0 beyond those in use. The M rows are taken in chunks of `vecs` vectors.
// Workspace: (K + threads * GROUP) * vecs * W floats.
extern "C" int grad_values(const Element* grad, int64_t ldg, const Element* x, int64_t ldx, int64_t m, int64_t block_rows,
                           int64_t block_cols, const int32_t* crow, const int32_t* col, int64_t capacity, float* out, float* workspace,
                           int64_t vecs, int64_t threads) {
    if (int bad = check(crow, col, block_rows, block_cols, capacity)) return bad;
    const int64_t k = block_cols * BLOCK, n = block_rows * BLOCK, groups = (n + GROUP - 1) / GROUP, chunk = vecs * W * PER_WORD;
    const int64_t slice = 2 * W, slices = (k + slice - 1) / slice;
    std::memset(out + crow[block_rows] * BLOCK * BLOCK, 0, (capacity - crow[block_rows]) * BLOCK * BLOCK * 4);
    if (m == 0) std::memset(out, 0, crow[block_rows] * BLOCK * BLOCK * 4);
    float* panel = workspace;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    for (int64_t top = 0; top < m; top += chunk) {
        const int64_t rows = std::min(chunk, m - top);
        const int here = (int)((rows + W * PER_WORD - 1) / (W * PER_WORD));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < slices; i++)
            pack_columns(x + top * ldx, ldx, rows, i * slice, std::min(k, (i + 1) * slice), here, panel + i * slice * here * W);
        float* own = panel + (k + omp_get_thread_num() * GROUP) * vecs * W;
#pragma omp for schedule(dynamic)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t from = g * GROUP, to = std::min(n, from + GROUP);
            pack_columns(grad + top * ldg, ldg, rows, from, to, here, own);
            for (int64_t row = from / BLOCK; row * BLOCK < to; row++)
                sampled_row(own + (row * BLOCK - from) * here * W, panel, col, crow[row], crow[row + 1], here, out, top > 0);
        }
    }
    return 0;
}
