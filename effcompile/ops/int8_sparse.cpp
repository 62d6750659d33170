// Linears in 8 bits whose weight is mostly zeros, on a CPU: y = f(dequantised(codes(x) W^T) + bias), for the quads of W that are held.
//
// Compiled once per instruction set by machine/native.py, which passes as macros:
//   WIDTH  32-bit words of a vector register
//   ROWS   rows of x that a register tile has, times sixteen outputs
//
// A strip is sixteen outputs with one list of quads, four columns side by side each (sparse_codes.py). Codes of some rows of x lie quad by quad,
// [K / 4][rows][4], so that a quad of all rows of a tile is adjacent, and only those that the list names are read.
// x86 multiplies unsigned by signed bytes (VPDPBUSD): codes of x are kept as u8, code + 128, and 128 times the sum of an output's codes is taken
// off again; where there is no such instruction they are signed.

#define KIND 0
#include "row_pairs.h"

#include <omp.h>

namespace {

constexpr int LANES = 16;
constexpr int VECS = LANES / W;

#if defined(__aarch64__)
constexpr int RAISED = 0;
inline VI products(VI sum, VI weights, Four codes) { return dot_signed(sum, weights, codes); }
#elif defined(SIGNED)
constexpr int RAISED = 0;
inline VI products(VI sum, VI weights, VI codes) { return dot(sum, (VI)((VU)weights ^ 0x80808080u), codes); }
#else
constexpr int RAISED = 128;
inline VI products(VI sum, VI weights, VI codes) { return dot(sum, codes, weights); }
#endif

#ifdef __ARM_FEATURE_MATMUL_INT8
// A row and the next, or itself again, over two quads, of which each has its rows side by side.
inline VI two_rows(const int8_t* quad, const int8_t* next, bool another) {
    const auto held = [&](const int8_t* at) {
        int32x2_t words;
        std::memcpy(&words, at, another ? 8 : 4);
        return vcombine_s32(another ? words : vdup_lane_s32(words, 0), vdup_n_s32(0));
    };
    return zip_words((VI)held(quad), (VI)held(next), false);
}
#endif

struct Sparse {
    int64_t n;
    const int8_t* values;   // (Q, LANES, 4)
    const int32_t *quads, *starts, *sums;
    const float *scales, *bias;  // (N); the bias may be null
    int after;
    const float* row_scales;
    float* y;

    // Rows [top, top + R) of a chunk whose codes are `rows` apart, times a strip.
    template <int R>
    void tile(const int8_t* codes, int64_t rows, int64_t top, int64_t row, int64_t strip) const {
        VI acc[held_rows(R)][VECS] = {};
        const int8_t* w = values + (int64_t)starts[strip] * LANES * 4;
        int64_t q = starts[strip];
#ifdef __ARM_FEATURE_MATMUL_INT8
        if constexpr (R > 1) {
            for (; q + 1 < starts[strip + 1]; q += 2, w += 2 * LANES * 4) {
                const int8_t *a = codes + (quads[q] * rows + top) * 4, *b = codes + (quads[q + 1] * rows + top) * 4;
                add_pairs<R, VECS>(acc, [&](int second, int v) { return load_ints(w + (second * VECS + v) * W * 4); },
                                   [&](int r, int s) { return two_rows(a + r * 4, b + r * 4, s > r); });
            }
            part_pairs(acc);
        }
#endif
        for (; q < starts[strip + 1]; q++, w += LANES * 4) {
            const int8_t* a = codes + (quads[q] * rows + top) * 4;
            VI ws[VECS];
            for (int v = 0; v < VECS; v++) ws[v] = load_ints(w + v * W * 4);
#pragma GCC unroll 32
            for (int r = 0; r < R; r++) {
                const auto code = repeated(a + r * 4);
                for (int v = 0; v < VECS; v++) acc[r][v] = products(acc[r][v], ws[v], code);
            }
        }
        VI all[R * VECS];
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECS; v++) all[r * VECS + v] = acc[r][v];
        write(all, R, row + top, strip);
    }

    __attribute__((noinline)) void write(const VI* all, int rows, int64_t row, int64_t strip) const {
        for (int v = 0; v < VECS; v++) {
            const int64_t from = strip * LANES + v * W, left = n - from;
            if (left <= 0) return;
            const V scale = some_of(scales + from, left), added = bias ? some_of(bias + from, left) : V{};
            const VI raised = RAISED ? load_ints(sums + from) * RAISED : VI{};
            for (int r = 0; r < rows; r++) {
                V z = as_floats(all[r * VECS + v] - raised) * (scale * row_scales[row + r]);
                if (bias) z = z + added;
                put(y + (row + r) * n + from, after ? followed(z, after) : z, left);
            }
        }
    }

    template <int R>
    void some(int64_t count, const int8_t* codes, int64_t rows, int64_t top, int64_t row, int64_t strip) const {
        if constexpr (R > 1)
            if (count < R) return some<R - 1>(count, codes, rows, top, row, strip);
        tile<R>(codes, rows, top, row, strip);
    }
};

// Codes of some rows of x, and their scales, quad by quad: W rows are made at a time, on `lines`, and turned.
void lay(const float* x, int64_t ldx, int64_t rows, int64_t k, int8_t* lines, int8_t* laid, float* row_scales) {
    const int64_t depth = (k + 3) / 4, wide = (depth + W - 1) / W * W * 4;
    for (int64_t top = 0; top < rows; top += W) {
        const int64_t here = std::min<int64_t>(W, rows - top);
        for (int64_t r = 0; r < here; r++) quantize(x + (top + r) * ldx, k, wide, lines + r * wide, row_scales + top + r);
        for (int64_t q = 0; q < depth; q += W) {
            V words[W];
            for (int64_t r = 0; r < W; r++) words[r] = r < here ? (V)load_ints(lines + r * wide + q * 4) : V{};
            transpose_stages<1>(words);
            for (int64_t i = 0; i < std::min<int64_t>(W, depth - q); i++) {
                const VU raised = RAISED ? (VU)words[i] ^ 0x80808080u : (VU)words[i];
                put(reinterpret_cast<float*>(laid + ((q + i) * rows + top) * 4), (V)raised, here);
            }
        }
    }
}

// Whether the lists of quads ascend from 0 to all `held` of them, and stay within `depth`.
bool fit(const int32_t* quads, const int32_t* starts, int64_t strips, int64_t held, int64_t depth) {
    bool right = starts[0] == 0 && starts[strips] == held;
    for (int64_t s = 0; s < strips; s++) right = right && starts[s] <= starts[s + 1];
    for (int64_t q = 0; q < held; q++) right = right && (uint32_t)quads[q] < (uint64_t)depth;
    return right;
}

}  // namespace

// x (M, K), fp32, rows ldx apart -> y (M, N). Rows are taken in chunks of `chunk`; `codes`: for each thread K to the next multiple of 4 W, times
// W + chunk; `row_scales` (M). Few chunks are shared by strips, of which each thread takes as many.
// Returns 1, and writes nothing, where an index is wrong.
extern "C" int64_t int8_sparse(const float* x, int64_t ldx, int64_t m, int64_t k, const int8_t* values, const int32_t* quads,
                               const int32_t* starts, int64_t held, const int32_t* sums, const float* scales, const float* bias, int64_t n,
                               int64_t after, float* y, int8_t* codes, float* row_scales, int64_t chunk, int64_t threads) {
    const int64_t deep = (k + 4 * W - 1) / (4 * W) * 4 * W, strips = (n + LANES - 1) / LANES, chunks = (m + chunk - 1) / chunk;
    const int64_t parts = chunks >= threads ? 1 : threads, share = (strips + parts - 1) / parts;
    if (!fit(quads, starts, strips, held, (k + 3) / 4)) return 1;
    const Sparse sparse{n, values, quads, starts, sums, scales, bias, (int)after, row_scales, y};
#pragma omp parallel for num_threads((int)threads) if (threads > 1) schedule(dynamic)
    for (int64_t task = 0; task < chunks * parts; task++) {
        const int64_t top = task / parts * chunk, rows = std::min(chunk, m - top), first = task % parts * share;
        int8_t *lines = codes + omp_get_thread_num() * deep * (W + chunk), *laid = lines + deep * W;
        lay(x + top * ldx, ldx, rows, k, lines, laid, row_scales + top);
        const int64_t tiles = (rows + ROWS - 1) / ROWS;
        for (int64_t strip = first; strip < std::min(strips, first + share); strip++)
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t from = rows * t / tiles, end = rows * (t + 1) / tiles;
                sparse.some<ROWS>(end - from, laid, rows, from, top, strip);
            }
    }
    return 0;
}
