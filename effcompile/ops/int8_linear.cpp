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
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <immintrin.h>

namespace {

constexpr int LANES = 16;  // outputs that are interleaved
constexpr int PER_LANES = LANES / W;
constexpr int PANEL = VECS * W;  // outputs of a tile
constexpr float LEAST = 1e-30f;  // rows without a larger value are 0: the inverse of their scale would overflow

typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef int8_t VB __attribute__((vector_size(W)));
typedef int32_t VILoose __attribute__((vector_size(W * 4), aligned(1), may_alias));

inline VI load_ints(const void* p) { return *reinterpret_cast<const VILoose*>(p); }
inline V as_floats(VI v) { return __builtin_convertvector(v, V); }
inline V where(VI mask, V a, V b) { return (V)((mask & (VI)a) | (~mask & (VI)b)); }

// Each lane: sum += four products of unsigned with signed bytes. Exact: no step saturates.
#if defined(__AVX512VNNI__)
inline VI dot(VI sum, VI weights, VI codes) { return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)codes); }
#elif defined(__AVXVNNI__)
inline VI dot(VI sum, VI weights, VI codes) { return (VI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)codes); }
#elif WIDTH == 16
// VPMADDUBSW saturates at 16 bits: |code| (at most 127) times the signed weight with the code's sign does not reach that.
inline VI dot(VI sum, VI weights, VI codes) {
    const __m512i signs = (__m512i)codes, w = _mm512_xor_si512((__m512i)weights, _mm512_set1_epi8((char)0x80));
    const __m512i turned = _mm512_mask_sub_epi8(w, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), w);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(signs), turned);
    return sum + (VI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#define SIGNED
#else
inline VI dot(VI sum, VI weights, VI codes) {
    const __m256i signs = (__m256i)codes, w = _mm256_xor_si256((__m256i)weights, _mm256_set1_epi8((char)0x80));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8(w, signs));
    return sum + (VI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#define SIGNED
#endif

inline VI repeated(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return word - VI{};
}

// To the nearest whole number, ties to even.
#if WIDTH == 16
inline VI rounded(V v) { return (VI)_mm512_cvtps_epi32((__m512)v); }
#else
inline VI rounded(V v) { return (VI)_mm256_cvtps_epi32((__m256)v); }
#endif

// ------------------------------------------------------------------ rows of x as codes

inline VI words_of(const float* x, int64_t count) {  // `count` of them, then zeros
    VI words = {};
    std::memcpy(&words, x, std::min<int64_t>(count, W) * 4);
    return words;
}

inline int32_t largest_of(VI v) {
    int32_t most = v[0];
    for (int lane = 1; lane < W; lane++) most = std::max(most, v[lane]);
    return most;
}

// One row: its codes, padded by zeros to a multiple of four; its scale, and 128 times the sum of the codes. A row with an infinity or NaN
// has the scale NaN, so that its results are NaN.
void quantize_row(const float* x, int64_t k, int8_t* codes, float* scale, int32_t* offset) {
    VI bits = {};
    for (int64_t i = 0; i < k; i += W) {
        const VI here = (k - i < W ? words_of(x + i, k - i) : load_ints(x + i)) & 0x7fffffff;
        bits = here > bits ? here : bits;
    }
    const int32_t most = largest_of(bits);  // magnitudes are ordered as their bits are, infinity and NaN above all
    float largest;
    std::memcpy(&largest, &most, 4);
    const bool finite = most < 0x7f800000, some = finite && largest > LEAST;
    const float inverse = some ? 127.0f / largest : 0.0f;
    *scale = !finite ? NAN : some ? largest / 127.0f : 0.0f;
    VI sums = {};
    for (int64_t i = 0; i < k; i += W) {
        VI whole = rounded((V)(k - i < W ? words_of(x + i, k - i) : load_ints(x + i)) * inverse);
        whole = finite ? whole : VI{};
        sums += whole;
        const VB bytes = __builtin_convertvector(whole, VB);
        std::memcpy(codes + i, &bytes, std::min<int64_t>(W, (k + 3) / 4 * 4 - i));
    }
    int32_t sum = 0;
    for (int lane = 0; lane < W; lane++) sum += sums[lane];
    *offset = sum * 128;
}

// ------------------------------------------------------------------ what may follow a product

enum After { NOTHING, GELU, GELU_TANH, SILU };

// 2^t for t <= 0, to a unit in the last place or two: Taylor's series of the fraction in [-1/2, 1/2], the whole part into the exponent.
// No less than 2^-100: what it is multiplied with afterwards then makes no subnormal numbers, which take a hundred times as long.
inline V power_of_two(V t) {
    t = where(t < -100.0f, V{} - 100.0f, t);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    const V shifted = t + magic, f = (t - (shifted - magic)) * 0.6931471805599453f;
    V p = V{} + 1.0f / 5040;
    p = p * f + 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    return (V)((VI)p + ((VI)shifted << 23));
}

// 1 / (1 + e^-z), by an exponential that cannot overflow.
inline V sigmoid(V z) {
    const V e = power_of_two(where(z < 0.0f, z, V{} - z) * 1.4426950408889634f);
    return where(z < 0.0f, e, V{} + 1.0f) / (e + 1.0f);
}

// x * Phi(x), by the complementary error function of Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
inline V gelu(V x) {
    const V z = where(x < 0.0f, V{} - x, x) * 0.7071067811865476f, t = 1.0f / (z * 0.3275911f + 1.0f);
    V p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const V tail = p * t * power_of_two(z * z * -1.4426950408889634f) * 0.5f;  // Phi(-|x|)
    return x * where(x < 0.0f, tail, 1.0f - tail);
}

inline V followed(V x, int after) {
    if (after == GELU) return gelu(x);
    if (after == GELU_TANH) return x * sigmoid((x * x * 0.044715f + 1.0f) * x * 1.5957691216057308f);
    if (after == SILU) return x * sigmoid(x);
    return x;
}

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
        for (int64_t i = 0; i < m; i++) quantize_row(x + i * ldx, k, codes + i * 4 * quads, row_scales + i, offsets + i);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t c = task / panels, p = task % panels;
            linear.panel<VECS>(std::min<int64_t>(VECS, vectors - p * VECS), c * chunk, std::min(m, (c + 1) * chunk), p * PANEL);
        }
    }
}
