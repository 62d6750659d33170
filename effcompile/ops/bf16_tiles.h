// Attention by tiles of bf16: how heads are laid for them, their products (by AMX, or by VDPBF16PS of vectors), and what a key weighs.

#pragma once

#define KIND 0
#include "integers.h"
#include "tiles.h"

namespace {

constexpr int64_t ROWS = 32;    // queries that are taken at once
constexpr int64_t WORDS = 256;  // of a tile
constexpr float LOG2_E = 1.4426950408889634f;

// 32 numbers as pairs of bf16, rounded to nearest even; and those that are bf16.
inline V paired(const float* x, int64_t count) { return (V)_mm512_cvtne2ps_pbh((__m512)some_of(x + W, count - W), (__m512)some_of(x, count)); }
inline VU narrow(V x) { return (VU)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline V paired(const uint16_t* x, int64_t count) {
    const __mmask32 there = count >= 32 ? (__mmask32)-1 : count > 0 ? (__mmask32)((1u << count) - 1) : 0;
    return (V)_mm512_maskz_loadu_epi16(there, x);
}
// 16 of them, one in each word.
inline VU spread(const float* x, int64_t count) { return narrow(some_of(x, count)); }
inline VU spread(const uint16_t* x, int64_t count) {
    const __mmask16 there = count >= W ? (__mmask16)-1 : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
    return (VU)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, x));
}

struct Sizes {
    int64_t batch, heads, groups, queries, keys, width;
    int64_t deep() const { return up(width, 32); }
    int64_t wide() const { return up(keys, 32); }
};

// Rows of x as tiles of the left side: [rows / 16][deep / 32][16][32] of bf16, zeros beyond.
template <typename T>
void lay_rows(const T* x, int64_t apart, int64_t rows, int64_t width, int64_t deep, float* to) {
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t d = 0; d < deep; d += 32)
            store(to + (r / 16 * (deep / 32) + d / 32) * WORDS + r % 16 * W, r < rows ? paired(x + r * apart + d, width - d) : V{});
}

// Keys as tiles of the right side: [keys / 16][deep / 32][16 pairs][16 keys].
template <typename T>
void lay_keys(const T* x, int64_t apart, const Sizes& s, float* to) {
    V rows[W];
    for (int64_t key = 0; key < s.wide(); key += W)
        for (int64_t d = 0; d < s.deep(); d += 32, to += WORDS) {
            for (int64_t r = 0; r < W; r++) rows[r] = key + r < s.keys ? paired(x + (key + r) * apart + d, s.width - d) : V{};
            transpose_stages<1>(rows);
            for (int64_t r = 0; r < W; r++) store(to + r * W, rows[r]);
        }
}

// Values so: [keys / 32][deep / 16][16 pairs of keys][16].
template <typename T>
void lay_values(const T* x, int64_t apart, const Sizes& s, float* to) {
    for (int64_t key = 0; key < s.wide(); key += 32)
        for (int64_t d = 0; d < s.deep(); d += W, to += WORDS)
            for (int64_t pair = 0; pair < W; pair++) {
                const int64_t first = key + 2 * pair;
                const VU low = first < s.keys ? spread(x + first * apart + d, s.width - d) : VU{};
                const VU high = first + 1 < s.keys ? spread(x + (first + 1) * apart + d, s.width - d) : VU{};
                store(to + pair * W, (V)(low | high << 16));
            }
}

// out (32, 32), `apart` floats from row to row: sums over `steps` of tiles of a, the two halves of its rows `of_a` words apart, and of b, whose
// two columns are `of_column` words apart and its steps `of_step`.
#ifdef __AMX_BF16__
inline void multiply(const float* a, int64_t of_a, const float* b, int64_t of_column, int64_t of_step, int64_t steps, float* out, int64_t apart) {
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(4, a + step * WORDS, STEP);
        _tile_loadd(6, b + step * of_step, STEP);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + step * of_step + of_column, STEP);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + of_a + step * WORDS, STEP);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, apart * 4);
    _tile_stored(1, out + W, apart * 4);
    _tile_stored(2, out + 16 * apart, apart * 4);
    _tile_stored(3, out + 16 * apart + W, apart * 4);
}
#else
constexpr int64_t HELD = 8;  // rows whose sums are held in registers

inline void multiply(const float* a, int64_t of_a, const float* b, int64_t of_column, int64_t of_step, int64_t steps, float* out, int64_t apart) {
    for (int64_t row = 0; row < ROWS; row += HELD) {
        const float* left = a + row / 16 * of_a + row % 16 * W;
        __m512 sums[HELD][2] = {};
        for (int64_t step = 0; step < steps; step++)
            for (int64_t pair = 0; pair < W; pair++) {
                const float* right = b + step * of_step + pair * W;
                const __m512bh first = (__m512bh)load(right), second = (__m512bh)load(right + of_column);
#pragma GCC unroll 8
                for (int r = 0; r < HELD; r++) {
                    const __m512bh both = (__m512bh)_mm512_set1_ps(left[step * WORDS + r * W + pair]);
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, first);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, second);
                }
            }
        for (int r = 0; r < HELD; r++)
            for (int half = 0; half < 2; half++) store(out + (row + r) * apart + half * W, (V)sums[r][half]);
    }
}
#endif

// 2^t for t <= 0 to 3e-06, less than a weight is rounded by: the best polynomial of degree 4 on [-1/2, 1/2]; 0 where it would be subnormal, which
// takes a hundred times as long. NaN stays one.
inline V weight_of(V t) {
    const __m512 least = _mm512_set1_ps(-126.0f), within = _mm512_max_ps(least, (__m512)t), whole = _mm512_roundscale_ps(within, 0);
    const V f = (V)within - (V)whole;
    V p = f * 0.00957010144f + 0.0559178603f;
    p = p * f + 0.240247448f;
    p = p * f + 0.693121815f;
    p = p * f + 0.999999261f;
    return (V)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)t, least, _CMP_NLT_UQ), (__m512)p, whole);
}

// Scores of a row that it sees; minus infinity where it does not, and beyond `seen`. Not in base 2: the least number that there is, added where a
// key is hidden, must stay one, so that a row of which all keys are hidden so sees all alike.
inline V score(const float* scores, int64_t key, int64_t seen, float scale, const void* mask, bool added) {
    const int64_t here = seen - key;
    V v = load(scores + key) * scale;
    if (mask && added) v = v + some_of(static_cast<const float*>(mask) + key, here);
    if (mask && !added) {
        const __mmask16 there = here < W ? (__mmask16)((1u << here) - 1) : (__mmask16)-1;
        const __m128i bytes = _mm_maskz_loadu_epi8(there, static_cast<const uint8_t*>(mask) + key);
        const __mmask16 shown = _mm_test_epi8_mask(bytes, bytes);
        v = (V)_mm512_mask_blend_ps(shown, _mm512_set1_ps(-INFINITY), (__m512)v);
    }
    if (here < W) v = (V)_mm512_mask_blend_ps((__mmask16)((1u << here) - 1), _mm512_set1_ps(-INFINITY), (__m512)v);
    return v;
}

}  // namespace
