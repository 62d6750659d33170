// Linears with weights of 4 or 8 bits in groups on a CPU with AMX, for many rows: what `group_linear.cpp` computes, to the bit.
//
// Compiled by machine/native.py with WIDTH = 16. The weight is as told there. A panel's codes are made signed bytes once for some hundred
// rows; then one TDPBSSD multiplies 16 rows with 16 outputs over a group of 32 columns, exactly, and the sums are scaled and added up in
// registers. That takes longer than the product: while the tiles of one group are multiplied, the sums of the one before are scaled.

#define KIND 0
#include "integers.h"
#include "tiles_of_bytes.h"

#include <omp.h>

namespace {

constexpr int LANES = 16;  // outputs of a panel, rows of a tile
constexpr int GROUP = 32;
constexpr int SCALES = 2 * LANES;          // bytes of a block's scales
constexpr int64_t BLOCK = LANES * GROUP;   // bytes of a block's codes, of 8 bits
constexpr int64_t CODES = 5 << 18;         // bytes of codes of x that stay in a core's L2 cache beside a panel

constexpr int64_t block_bytes(int64_t bits) { return SCALES + 64 * bits; }

// The registers of a thread: 0 and 1 sums, 2 and 3 rows of x, 4 and 5 blocks of W; until `~Registers`.
struct Registers {
    int64_t height = 0;

    void of(int64_t rows) {
        if (rows == height) return;
        height = rows;
        alignas(64) uint8_t config[64] = {1};
        for (int t = 0; t < 6; t++) config[16 + 2 * t] = t == 2 || t == 3 ? GROUP : 64, config[48 + t] = (uint8_t)(t < 4 ? rows : GROUP / 4);
        configure(config);
    }
    ~Registers() { _tile_release(); }
};

// A block's codes as signed bytes, and its scales as fp32.
template <int BITS>
inline void unpack(const uint8_t* block, int8_t* codes, float* scales) {
    store(scales, (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)block)), 16));
    const __m512i raised = _mm512_set1_epi8(BITS == 4 ? 8 : (char)128), mask = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int j = 0; j < BITS; j++) {
        const __m512i held = _mm512_loadu_si512(block + SCALES + 64 * j);
        const __m512i low = BITS == 4 ? _mm512_and_si512(held, mask) : held;
        _mm512_storeu_si512(codes + 64 * j, _mm512_sub_epi8(low, raised));
        if (BITS == 4) _mm512_storeu_si512(codes + 64 * (4 + j), _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(held, 4), mask), raised));
    }
}

struct Panel {  // of W
    const int8_t* codes;  // (groups, BLOCK)
    const float* scales;  // (groups, LANES)
    int64_t from;         // the first of its outputs
    const uint8_t* next;  // what is read after it
};

struct Linear {
    int64_t m, n, groups, bits;
    const uint8_t* weight;  // [N / LANES][groups][block_bytes]
    const float* bias;      // (N) or null
    int after;
    int8_t* codes;    // of x, in blocks of up to 16 rows: [groups][rows of the block][GROUP]
    float* x_scales;  // as these: [groups][rows of the block]
    float* y;

    int64_t height(int64_t row) const { return std::min<int64_t>(LANES, m - row / LANES * LANES); }
    int64_t place(int64_t row, int64_t g) const { return row / LANES * LANES * groups + g * height(row) + row % LANES; }

    template <int BITS>
    Panel panel(int64_t p, int64_t ahead, int8_t* room) const {
        float* scales = reinterpret_cast<float*>(room + groups * BLOCK);
        const uint8_t* block = weight + p * groups * block_bytes(BITS);
        for (int64_t g = 0; g < groups; g++, block += block_bytes(BITS)) unpack<BITS>(block, room + g * BLOCK, scales + g * LANES);
        return {room, scales, p * LANES, weight + (p + ahead) * groups * block_bytes(BITS)};
    }

    // R rows from row i, all of a block of rows, times a panel.
    template <int R>
    void tile(int64_t i, const Panel& w, bool ahead) const {
        const int8_t* a = codes + i * groups * GROUP;
        const float* xs = x_scales + i * groups;
        alignas(64) int32_t sums[2][LANES * LANES];
        V acc[R] = {};
        before_tiles();
        // Of even groups and of odd ones; the numbers of registers are words to the compiler.
        const auto multiply = [&](int64_t g, auto odd) __attribute__((always_inline)) {
            const int8_t *rows = a + g * R * GROUP, *block = w.codes + g * BLOCK;
            if constexpr (odd) {
                _tile_zero(1);
                _tile_loadd(3, rows, GROUP);
                _tile_loadd(5, block, 64);
                _tile_dpbssd(1, 3, 5);
            } else {
                _tile_zero(0);
                _tile_loadd(2, rows, GROUP);
                _tile_loadd(4, block, 64);
                _tile_dpbssd(0, 2, 4);
            }
        };
        const auto finish = [&](int64_t g, auto odd) __attribute__((always_inline)) {
            if constexpr (odd) _tile_stored(1, sums[1], 64);
            else _tile_stored(0, sums[0], 64);
            const V scales = load(w.scales + g * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) acc[r] = acc[r] + as_floats(load_ints(sums[odd] + r * LANES)) * (scales * xs[g * R + r]);
        };
        const std::false_type even;
        const std::true_type odd;
        multiply(0, even);
        int64_t g = 0;
        for (; g + 2 < groups; g += 2) {
            if (ahead)
                for (int64_t at = 0; at < 2 * block_bytes(bits); at += 64) __builtin_prefetch(w.next + g * block_bytes(bits) + at, 0, 2);
            multiply(g + 1, odd);
            finish(g, even);
            multiply(g + 2, even);
            finish(g + 1, odd);
        }
        if (g + 1 < groups) multiply(g + 1, odd);
        finish(g, even);
        if (g + 1 < groups) finish(g + 1, odd);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) write(i + r, w.from, acc[r]);
    }

    __attribute__((noinline)) void write(int64_t row, int64_t from, V z) const {
        const int64_t here = std::min<int64_t>(W, n - from);
        if (bias) z = z + (here < W ? (V)words_of(bias + from, here) : load(bias + from));
        if (after) z = followed(z, after);
        put(y + row * n + from, z, here);
    }

    template <int R>
    void rows(int64_t count, int64_t i, const Panel& w, bool ahead) const {
        if constexpr (R > 1)
            if (count < R) return rows<R - 1>(count, i, w, ahead);
        tile<R>(i, w, ahead);
    }
};

}  // namespace

extern "C" int64_t permitted() { return tiles_permitted(); }

// x (M, K), fp32, rows ldx apart -> y (M, N); weights of `bits` bits. `codes` (M, groups, 32) and `x_scales` (M, groups) are workspace, and
// `room`, for each thread `groups` times 576 bytes.
extern "C" void group_tiles(const float* x, int64_t ldx, int64_t m, int64_t k, int64_t bits, const uint8_t* weight, const float* bias,
                            int64_t n, int64_t after, float* y, int8_t* codes, float* x_scales, int8_t* room, int64_t threads) {
    const int64_t groups = (k + GROUP - 1) / GROUP, panels = (n + LANES - 1) / LANES;
    const int64_t chunk = std::max<int64_t>(LANES, CODES / (groups * GROUP) / LANES * LANES), chunks = (m + chunk - 1) / chunk;
    const Linear linear{m, n, groups, bits, weight, bias, (int)after, codes, x_scales, y};
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        int8_t* own = room + omp_get_thread_num() * groups * (BLOCK + 4 * LANES);
        Registers registers;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++)
            for (int64_t g = 0; g < groups; g++) {
                const int64_t at = linear.place(i, g);
                quantize(x + i * ldx + g * GROUP, std::min<int64_t>(GROUP, k - g * GROUP), GROUP, codes + at * GROUP, x_scales + at);
            }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t top = task / panels * chunk, bottom = std::min(m, top + chunk), p = task % panels;
            const Panel panel = bits == 4 ? linear.panel<4>(p, threads, own) : linear.panel<8>(p, threads, own);
            for (int64_t i = top; i < bottom; i += LANES) {
                registers.of(linear.height(i));
                linear.rows<LANES>(linear.height(i), i, panel, i == top && p + threads < panels);
            }
        }
    }
}
