// Two linears in 8 bits with what lies between and behind them, some rows at a time, so that nothing between leaves a core's L2 cache:
// y = norm(residual + W2 f(W1 x + b1) + b2). Without W1 one linear; without a residual or norm the rest.
//
// Codes of x and of f(...) have one scale per row, as in int8_linear.cpp; f(...) is rounded to bf16 before.

#define KIND 0
#include "norm_row.h"
#include "tiled_linear.h"

#include <omp.h>

namespace {

// What one thread holds of `rows` rows: codes of x, then of what is between; their scales and 128 times their sums; the largest bits of each
// lane of a row between, and what is between, [columns / 32][rows][32] of bf16.
struct Room {
    int8_t* codes;
    float* scales;
    int32_t* offsets;
    VI* largest;
    uint16_t* between;

    Room(uint8_t* at, int64_t rows, int64_t deepest, int64_t columns) {
        largest = reinterpret_cast<VI*>(at);
        between = reinterpret_cast<uint16_t*>(largest + rows);
        codes = reinterpret_cast<int8_t*>(between + rows * up(columns, PAIR));
        scales = reinterpret_cast<float*>(codes + rows * deepest);
        offsets = reinterpret_cast<int32_t*>(scales + rows);
    }
    static int64_t bytes(int64_t rows, int64_t deepest, int64_t columns) { return up(rows * (64 + 2 * up(columns, PAIR) + deepest + 8), 64); }
};

inline __m512i narrowed(V z0, V z1) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)z1, (__m512)z0); }

// What is between: rounded, and the largest magnitude of each row.
struct Between {
    Scaled sums;
    int after;
    const Room& room;
    int64_t rows;

    void ask_for(int64_t, int64_t, int64_t) const {}
    inline void write(const Block& block, int64_t first, int64_t end) const {
        uint16_t* to = room.between + block.from / PAIR * rows * PAIR;
        sums.followed_by(after, block, first, end, [&](int64_t row, V z0, V z1) __attribute__((always_inline)) {
            const VI b0 = (VI)z0 & 0x7fffffff, b1 = (VI)z1 & 0x7fffffff, most = b0 > b1 ? b0 : b1, old = room.largest[row];
            room.largest[row] = most > old ? most : old;
            _mm512_store_si512(to + row * PAIR, narrowed(z0, z1));
        });
    }

    // The codes of all rows: as `quantize` makes them of the rounded numbers.
    void code(int64_t columns, int64_t stride) const {
        alignas(64) float inverses[CHUNK];
        VI sums_of[CHUNK];
        for (int64_t row = 0; row < rows; row++) {
            // rounding is monotonic: the largest is the largest rounded
            const V widest = (V)VI{largest_lane(room.largest[row])};
            const int32_t bits = (int32_t)(uint16_t)_mm_cvtsi128_si32((__m128i)_mm512_castsi512_si128(narrowed(widest, widest))) << 16;
            inverses[row] = scale_of(bits, room.scales + row);
            sums_of[row] = VI{};
        }
        for (int64_t from = 0; from < stride; from += PAIR) {
            const uint16_t* line = room.between + from / PAIR * rows * PAIR;
            const bool there = from < columns;
            for (int64_t row = 0; row < rows; row++, line += PAIR) {
                int8_t* to = tiled_row(room.codes, row, stride) + from / STEP * tiled_height(row, rows) * STEP + from % STEP;
                __m256i codes = _mm256_setzero_si256();
                if (there && inverses[row] != 0.0f) {
                    const __m512i pair = _mm512_load_si512(line);
                    const V low = (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pair)), 16);
                    const V high = (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pair, 1)), 16);
                    const VI c0 = rounded(low * inverses[row]), c1 = rounded(high * inverses[row]);
                    sums_of[row] += c0 + c1;
                    codes = _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)c1), _mm512_cvtepi32_epi8((__m512i)c0));
                }
                _mm256_storeu_si256((__m256i*)to, codes);
            }
        }
        for (int64_t row = 0; row < rows; row++) room.offsets[row] = sum_of_lanes(sums_of[row]) * 128;
    }
};

}  // namespace

extern "C" int64_t permitted() { return tiles_permitted(); }

// Bytes of `room` for each thread.
extern "C" int64_t room_bytes(int64_t rows, int64_t k, int64_t between) { return Room::bytes(rows, std::max(up(k, STEP), up(between, STEP)), between); }

// x (M, K), rows ldx apart -> y (M, N), both fp32; `residual` (M, N) may be null. Rows are taken `rows` at a time, at most CHUNK.
extern "C" void int8_mlp(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* w1, const float* s1, const float* b1, int64_t between,
                         int64_t after, const uint8_t* w2, const float* s2, const float* b2, int64_t n, const float* residual,
                         int64_t norm, const float* norm_weight, const float* norm_bias, double eps, float* y, uint8_t* room, int64_t rows,
                         int64_t threads) {
    const int64_t depth = w1 ? between : k, deepest = std::max(up(k, STEP), up(between, STEP)), each = Room::bytes(rows, deepest, between);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        TileThread thread;
#pragma omp for schedule(static)
        for (int64_t top = 0; top < m; top += rows) {
            const int64_t here = std::min(rows, m - top);
            const Room own(room + omp_get_thread_num() * each, here, deepest, between);
            const int64_t stride = up(k, STEP);
            const Results<float> results{{n, s2, b2, own.scales, own.offsets}, NOTHING, y + top * n, n};
            const TiledLinear<Results<float>> second{here, n, (depth + 3) / 4, w2, own.codes, up(depth, STEP), results};
            const Between inner{{between, s1, b1, own.scales, own.offsets}, after == GELU ? GELU_SHORT : (int)after, own, here};
            const TiledLinear<Between> first{here, between, (k + 3) / 4, w1, own.codes, stride, inner};
            for (int64_t i = 0; i < here; i++)
                own.offsets[i] = quantize<STEP>(x + (top + i) * ldx, k, stride, tiled_row(own.codes, i, stride), own.scales + i, tiled_height(i, here) * STEP);
            if (w1) {
                for (int64_t i = 0; i < here; i++) own.largest[i] = VI{};
                first.all(thread, 0, here);
                inner.code(between, up(between, STEP));
            }
            second.all(thread, 0, here);
            for (int64_t i = top; i < top + here && (residual || norm); i++) {
                const float* from = residual ? residual + i * n : nullptr;
                if (norm) layer_norm_row(y + i * n, from, norm_weight, norm_bias, (float)eps, n, y + i * n);
                else
                    for (int64_t c = 0; c < n; c += W) put(y + i * n + c, some_of(y + i * n + c, n - c) + some_of(from + c, n - c), n - c);
            }
        }
    }
}
