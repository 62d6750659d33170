// Linears with weights of 4 or 8 bits in groups on a CPU: y = f(dequantised(codes(x) W^T) + bias), x quantised in the same groups inside.
//
// Compiled once per instruction set by machine/native.py, which passes as macros:
//   WIDTH  32-bit words of a vector register
//   ROWS, VECS  the register tile: ROWS rows of x times VECS vectors of outputs; one row takes all outputs of a panel
//   FAR  1: memory is asked for from further ahead and fewer places
//
// A group is 32 columns of one row, with one scale, of W and of x alike (as llama.cpp's Q4_0, Q8_0 are). Codes of W are kept unsigned: + 8 of
// 4 bits, + 128 of 8. A panel is 16 outputs; its block of a group lies together, so that a product of one row reads memory once, in order:
//   16 scales (bf16), then pieces of 64 bytes, [16 outputs][4 columns]: of 8 bits piece j holds the columns 4j to 4j + 3, of 4 bits its low
//   halves do and its high halves hold the columns 16 + 4j to 16 + 4j + 3.
// Sums of a group are exact in whole numbers: 16 bits hold eight VPMADDUBSW of 4-bit codes (8 * 2 * 15 * 127 = 30480), 32 bits all else.

#define KIND 0
#include "row_pairs.h"

#ifndef FAR
#define FAR 0
#endif

namespace {

constexpr int LANES = 16;  // outputs of a panel
constexpr int PER_LANES = LANES / W;
constexpr int GROUP = 32;
constexpr int SCALES = 2 * LANES;  // bytes of a block's scales

constexpr int64_t block_bytes(int bits) { return SCALES + 64 * bits; }

inline V scales_at(const uint8_t* block) {
#if WIDTH == 16
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)block)), 16);
#elif defined(__aarch64__)
    return (V)vshlq_n_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(block))), 16);
#else
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)block)), 16);
#endif
}

// The products of 4-bit codes. Without VNNI lanes of 16 bits are summed until the group is done.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
inline VI dot4(VI sum, VI weights, VI codes) { return dot(sum, weights, codes); }
inline VI whole4(VI sum) { return sum; }
#elif defined(__aarch64__)
inline VI dot4(VI sum, VI weights, Four codes) { return dot_signed(sum, weights, codes); }
inline VI whole4(VI sum) { return sum; }
#elif WIDTH == 16
inline VI dot4(VI sum, VI weights, VI codes) {
    return (VI)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)weights, (__m512i)codes));
}
inline VI whole4(VI sum) { return (VI)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)); }
#else
inline VI dot4(VI sum, VI weights, VI codes) {
    return (VI)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)codes));
}
inline VI whole4(VI sum) { return (VI)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#endif

// ------------------------------------------------------------------ the product

template <int BITS>
struct Linear {
    static constexpr int PIECES = BITS;  // of a block
    // One row reads the weight once, from several places at once, which memory answers faster (Zen 3, bytes a second by those of a plain
    // read: 4 bits 0.88 from one place, 1.06 from two; 8 bits 1.00 and from four 1.06; four of 4 bits are too many for 16 registers).
    // Zen 4, 8 bits, GB/s: from one 21, two 25, four 21. A Xeon with AMX, 4 bits, least ms of a step on two threads: from one 13.7, two 11.1,
    // four 9.8; in another run three 10.3, four 9.9, six 10.9, eight 10.2.
    static constexpr int STREAMS = FAR || (BITS == 4 && W < 16) ? 2 : 4;
    // Bytes that are asked for before they are read: a page's end stops the processor's own prefetching. (Zen 4, 4 bits, GB/s: 576 bytes
    // 26, 1152 29, 2304 32, 3072 32; 8 bits 1152 24, 2304 22. A Xeon with AMX, 4 bits from four places, least ms of a step: 576 bytes 10.3,
    // 1152 9.8, 2304 9.9, 4608 10.2.)
    static constexpr int AHEAD = BITS == 4 && FAR ? 2304 : BITS == 4 && W < 16 ? 576 : 1152;

    int64_t m, n, groups;
    const uint8_t* weight;  // [N / LANES][groups][block_bytes]
    const float* bias;      // (N) or null
    int after;
    const int8_t* codes;     // (M, groups, GROUP)
    const float* x_scales;   // (M, groups)
    const int32_t* offsets;  // (M, groups): what the codes of W are raised by, times the sum of the group's codes
    float* y;

    // The products of one piece: R rows of x at `a`, `apart` bytes apart, times NV vectors of outputs.
    template <int R, int NV>
    static inline void piece(VI (&acc)[R][NV], const uint8_t* w, const int8_t* a, int64_t apart) {
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            const VI held = load_ints(w + v * W * 4);
            const VI mask = VI{} + 0x0f0f0f0f, low = BITS == 4 ? held & mask : held, high = (VI)((VU)held >> 4) & mask;
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const int8_t* codes = a + r * apart;
                if constexpr (BITS == 4)
                    acc[r][v] = dot4(dot4(acc[r][v], low, repeated(codes)), high, repeated(codes + 16));
                else
                    acc[r][v] = dot(acc[r][v], low, repeated(codes));
            }
        }
    }

    // The same of a whole group, two rows at once.
    template <int R, int NV>
    static inline void paired(VI (&acc)[held_rows(R)][NV], const uint8_t* w, const int8_t* a, int64_t apart) {
#ifdef __ARM_FEATURE_MATMUL_INT8
        for (int j = 0; j < PIECES; j += 2, w += 2 * 64, a += 8) {
            const auto held = [&](int second, int v) { return load_ints(w + second * 64 + v * W * 4); };
            const auto rows = [&](int r, int s) { return two_rows(a + r * apart, a + s * apart); };
            if constexpr (BITS == 8) {
                add_pairs<R, NV>(acc, [&](int second, int v) { return lowered(held(second, v)); }, rows);
            } else {
                const auto high = [&](int r, int s) { return two_rows(a + 16 + r * apart, a + 16 + s * apart); };
                add_pairs<R, NV>(acc, [&](int second, int v) { return held(second, v) & 0x0f0f0f0f; }, rows);
                add_pairs<R, NV>(acc, [&](int second, int v) { return (VI)((VU)held(second, v) >> 4) & 0x0f0f0f0f; }, high);
            }
        }
        part_pairs(acc);
#endif
    }

    // The sums of one group's products. One row's pieces are unrolled, for there instructions limit; more rows' are not, lest GCC adds up in
    // another order and runs out of registers.
    template <int R, int NV>
    static inline void group(VI (&acc)[held_rows(R)][NV], const uint8_t* w, const int8_t* a, int64_t apart) {
        if constexpr (PAIRED && R > 1) {
            paired<R, NV>(acc, w, a, apart);
        } else if constexpr (R == 1) {
#pragma GCC unroll 8
            for (int j = 0; j < PIECES; j++) {
                __builtin_prefetch(w + j * 64 + AHEAD, 0, 3);
                piece<R, NV>(acc, w + j * 64, a + 4 * j, apart);
            }
        } else {
#pragma GCC unroll 1
            for (int j = 0; j < PIECES; j++) piece<R, NV>(acc, w + j * 64, a + 4 * j, apart);
        }
    }

    static inline VI finished(VI acc, int32_t offset) {
        if constexpr (BITS == 4) return whole4(acc) - offset;
#ifdef SIGNED
        return acc;
#else
        return acc - offset;
#endif
    }

    // R rows from row i times the outputs [from, from + NV * W), which are of one panel.
    template <int R, int NV>
    void tile(int64_t i, int64_t from) const {
        V sums[R][NV] = {};
        const int64_t at = from % LANES;
        const uint8_t* block = weight + from / LANES * groups * block_bytes(BITS);
        const int8_t* a = codes + i * groups * GROUP;
        for (int64_t g = 0; g < groups; g++, block += block_bytes(BITS)) {
            VI acc[held_rows(R)][NV] = {};
            group<R, NV>(acc, block + SCALES + 4 * at, a + g * GROUP, groups * GROUP);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                const V scales = scales_at(block + 2 * (at + v * W));
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const int64_t of = (i + r) * groups + g;
                    sums[r][v] = sums[r][v] + as_floats(finished(acc[r][v], offsets[of])) * (scales * x_scales[of]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) write(i + r, from + v * W, sums[r][v]);
    }

    // Row i times the outputs of STREAMS panels, `apart` panels from each other.
    void streams(int64_t i, int64_t p, int64_t apart) const {
        V sums[STREAMS][PER_LANES] = {};
        const int64_t bytes = groups * block_bytes(BITS);
        const uint8_t* first = weight + p * bytes;
        for (int64_t g = 0; g < groups; g++, first += block_bytes(BITS)) {
            const int64_t of = i * groups + g;
#pragma GCC unroll 1
            for (int s = 0; s < STREAMS; s++) {
                const uint8_t* block = first + s * apart * bytes;
                VI acc[1][PER_LANES] = {};
                group<1, PER_LANES>(acc, block + SCALES, codes + of * GROUP, 0);
#pragma GCC unroll 4
                for (int v = 0; v < PER_LANES; v++)
                    sums[s][v] = sums[s][v] + as_floats(finished(acc[0][v], offsets[of])) * (scales_at(block + 2 * v * W) * x_scales[of]);
            }
        }
        for (int s = 0; s < STREAMS; s++)
            for (int v = 0; v < PER_LANES; v++) write(i, (p + s * apart) * LANES + v * W, sums[s][v]);
    }

    // Of one row: panels by STREAMS, and the rest one by one; all of them where threads are more than such tasks.
    int64_t apart(int64_t panels, int64_t threads) const { return panels / STREAMS < threads ? 0 : panels / STREAMS; }
    int64_t tasks_of_a_row(int64_t panels, int64_t threads) const { return panels - (STREAMS - 1) * apart(panels, threads); }
    void task_of_a_row(int64_t task, int64_t panels, int64_t threads) const {
        const int64_t between = apart(panels, threads);
        task < between ? streams(0, task, between) : tile<1, PER_LANES>(0, (task + (STREAMS - 1) * between) * LANES);
    }

    __attribute__((noinline)) void write(int64_t row, int64_t from, V z) const {
        const int64_t here = std::min<int64_t>(W, n - from);
        if (here <= 0) return;
        if (bias) z = z + (here < W ? (V)words_of(bias + from, here) : load(bias + from));
        if (after) z = followed(z, after);
        put(y + row * n + from, z, here);
    }

    template <int R>
    void rows(int64_t count, int64_t i, int64_t from) const {
        if constexpr (R > 1)
            if (count < R) return rows<R - 1>(count, i, from);
        tile<R, VECS>(i, from);
    }

    // One panel's outputs for the rows [top, bottom), in tiles of even height.
    void panel(int64_t p, int64_t top, int64_t bottom) const {
        if (bottom - top == 1) return tile<1, PER_LANES>(top, p * LANES);
        const int64_t height = bottom - top, tiles = (height + ROWS - 1) / ROWS;
        for (int64_t from = p * LANES; from < std::min(n, (p + 1) * LANES); from += VECS * W)
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t i = top + height * t / tiles, end = top + height * (t + 1) / tiles;
                rows<ROWS>(end - i, i, from);
            }
    }
};

}  // namespace

// x (M, K), fp32, rows ldx apart -> y (M, N); weights of `bits` bits. `codes` (M, groups, 32), `x_scales` and `offsets` (M, groups) are
// workspace. Rows are taken in chunks of `chunk`, so that their codes stay in a core's cache.
extern "C" void group_linear(const float* x, int64_t ldx, int64_t m, int64_t k, int64_t bits, const uint8_t* weight, const float* bias,
                             int64_t n, int64_t after, float* y, int8_t* codes, float* x_scales, int32_t* offsets, int64_t chunk,
                             int64_t threads) {
    const int64_t groups = (k + GROUP - 1) / GROUP, panels = (n + LANES - 1) / LANES, chunks = (m + chunk - 1) / chunk;
    const Linear<4> four{m, n, groups, weight, bias, (int)after, codes, x_scales, offsets, y};
    const Linear<8> eight{m, n, groups, weight, bias, (int)after, codes, x_scales, offsets, y};
    const int64_t of_a_row = bits == 4 ? four.tasks_of_a_row(panels, threads) : eight.tasks_of_a_row(panels, threads);
    const int64_t tasks = m == 1 ? of_a_row : chunks * panels;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m * groups; i++) {
            const int64_t from = i % groups * GROUP;
            const float* here = x + i / groups * ldx + from;
            const int32_t by_128 = quantize(here, std::min<int64_t>(GROUP, k - from), GROUP, codes + i * GROUP, x_scales + i);
            offsets[i] = bits == 4 ? by_128 / 16 : by_128;
        }
        // threads read on from where they are, and end at once
#pragma omp for schedule(guided)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t c = task / panels, p = task % panels, top = c * chunk, bottom = std::min(m, (c + 1) * chunk);
            if (m == 1)
                bits == 4 ? four.task_of_a_row(task, panels, threads) : eight.task_of_a_row(task, panels, threads);
            else if (bits == 4)
                four.panel(p, top, bottom);
            else
                eight.panel(p, top, bottom);
        }
    }
}
