// A linear of codes by vector registers, a panel of outputs at a time; what becomes of the sums says who asks. ROWS, VECS: the register tile, ROWS
// rows of x times VECS vectors of outputs. All of a panel is summed in registers before anything is written.

#pragma once

#include "row_pairs.h"

namespace {

#if !TILED
constexpr int LANES = 16;  // outputs that are interleaved
#endif
constexpr int PER_LANES = LANES / W;
constexpr int PANEL = VECS * W;  // outputs of a tile
static_assert(VECS % 2 == 0, "a tile that is not the last one of its rows gives vectors of outputs two by two");
constexpr int AHEAD = 512;       // bytes of W that are fetched before they are multiplied
constexpr int LINE_BYTES = 64;   // of a cache

// Addresses that the compiler makes the others of, in each turn: of all that a tile reads it would keep one each, more than there are registers.
template <typename... P>
inline void held_in_registers(P&... addresses) {
#ifdef __x86_64__
    (..., [&] { asm("" : "+r"(addresses)); }());
#endif
}

#ifdef WORDS
typedef V Sum;  // of whole numbers, each taken before it can overflow: STEPS times two products of codes
constexpr int64_t BLOCK = STEPS;
inline V as_floats(V sum) { return sum; }
#else
typedef VI Sum;
constexpr int64_t BLOCK = 0;
#endif

// Bytes of a row of codes.
inline int64_t row_bytes(int64_t quads) { return PAIRED ? (quads + 1) / 2 * 8 : 4 * quads; }

// A tile's sums as numbers: f(sum * scale of the row * scale of the output + bias), where a row was lowered with that times the sums of W added.
struct Numbers {
    int64_t n;
    const float *scales, *bias;  // (N); the bias may be null
    const float* row_scales;
    const int32_t* offsets;
    const int32_t *lower = nullptr, *sums = nullptr;  // of rows of x, and of W (N), if they are lowered

    // Those of rows from `row` and vectors of outputs from `from` on, to `put(row, from, left, z0, z1)`, two vectors of a row at a time, of which
    // `left` numbers and more are there; WHOLE if all are. Column by column, so that what is of outputs stays in registers.
    template <int AFTER, bool WHOLE, typename Put>
    inline void each(int64_t row, int rows, int64_t from, int vecs, const Sum* of_tile, const Put& put) const {
        const float* own = row_scales + row;
        const int32_t* offset = offsets + row;
        for (int v = 0; v < vecs; v += 2, from += 2 * W) {
            const int64_t left = WHOLE ? 2 * W : n - from, second = WHOLE || v + 1 < vecs ? 1 : 0;  // the first again, where there is none
            const V s0 = some_of(scales + from, left), s1 = some_of(scales + from + W, left - W);
            const V b0 = bias ? some_of(bias + from, left) : V{}, b1 = bias ? some_of(bias + from + W, left - W) : V{};
            const Sum* sum = of_tile + v;
            for (int r = 0; r < rows; r++, sum += vecs) {
                const V both = V{} + own[r];
                Sum first = sum[0], other = sum[second];
#ifndef SIGNED
                first -= offset[r], other -= offset[r];
#endif
#ifndef WORDS
                if (sums)  // read anew for each row: registers are few
                    first += some_ints(sums + from, left) * lower[row + r], other += some_ints(sums + from + W, left - W) * lower[row + r];
#endif
                V z0 = as_floats(first) * (s0 * both) + b0, z1 = as_floats(other) * (s1 * both) + b1;
                if constexpr (AFTER) z0 = followed(z0, AFTER), z1 = followed(z1, AFTER);
                put(row + r, from, left, z0, z1);
            }
        }
    }
};

// They are written in fp32 or bf16, rows ldy apart.
template <typename T>
struct Outputs {
    Numbers numbers;
    int after;
    T* y;
    int64_t ldy;

    // Lines that are written next come nearer.
    __attribute__((always_inline)) void ask(int64_t row, int rows, int64_t from, int vecs) const {
        const int64_t bytes = std::min<int64_t>(vecs * W, numbers.n - from) * sizeof(T);
        for (int r = 0; r < rows; r++)
            for (int64_t i = 0; i < bytes; i += LINE_BYTES) __builtin_prefetch((const char*)(y + (row + r) * ldy + from) + i, 1);
    }

    template <int AFTER, bool WHOLE>
    inline void write(int64_t row, int rows, int64_t from, int vecs, const Sum* sums) const {
        numbers.each<AFTER, WHOLE>(row, rows, from, vecs, sums,
                                   [to = y, ldy = ldy](int64_t row, int64_t from, int64_t left, V z0, V z1) __attribute__((always_inline)) {
            put(to + row * ldy + from, z0, left);
            if (left > W) put(to + row * ldy + from + W, z1, left - W);
        });
    }
};

// Who takes the sums of a tile: `out.write<AFTER, WHOLE>(row, rows, from, vecs, sums)`, WHOLE if all its outputs are there, two vectors by two.
template <typename Out>
using Take = void (*)(const Out&, int64_t row, int rows, int64_t from, int vecs, const Sum* sums);

template <typename Out, int AFTER, bool WHOLE>
__attribute__((noinline)) void taken(const Out& out, int64_t row, int rows, int64_t from, int vecs, const Sum* sums) {
    out.template write<AFTER, WHOLE>(row, rows, from, vecs, sums);
}

template <bool WHOLE, typename Out>
Take<Out> take_of(const Out& out) {
    return made_for(out.after, [](auto known) -> Take<Out> { return taken<Out, decltype(known)::value, WHOLE>; });
}

template <typename Out>
struct VectorLinear {
    int64_t n, quads;
    const uint8_t* weight;  // [N / LANES][quads][LANES][4]
    const int8_t* codes;    // (M, stride)
    int64_t stride;
    const Out& out;
    Take<Out> some = take_of<false>(out), full = take_of<true>(out);

    template <int NV>
    static inline void ahead_of(const uint8_t* w, int64_t apart) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) __builtin_prefetch(w + v / PER_LANES * apart + v % PER_LANES * W * 4 + AHEAD);
    }

    // R rows from row i times the outputs [from, from + V * W), while [soon, end) of W is fetched for later; without an end, what comes next.
    template <int R, int NV>
    void tile(int64_t i, int64_t from, const uint8_t* soon, const uint8_t* end) const {
        VI acc[held_rows(R)][NV] = {};
        Sum sums[R * NV];
        if constexpr (BLOCK) std::fill_n(sums, R * NV, Sum{});
        out.ask(i, R, from, NV);
        const int8_t* a = codes + i * stride;
        const int64_t apart = quads * LANES * 4;
        const uint8_t* w = weight + from / LANES * apart + (PANEL % LANES ? from % LANES * 4 : 0);
        if constexpr (PAIRED && R > 1) {
            paired<R, NV>(acc, w, apart, a);
        } else {
            constexpr int HALF = (R + 1) / 2;  // two addresses, of which the others are few multiples of the stride away
            const int8_t* half = a + HALF * stride;
            for (int64_t q = 0; q < quads;) {
                for (const int64_t end_of_block = BLOCK ? std::min(quads, q + BLOCK) : quads; q < end_of_block; q++, w += LANES * 4, a += 4, half += 4) {
                    held_in_registers(w, a, half);
                    if (soon < end) __builtin_prefetch(soon, 0, 2), soon += LINE_BYTES;
                    else if (!end) ahead_of<NV>(w, apart);
                    VI ws[NV];
#pragma GCC unroll 8
                    for (int v = 0; v < NV; v++) ws[v] = load_ints(w + v / PER_LANES * apart + v % PER_LANES * W * 4);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) {
                        const auto code = repeated(r < HALF ? a + r * stride : half + (r - HALF) * stride);
#pragma GCC unroll 8
                        for (int v = 0; v < NV; v++) acc[r][v] = dot(acc[r][v], ws[v], code);
                    }
                }
                if (BLOCK && q < quads) take<R, NV>(acc, sums);
            }
        }
        take<R, NV>(acc, sums);
        (NV % 2 == 0 && n - from >= NV * W ? full : some)(out, i, R, from, NV, sums);
    }

    // What registers hold, as sums, or added to them, after which they hold nothing.
    template <int R, int NV>
    static inline void take(VI (&acc)[held_rows(R)][NV], Sum* sums) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) {
                if constexpr (BLOCK) sums[r * NV + v] += as_floats(acc[r][v]), acc[r][v] = VI{};
                else sums[r * NV + v] = (Sum)acc[r][v];
            }
    }

    // The sums of a tile, two rows at once. Codes of x are zeros behind the last quad.
    template <int R, int NV>
    inline void paired(VI (&acc)[held_rows(R)][NV], const uint8_t* w, int64_t apart, const int8_t* a) const {
#ifdef __ARM_FEATURE_MATMUL_INT8
        const auto held = [&](int64_t q, int v) { return load_ints(w + v / PER_LANES * apart + q * LANES * 4 + v % PER_LANES * W * 4); };
        for (int64_t q = 0; q < quads; q += 2)
            add_pairs<R, NV>(acc, [&](int second, int v) { return lowered(held(std::min(q + second, quads - 1), v)); },
                             [&](int r, int s) { return two_rows(a + r * stride + q * 4, a + s * stride + q * 4); });
        part_pairs(acc);
#endif
    }

    template <int R, int NV>
    void rows(int64_t count, int64_t i, int64_t from, const uint8_t* soon, const uint8_t* end) const {
        if constexpr (R > 1)
            if (count < R) return rows<R - 1, NV>(count, i, from, soon, end);
        tile<R, NV>(i, from, soon, end);
    }

    // The outputs of panel p for the rows [top, bottom), in tiles of even height; each of them has its part of panel `next` fetched into the L2 cache.
    template <int NV>
    void panel(int64_t vecs, int64_t top, int64_t bottom, int64_t p, int64_t next) const {
        if constexpr (NV > 1)
            if (vecs < NV) return panel<NV - 1>(vecs, top, bottom, p, next);
        const int64_t height = bottom - top, tiles = (height + ROWS - 1) / ROWS;
        const int64_t bytes = PANEL * quads * 4, each = up((bytes + tiles - 1) / tiles, LINE_BYTES);
        const uint8_t *from = weight + next * bytes, *last = std::min(from + bytes, weight + up(n, LANES) * quads * 4);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t i = top + height * t / tiles, end = top + height * (t + 1) / tiles;
            const uint8_t* soon = from + t * each;
            if (tiles > 1) rows<ROWS, NV>(end - i, i, p * PANEL, soon, std::min(soon + each, last));
            else rows<ROWS, NV>(end - i, i, p * PANEL, nullptr, nullptr);
        }
    }

    // Panel p of the rows [top, bottom); `next` is the one that this thread will take then.
    void panel(int64_t p, int64_t top, int64_t bottom, int64_t next) const {
        panel<VECS>(std::min<int64_t>(VECS, (n + W - 1) / W - p * VECS), top, bottom, p, next);
    }

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
};

}  // namespace
