// Linears in bf16 by AMX tiles, and two of them with what lies between and behind: x in fp32 is rounded inside, sums and results are in fp32.
//
//     y = f(bf16(x) bf16(W)^T + b)        y = norm(residual + bf16(f(bf16(x) bf16(W1)^T + b1)) bf16(W2)^T + b2)
//
// Compiled by machine/native.py with WIDTH = 16. The interleaving of W, [N / 16][K / 2][16][2], is what TDPBF16PS reads (tiles_of_bytes.h).

#define KIND 0
#define FLOATS
#include "norm_row.h"
#include "tiled_linear.h"

#include <omp.h>

namespace {

constexpr int64_t MOST_DEPTH = 1024;

inline int64_t pairs_of(int64_t k) { return (k + 1) / 2; }
inline int64_t row_bytes(int64_t k) { return up(2 * k, STEP); }  // of a row for tiles, in whole ones
inline __m512i narrowed(V z0, V z1) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)z1, (__m512)z0); }

// Row `row` of so many, as tiles read it: 32 numbers and then those of the next rows; zeros behind the last.
void lay_row(const float* x, int64_t k, int8_t* codes, int64_t row, int64_t rows) {
    int8_t* to = tiled_row(codes, row, row_bytes(k));
    const int64_t apart = tiled_height(row, rows) * STEP;
    for (int64_t i = 0; i < k; i += PAIR, to += apart) _mm512_storeu_si512(to, narrowed(some_of(x + i, k - i), some_of(x + i + W, k - i - W)));
}

void lay(const float* x, int64_t ldx, int64_t rows, int64_t k, int8_t* codes) {
    for (int64_t i = 0; i < rows; i++) lay_row(x + i * ldx, k, codes, i, rows);
}

// What is between two linears, laid as the second one reads it: `columns` of them, of `rows` rows.
struct Between {
    Scaled sums;
    int after;
    int8_t* codes;
    int64_t rows;

    void ask(int64_t, int64_t) const {}  // its lines are near

    template <int AFTER, bool WHOLE>
    inline void write(const Block& block, int64_t first, int64_t end) const {
        const int64_t stride = row_bytes(sums.n), left = sums.n - block.from;
        sums.each<AFTER, WHOLE>(block, first, end, [&](int64_t row, V z0, V z1) __attribute__((always_inline)) {
            int8_t* to = tiled_row(codes, row, stride) + block.from / PAIR * tiled_height(row, rows) * STEP;
            if (!WHOLE && left < PAIR) {  // what follows the last column is multiplied, too
                z0 = some_of((const float*)&z0, left);
                z1 = some_of((const float*)&z1, left - W);
            }
            _mm512_storeu_si512(to, narrowed(z0, z1));
        });
    }
};

template <typename Out>
void multiply(TileThread& thread, int64_t rows, int64_t n, int64_t k, const uint8_t* weight, int64_t apart, const int8_t* codes, const Out& out) {
    TiledLinear<Out>{rows, n, pairs_of(k), weight, codes, row_bytes(k), out, apart}.all(thread, 0, rows);
}

template <typename T>
void linear_of(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* weight, const float* bias, int64_t n, int64_t after, T* y,
               int8_t* codes, int64_t threads) {
    const Results<T> results{{n, nullptr, bias, nullptr, nullptr}, (int)after, y, n};
    const TiledLinear<Results<T>> linear{m, n, pairs_of(k), weight, codes, row_bytes(k), results};
    const int64_t chunks = (m + CHUNK - 1) / CHUNK, panels = (n + PAIR - 1) / PAIR;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        TileThread thread;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) lay_row(x + i * ldx, k, codes, i, m);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t top = task / panels * CHUNK, bottom = std::min(m, top + CHUNK), from = task % panels * PAIR;
            if (n - from > LANES) linear.template panel<2>(thread, top, bottom, from, threads);
            else linear.template panel<1>(thread, top, bottom, from, threads);
        }
        linear.finish(thread);
    }
}

}  // namespace

extern "C" int64_t permitted() { return tiles_permitted(); }

// x (M, K), fp32, rows ldx apart → y (M, N), in fp32 or, by the second, in bf16; the bias may be null. `codes`: M rows of 2 K bytes to the next 64, and
// 64 bytes aligned. What is not named is that of int8_linear.cpp.
#define EACH_ARGUMENT(T) \
    const float *x, int64_t ldx, int64_t m, int64_t k, const uint8_t *weight, const float *, const float *bias, int64_t n, int64_t after, T *y, \
        int8_t *codes, float *, int32_t *, int64_t, int64_t threads

extern "C" void bf16_linear(EACH_ARGUMENT(float)) { linear_of(x, ldx, m, k, weight, bias, n, after, y, codes, threads); }
extern "C" void bf16_linear_narrow(EACH_ARGUMENT(uint16_t)) { linear_of(x, ldx, m, k, weight, bias, n, after, y, codes, threads); }

// Columns between two linears, or of x of one, that are made and multiplied at once: some 1024, in whole tiles. As many rows of them stay in
// a core's cache with their results as W is worth being read for.
extern "C" int64_t part_of(int64_t depth) {
    const int64_t parts = std::max<int64_t>(1, (depth + MOST_DEPTH - 1) / MOST_DEPTH);
    return ((depth + parts - 1) / parts + PAIR - 1) / PAIR * PAIR;
}

// Bytes of `room` for each thread; `between` is 0 of one linear.
extern "C" int64_t room_bytes(int64_t rows, int64_t k, int64_t between) {
    return rows * (between ? row_bytes(k) + row_bytes(part_of(between)) : row_bytes(part_of(k)));
}

// x (M, K), rows ldx apart -> y (M, N), both fp32; `residual` (M, N) may be null, and so may W1. Rows are taken `rows` at a time, at most CHUNK,
// and of what is between them a part: y is the sum of its products.
extern "C" void bf16_mlp(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* w1, const float*, const float* b1, int64_t between,
                         int64_t after, const uint8_t* w2, const float*, const float* b2, int64_t n, const float* residual, int64_t norm,
                         const float* norm_weight, const float* norm_bias, double eps, float* y, uint8_t* room, int64_t rows, int64_t threads) {
    const int64_t each = room_bytes(rows, k, w1 ? between : 0), depth = w1 ? between : k, part = part_of(depth);
    const int64_t column = pairs_of(k) * 4;  // bytes of an output of W1
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        TileThread thread;
        int8_t* codes = reinterpret_cast<int8_t*>(room + omp_get_thread_num() * each);
#pragma omp for schedule(static)
        for (int64_t top = 0; top < m; top += rows) {
            const int64_t here = std::min(rows, m - top);
            const float* given = x + top * ldx;
            int8_t* inner = w1 ? codes + here * row_bytes(k) : codes;
            if (w1) lay(given, ldx, here, k, codes);
            for (int64_t from = 0; from == 0 || from < depth; from += part) {
                const int64_t wide = std::min(part, depth - from);
                if (w1) {
                    const Between inside{{wide, nullptr, b1 ? b1 + from : nullptr, nullptr, nullptr}, after == GELU ? GELU_HALVES : (int)after, inner, here};
                    multiply(thread, here, wide, k, w1 + from * column, LANES * column, codes, inside);
                } else lay(given + from, ldx, here, wide, inner);
                const Results<float> last{{n, nullptr, from ? nullptr : b2, nullptr, nullptr}, NOTHING, y + top * n, n, from > 0};
                multiply(thread, here, n, wide, w2 + from / PAIR * TILE_BYTES, pairs_of(depth) * 64, inner, last);
            }
            for (int64_t i = top; i < top + here && (residual || norm); i++) {
                const float* from = residual ? residual + i * n : nullptr;
                if (norm) layer_norm_row(y + i * n, from, norm_weight, norm_bias, (float)eps, n, y + i * n);
                else
                    for (int64_t c = 0; c < n; c += W) put(y + i * n + c, some_of(y + i * n + c, n - c) + some_of(from + c, n - c), n - c);
            }
        }
    }
}
