// Products of bytes by SMMLA (Arm Architecture Reference Manual, FEAT_I8MM): two rows of x times two outputs over eight columns at once.
//
// The weight keeps its quads of columns: two of them are put together in registers, once for all rows of a tile.

#pragma once

#include "integers.h"

namespace {

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr bool PAIRED = true;
#else
constexpr bool PAIRED = false;
#endif

// Rows of sums that a tile of so many rows holds: a last one without another is its own partner. One row alone is no pair.
constexpr int held_rows(int rows) { return PAIRED && rows > 1 ? (rows + 1) / 2 * 2 : rows; }

#ifdef __ARM_FEATURE_MATMUL_INT8
inline VI zip_words(VI a, VI b, bool upper) { return (VI)(upper ? vzip2q_s32((int32x4_t)a, (int32x4_t)b) : vzip1q_s32((int32x4_t)a, (int32x4_t)b)); }
inline VI zip_halves(VI a, VI b, bool upper) { return (VI)(upper ? vzip2q_s64((int64x2_t)a, (int64x2_t)b) : vzip1q_s64((int64x2_t)a, (int64x2_t)b)); }
inline VI multiplied(VI sum, VI rows, VI outputs) { return (VI)vmmlaq_s32((int32x4_t)sum, (int8x16_t)rows, (int8x16_t)outputs); }

// Eight bytes of each of two rows.
inline VI two_rows(const int8_t* first, const int8_t* second) { return (VI)vcombine_s8(vld1_s8(first), vld1_s8(second)); }

// Adds the products of R rows with NV vectors of outputs over two quads, whose signed codes are `weights(0 or 1, v)`, to sums of pairs:
// those of a pair's first two outputs, then those of the last two. `rows(r, s)` are the rows r and s over the two quads.
template <int R, int NV, typename Weights, typename Rows>
inline __attribute__((always_inline)) void add_pairs(VI (&sums)[held_rows(R)][NV], const Weights& weights, const Rows& rows) {
    VI pairs[held_rows(R) / 2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r += 2) pairs[r / 2] = rows(r, r + 1 < R ? r + 1 : r);
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
        const VI first = weights(0, v), second = weights(1, v), low = zip_words(first, second, false), high = zip_words(first, second, true);
#pragma GCC unroll 16
        for (int r = 0; r < R; r += 2) {
            sums[r][v] = multiplied(sums[r][v], pairs[r / 2], low);
            sums[r + 1][v] = multiplied(sums[r + 1][v], pairs[r / 2], high);
        }
    }
}

// Sums of pairs as those of rows.
template <int H, int NV>
inline __attribute__((always_inline)) void part_pairs(VI (&sums)[H][NV]) {
#pragma GCC unroll 16
    for (int r = 0; r < H; r += 2)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            const VI low = sums[r][v], high = sums[r + 1][v];
            sums[r][v] = zip_halves(low, high, false);
            sums[r + 1][v] = zip_halves(low, high, true);
        }
}
#endif

}  // namespace
