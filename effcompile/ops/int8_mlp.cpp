// Two linears in 8 bits with what lies between and behind them, some rows at a time, so that nothing between leaves a core's L2 cache:
// y = norm(residual + W2 f(W1 x + b1) + b2). Without W1 one linear; without a residual or norm the rest.
//
// Codes of x and of f(...) have one scale per row, and may be lowered, as in int8_linear.cpp, whose macros these are; f(...), times the scales of W2's columns, is
// rounded to bf16 before.

#define KIND 0
#include "norm_row.h"
#if TILED
#include "tiled_linear.h"
#else
#include "vector_linear.h"
#endif

#include <omp.h>

namespace {

constexpr int64_t LINE = 64;  // bytes of a cache line

// What one thread holds of `rows` rows: codes of x, then of what is between; their scales, 128 times their sums, and by how much they are lowered;
// the two largest bits (`widen`) of each lane of a row between, and what is between, of bf16: for tiles [columns / 32][rows][32], else row by row.
struct Room {
    static constexpr int64_t COLUMNS = 32;  // that lie side by side

    int8_t* codes;
    float* scales;
    int32_t *offsets, *lower;
    VI* largest;
    uint16_t* between;

    Room(uint8_t* at, int64_t rows, int64_t deepest, int64_t columns) {
        largest = reinterpret_cast<VI*>(at);
        between = reinterpret_cast<uint16_t*>(largest + 2 * rows);
        codes = reinterpret_cast<int8_t*>(between + rows * up(columns, COLUMNS));
        scales = reinterpret_cast<float*>(codes + rows * deepest);
        offsets = reinterpret_cast<int32_t*>(scales + rows);
        lower = offsets + rows;
    }

    // How the rounded numbers of a row between become codes, as `quantize` makes them. Rounding is monotonic: the largest is the largest rounded.
    template <bool LOWERED>
    Codes codes_of(int64_t row) const {
        const auto rounded_bits = [&](VI bits) {
            uint16_t widest;
            put(&widest, (V)VI{largest_lane(bits)}, 1);
            return (int32_t)widest << 16;
        };
        const int32_t most = rounded_bits(largest[2 * row]);
        const Codes how = LOWERED ? Codes::between(most, rounded_bits(largest[2 * row + 1]), scales + row) : Codes::around(most, scales + row);
        lower[row] = how.lower;
        return how;
    }
    static int64_t bytes(int64_t rows, int64_t deepest, int64_t columns) { return up(rows * (2 * LINE + 2 * up(columns, COLUMNS) + deepest + 12), LINE); }
};

// Next: what one thread multiplies with (`Thread`), how a row of x becomes codes, what is made of sums (`Between`: rounded, and the largest
// magnitude of each row, then the codes of all; `last_of`: y), and the product, by tiles and by vectors.
#if TILED
inline __m512i narrowed(V z0, V z1) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)z1, (__m512)z0); }

struct Between {
    Scaled sums;
    int after;
    const Room& room;
    int64_t rows;
    Coding last;  // how W2 has it

    void ask(int64_t, int64_t) const {}  // its lines are near

    template <int AFTER, bool WHOLE>
    inline void write(const Block& block, int64_t first, int64_t end) const {
        uint16_t* to = room.between + block.from / PAIR * rows * PAIR;
        const int64_t left = WHOLE ? PAIR : sums.n - block.from;
        const float* columns = last.columns;
        const V c0 = columns ? some_of(columns + block.from, left) : V{} + 1.0f, c1 = columns ? some_of(columns + block.from + W, left - W) : V{} + 1.0f;
        sums.each<AFTER, WHOLE>(block, first, end, [&](int64_t row, V z0, V z1) __attribute__((always_inline)) {
            z0 *= c0, z1 *= c1;
            if (last.sums) widen<true>(room.largest + 2 * row, z0, z1);
            else widen<false>(room.largest + 2 * row, z0, z1);
            _mm512_store_si512(to + row * PAIR, narrowed(z0, z1));
        });
    }

    void code(int64_t columns, int64_t stride) const { last.sums ? coded<true>(columns, stride) : coded<false>(columns, stride); }

    // The codes of all rows.
    template <bool LOWERED>
    void coded(int64_t columns, int64_t stride) const {
        Codes how[CHUNK];
        VI sums_of[CHUNK];
        for (int64_t row = 0; row < rows; row++) how[row] = room.template codes_of<LOWERED>(row), sums_of[row] = VI{};
        for (int64_t from = 0; from < stride; from += PAIR) {
            const uint16_t* line = room.between + from / PAIR * rows * PAIR;
            const int64_t left = columns - from;
            for (int64_t row = 0; row < rows; row++, line += PAIR) {
                int8_t* to = tiled_row(room.codes, row, stride) + from / STEP * tiled_height(row, rows) * STEP + from % STEP;
                __m256i codes = _mm256_setzero_si256();
                if (left > 0) {
                    const __m512i pair = _mm512_load_si512(line);
                    const V low = (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pair)), 16);
                    const V high = (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pair, 1)), 16);
                    const VI c0 = how[row].template of<LOWERED>(low, left), c1 = how[row].template of<LOWERED>(high, left - W);
                    sums_of[row] += c0 + c1;
                    codes = _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)c1), _mm512_cvtepi32_epi8((__m512i)c0));
                }
                _mm256_storeu_si256((__m256i*)to, codes);
            }
        }
        for (int64_t row = 0; row < rows; row++) room.offsets[row] = sum_of_lanes(sums_of[row]) * 128;
    }
};

typedef TileThread Thread;

int64_t code_bytes(int64_t k) { return up(k, STEP); }
void code_row(const float* x, int64_t k, const Room& room, int64_t row, int64_t rows, Coding coding) {
    const int64_t stride = code_bytes(k), apart = tiled_height(row, rows) * STEP;
    room.offsets[row] = quantize<STEP>(x, k, stride, tiled_row(room.codes, row, stride), room.scales + row, apart, coding.columns,
                                         coding.sums ? room.lower + row : nullptr);
}
Between between_of(int64_t n, const float* scales, const float* bias, int after, const Room& room, int64_t rows, Coding first, Coding last) {
    return {{n, scales, bias, room.scales, room.offsets, room.lower, first.sums}, after, room, rows, last};
}
Results<float> last_of(int64_t n, const float* scales, const float* bias, const Room& room, float* y, Coding coding) {
    return {{n, scales, bias, room.scales, room.offsets, room.lower, coding.sums}, NOTHING, y, n};
}
template <typename Out>
void multiply(Thread& thread, int64_t rows, int64_t n, int64_t k, const uint8_t* weight, const Room& room, const Out& out) {
    TiledLinear<Out>{rows, n, (k + 3) / 4, weight, room.codes, code_bytes(k), out}.all(thread, 0, rows);
}
#else
// Bits of z rounded to bf16, and others behind them. Not of NaN: a row that has one has no codes.
inline VU near(V z) { return (VU)z + 0x7fff + (((VU)z >> 16) & 1); }

// What is between is kept row by row, two vectors of a row in one register: halves of the first lie in the lower ones of its words.
struct Between {
    static_assert(VECS % 2 == 0);

    Numbers numbers;
    int after;
    const Room& room;
    int64_t rows;
    Coding last;  // how W2 has it

    uint16_t* line(int64_t row) const { return room.between + row * up(numbers.n, 2 * W); }

    void ask(int64_t, int, int64_t, int) const {}  // its lines are near

    template <int AFTER, bool WHOLE>
    inline void write(int64_t row, int rows, int64_t from, int vecs, const VI* sums) const {
        numbers.each<AFTER, WHOLE>(row, rows, from, vecs, sums, [=, columns = last.columns, lowered = last.sums != nullptr, most = room.largest, lines = line(0), apart = line(1) - line(0)](
                                       int64_t row, int64_t from, int64_t left, V z0, V z1) __attribute__((always_inline)) {
            if (columns) z0 *= some_of(columns + from, left), z1 *= some_of(columns + from + W, left - W);
            if (!WHOLE && left <= W) z1 = V{};
            if (lowered) widen<true>(most + 2 * row, z0, z1);
            else widen<false>(most + 2 * row, z0, z1);
            store_ints(lines + row * apart + from, (VI)(near(z0) >> 16 | (near(z1) & 0xffff0000)));
        });
    }

    void code(int64_t columns, int64_t stride) const { last.sums ? coded<true>(columns, stride) : coded<false>(columns, stride); }

    // The codes of all rows.
    template <bool LOWERED>
    void coded(int64_t columns, int64_t stride) const {
        for (int64_t row = 0; row < rows; row++) {
            const Codes how = room.template codes_of<LOWERED>(row);
            int8_t* to = room.codes + row * stride;
            VI sums = {};
            for (int64_t i = 0; i < columns; i += 2 * W) {
                const VI pair = load_ints(line(row) + i);
                const VI c0 = how.template of<LOWERED>((V)(pair << 16), columns - i), c1 = how.template of<LOWERED>((V)(pair & (int32_t)0xffff0000), columns - i - W);
                sums += c0 + c1;
                put(to + i, as_bytes(c0), stride - i);
                if (i + W < stride) put(to + i + W, as_bytes(c1), stride - i - W);
            }
            room.offsets[row] = sum_of_lanes(sums) * 128;
        }
    }
};

struct Thread {};

int64_t code_bytes(int64_t k) { return row_bytes((k + 3) / 4); }
void code_row(const float* x, int64_t k, const Room& room, int64_t row, int64_t, Coding coding) {
    const int64_t stride = code_bytes(k);
    room.offsets[row] = quantize(x, k, stride, room.codes + row * stride, room.scales + row, 0, coding.columns,
                                 coding.sums ? room.lower + row : nullptr);
}
Between between_of(int64_t n, const float* scales, const float* bias, int after, const Room& room, int64_t rows, Coding first, Coding last) {
    return {{n, scales, bias, room.scales, room.offsets, room.lower, first.sums}, after, room, rows, last};
}
Outputs<float> last_of(int64_t n, const float* scales, const float* bias, const Room& room, float* y, Coding coding) {
    return {{n, scales, bias, room.scales, room.offsets, room.lower, coding.sums}, NOTHING, y, n};
}
template <typename Out>
void multiply(Thread&, int64_t rows, int64_t n, int64_t k, const uint8_t* weight, const Room& room, const Out& out) {
    const VectorLinear<Out> linear{n, (k + 3) / 4, weight, room.codes, code_bytes(k), out};
    for (int64_t p = 0; p < linear.panels(); p++) linear.panel(p, 0, rows, p + 1);
}
#endif

int64_t deepest_of(int64_t k, int64_t between) { return up(std::max(code_bytes(k), code_bytes(between)), LINE); }

}  // namespace

#if TILED
extern "C" int64_t permitted() { return tiles_permitted(); }
#endif

// Bytes of `room` for each thread.
extern "C" int64_t room_bytes(int64_t rows, int64_t k, int64_t between) { return Room::bytes(rows, deepest_of(k, between), between); }

// x (M, K), rows ldx apart -> y (M, N), both fp32; `residual` (M, N) may be null. Rows are taken `rows` at a time, at most CHUNK.
extern "C" void int8_mlp(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* w1, const float* s1, const float* b1, int64_t between,
                         int64_t following, const uint8_t* w2, const float* s2, const float* b2, int64_t n, const float* residual,
                         int64_t norm, const float* norm_weight, const float* norm_bias, double eps, float* y, uint8_t* room, int64_t rows,
                         int64_t threads) {
    const int64_t deepest = deepest_of(k, between), each = Room::bytes(rows, deepest, between), after = following & FUNCTIONS;
    const Coding last(w2, n, w1 ? between : k, following & LAST_LOWERS);
    const Coding first = w1 ? Coding(w1, between, k, following & FIRST_LOWERS) : last;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Thread thread;
#pragma omp for schedule(static)
        for (int64_t top = 0; top < m; top += rows) {
            const int64_t here = std::min(rows, m - top);
            const Room own(room + omp_get_thread_num() * each, here, deepest, between);
            for (int64_t i = 0; i < here; i++) code_row(x + (top + i) * ldx, k, own, i, here, first);
            if (w1) {
                const Between inner = between_of(between, s1, b1, after == GELU ? GELU_SHORT : (int)after, own, here, first, last);
                for (int64_t i = 0; i < 2 * here; i++) own.largest[i] = VI{};
                multiply(thread, here, between, k, w1, own, inner);
                inner.code(between, code_bytes(between));
            }
            multiply(thread, here, n, w1 ? between : k, w2, own, last_of(n, s2, b2, own, y + top * n, last));
            for (int64_t i = top; i < top + here && (residual || norm); i++) {
                const float* from = residual ? residual + i * n : nullptr;
                if (norm) layer_norm_row(y + i * n, from, norm_weight, norm_bias, (float)eps, n, y + i * n);
                else
                    for (int64_t c = 0; c < n; c += W) put(y + i * n + c, some_of(y + i * n + c, n - c) + some_of(from + c, n - c), n - c);
            }
        }
    }
}
