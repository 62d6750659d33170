// Block-sparse products on a CPU: y = x W^T + bias, and dW = dy^T x at the kept blocks of W only.
//
// Compiled once per (BLOCK, KIND, instruction set) by native.py, which passes as macros:
//   BLOCK  b, rows and columns of a block
//   KIND   FP32: all fp32 | BF16: bf16 activations computed in fp32 | PAIRS: bf16, two products per lane (AVX512_BF16)
//   WIDTH  32-bit words of a vector register
//   ROWS, VECS  the register tile of the product: ROWS outputs x VECS vectors of rows of x. ROWS divides b.
//
// The product itself stands in block_sparse_product.h, which ONNX Runtime's operator (block_sparse_ort.cpp) has too.
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
#include "block_sparse_product.h"

namespace {

constexpr int GROUP = group_of(BLOCK);
constexpr int COLS = BLOCK == 1 ? W : 4;  // the sampled product's tile: DOTS x COLS = W dot products
constexpr int DOTS = W / COLS;

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

// OpenMP's threads, all of which run the same code and share each loop.
struct Team {
    template <class Task>
    void even(int64_t tasks, const Task& task) const {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tasks; i++) task(i);
    }
    template <class Task>
    void uneven(int64_t tasks, const Task& task) const {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; i++) task(i);
    }
};

}  // namespace

// y (M, N) = x (M, K) W^T + bias. Panels have up to `widest` vectors of rows, at most VECS; the rest as in `Cut`. Returns `check`'s
// verdict; on a bad index nothing is written.
extern "C" int linear(const Element* x, int64_t ldx, int64_t m, int64_t block_cols, const Weight* values, const int32_t* crow,
                      const int32_t* col, int64_t block_rows, int64_t capacity, const float* bias, Element* y, int64_t ldy,
                      float* workspace, int64_t widest, int64_t stripe_panels, int64_t cache_panels, int64_t threads) {
    if (int bad = check(crow, col, block_rows, block_cols, capacity)) return bad;
    const Product<BLOCK, ROWS, VECS> product{
        reinterpret_cast<const float*>(values), crow, col, block_rows, block_rows * BLOCK, bias, y, ldy};
    const Team team;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    product.run(x, ldx, m, block_cols, workspace, {widest, stripe_panels, cache_panels}, threads, team);
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
