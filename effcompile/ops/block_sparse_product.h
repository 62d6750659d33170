// The block-sparse product y = x W^T + bias: x transposed into panels, multiplied block by block, written. The idea: block_sparse.cpp.
//
// A template over the block side and the register tile, so that one library may hold several; who runs its tasks is an argument.
// KIND and WIDTH are macros, as for vectors.h. A "word" is 32 bits of the summed axis: one fp32, or two bf16 under PAIRS.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include "vectors.h"

namespace {

constexpr int PAIRS = 2;
constexpr int PER_WORD = KIND == PAIRS ? 2 : 1;

// Outputs that are computed before they are written: whole cache lines.
constexpr int group_of(int block) { return block > W ? block : W; }

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

// How many panels of how many vectors: at most `widest` vectors each, `stripe` panels transposed at a time, of which one core works on
// `cache` at a time. Workspace: stripe * K words * widest * W floats.
struct Cut {
    int64_t widest, stripe, cache;
};

// ------------------------------------------------------------------ y = x W^T + bias

template <int SIDE, int TILE_ROWS, int TILE_VECS>
struct Product {
    static constexpr int STEPS = SIDE / PER_WORD;  // words of a block's row
    static constexpr int GROUP = group_of(SIDE);

    const float* values;  // (Z, b, b) as words
    const int32_t *crow, *col;
    int64_t block_rows, n;
    const float* bias;  // (N) or null
    Element* y;
    int64_t ldy;

    // TILE_ROWS outputs of one block row, from output `sub`, for NV vectors of rows.
    template <int NV>
    static inline void tile(const float* panel, const float* values, const int32_t* col, int64_t count, int sub, float* out) {
        V acc[TILE_ROWS][NV] = {};
        const float* w = values + sub * STEPS;
        for (int64_t j = 0; j < count; j++, w += SIDE * STEPS) {
            const float* x = panel + (int64_t)col[j] * STEPS * NV * W;
#pragma GCC unroll 8
            for (int s = 0; s < STEPS; s++) {
                V xs[NV];
#pragma GCC unroll 8
                for (int v = 0; v < NV; v++) xs[v] = load(x + (s * NV + v) * W);
#pragma GCC unroll 8
                for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < NV; v++) acc[r][v] = multiply_add(acc[r][v], w + r * STEPS + s, xs[v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < TILE_ROWS; r++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) store(out + (r * NV + v) * W, acc[r][v]);
    }

    // W outputs from output `from`, of `rows` rows from row m: transposed back, the bias added.
    template <int NV>
    inline void write(const float* tiles, int64_t m, int64_t rows, int64_t from) const {
        int64_t there = std::min<int64_t>(W, n - from);
        V added = {};
        if (bias) std::memcpy(&added, bias + from, there * 4);
        for (int v = 0; v < NV && v * W < rows; v++) {
            V r[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) r[i] = load(tiles + (i * NV + v) * W);
            transpose_stages<1>(r);
            int64_t valid = std::min<int64_t>(W, rows - v * W);
            Element* to = y + (m + v * W) * ldy + from;
            if (there == W && valid == W) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) store_elements(to + i * ldy, r[i] + added);
            } else {
                for (int64_t i = 0; i < valid; i++) {
                    Element row[W];
                    store_elements(row, r[i] + added);
                    std::memcpy(to + i * ldy, row, there * sizeof(Element));
                }
            }
        }
    }

    // GROUP outputs from output `from`, of a panel's rows.
    template <int NV>
    void group(const float* panel, int64_t m, int64_t rows, int64_t from) const {
        alignas(64) float tiles[GROUP * NV * W];
        int64_t end = std::min<int64_t>(from + GROUP, n);
        for (int64_t i = from; i < end; i += TILE_ROWS) {
            int64_t row = i / SIDE, first = crow[row];
            tile<NV>(panel, values + first * SIDE * STEPS, col + first, crow[row + 1] - first, i % SIDE, tiles + (i - from) * NV * W);
        }
        for (int64_t i = from; i < end; i += W) write<NV>(tiles + (i - from) * NV * W, m, rows, i);
    }

    template <int NV>
    void dispatch(int vecs, const float* panel, int64_t m, int64_t rows, int64_t from) const {
        if constexpr (NV > 1)
            if (vecs < NV) return dispatch<NV - 1>(vecs, panel, m, rows, from);
        group<NV>(panel, m, rows, from);
    }

    // All of y, for x (m, K). `parallel.even(tasks, f)` calls f(0) to f(tasks - 1) in any order and returns when all are done,
    // `parallel.uneven` the same where they take different times; about `threads` of them run at once.
    template <class Parallel>
    void run(const Element* x, int64_t ldx, int64_t m, int64_t block_cols, float* workspace, Cut by, int64_t threads,
             Parallel& parallel) const {
        const Panels panels(m, by.widest);
        const int64_t words = block_cols * STEPS, slot = words * by.widest * W, groups = (n + GROUP - 1) / GROUP;
        const int64_t slice = std::max<int64_t>(W, (words + 15) / 16 / W * W);  // of a panel, per packing task
        for (int64_t from = 0; from < panels.count; from += by.stripe) {
            const int64_t here = std::min(by.stripe, panels.count - from), slices = (words + slice - 1) / slice;
            parallel.even(here * slices, [&](int64_t task) {
                const int64_t i = from + task / slices, k = task % slices * slice;
                pack(x + panels.start(i) * ldx, ldx, panels.height(i), k, std::min(k + slice, words), panels.vecs(i),
                     workspace + (i - from) * slot);
            });
            const int64_t blocks = (here + by.cache - 1) / by.cache;  // of panels that share the cache
            const int64_t cuts = threads == 1 ? 1 : std::min(groups, std::max<int64_t>(1, 8 * threads / blocks));
            parallel.uneven(blocks * cuts, [&](int64_t task) {
                const int64_t first = task / cuts * by.cache, cut = task % cuts;
                for (int64_t g = groups * cut / cuts; g < groups * (cut + 1) / cuts; g++)
                    for (int64_t i = first; i < std::min(first + by.cache, here); i++)
                        dispatch<TILE_VECS>(panels.vecs(from + i), workspace + i * slot, panels.start(from + i), panels.height(from + i),
                                       g * GROUP);
            });
        }
    }
};

}  // namespace
