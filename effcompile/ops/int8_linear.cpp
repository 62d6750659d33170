// Linears in 8 bits on a CPU: y = f(dequantised(codes(x) W^T) + bias), activations quantised row by row inside.
//
// Compiled once per instruction set by machine/native.py, which passes as macros:
//   WIDTH  32-bit words of a vector register
//   ROWS, VECS  the register tile: ROWS rows of x times VECS vectors of outputs
//   TILED  rows of x from which on AMX tiles multiply; 0: there are none
//
// Codes of x are s8, x ~ scale * code with one scale per row, of x times a scale for each column where the weight has them, or scale * (code +
// middle) with the row's middle, if the weight says so (int8_codes.py); codes of W are kept as u8, code + 128, because x86 multiplies unsigned by
// signed bytes (VPDPBUSD); that adds 128 * sum(codes of the row of x), which is taken off again. ARM makes them signed instead. The four-byte interleaving
// [N / 16][K / 4][16][4] is what VPDPBUSD reads as one register, and also what an AMX tile of 16 rows is (Intel, Optimization Reference
// Manual, 8.2.1 and 20.5; oneDNN: BA16b4a; FBGEMM: Khudia et al. 2021, arXiv 2101.05615).
// Codes of x and a panel of W stay in the L2 cache.

#define KIND 0
#if TILED
#include "tiled_linear.h"
#endif
#include "vector_linear.h"

#if TILED
extern "C" int64_t permitted() { return tiles_permitted(); }
#endif

namespace {

template <typename T>
void linear_of(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* weight, const float* scales, const float* bias, int64_t n,
               int64_t following, T* y, int8_t* codes, float* row_scales, int32_t* offsets, int64_t chunk, int64_t threads) {
    const int64_t quads = (k + 3) / 4, after = following & FUNCTIONS;
    const Coding coding(weight, n, k, following & LAST_LOWERS);
    const float* columns = coding.columns;
    int32_t* lower = coding.sums ? offsets + m : nullptr;
#if TILED
    const bool tiled = m >= TILED && k > 32;
    const int64_t stride = tiled ? (k + STEP - 1) / STEP * STEP : row_bytes(quads);
    if (tiled) chunk = CHUNK;
#else
    const int64_t stride = row_bytes(quads);
#endif
    const Outputs<T> outputs{{n, scales, bias, row_scales, offsets, lower, coding.sums}, (int)after, y, n};
    const VectorLinear<Outputs<T>> linear{n, quads, weight, codes, stride, outputs};
    const int64_t chunks = (m + chunk - 1) / chunk, panels = linear.panels();
#if TILED
    const Results<T> results{{n, scales, bias, row_scales, offsets, lower, coding.sums}, (int)after, y, n};
    const TiledLinear<Results<T>> by_tiles{m, n, quads, weight, codes, stride, results};
#endif
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#if TILED
        TileThread thread;
#endif
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++) {
#if TILED
            if (tiled) {
                const int64_t apart = tiled_height(i, m) * STEP;
                offsets[i] = quantize<STEP>(x + i * ldx, k, stride, tiled_row(codes, i, stride), row_scales + i, apart, columns,
                                             lower ? lower + i : nullptr);
                continue;
            }
#endif
            offsets[i] = quantize(x + i * ldx, k, stride, codes + i * stride, row_scales + i, 0, columns, lower ? lower + i : nullptr);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t c = task / panels, p = task % panels, top = c * chunk, bottom = std::min(m, top + chunk);
#if TILED
            if (tiled) {
                if (n - p * PANEL > LANES) by_tiles.template panel<2>(thread, top, bottom, p * PANEL, threads);
                else by_tiles.template panel<1>(thread, top, bottom, p * PANEL, threads);
                continue;
            }
#endif
            linear.panel(p, top, bottom, (p + threads) % panels);
        }
#if TILED
        by_tiles.finish(thread);
#endif
    }
}

}  // namespace

// x (M, K), fp32, rows ldx apart → y (M, N), in fp32 or, by the second, in bf16. `codes` (M, K to the next multiple of four, by SMMLA of
// eight, or for tiles of 64, 64 bytes aligned), `row_scales` (M) and `offsets` (2 M) are workspace. Rows are taken in chunks of `chunk`, so that their codes stay in a
// core's cache.
#define EACH_ARGUMENT(T) \
    const float *x, int64_t ldx, int64_t m, int64_t k, const uint8_t *weight, const float *scales, const float *bias, int64_t n, int64_t after, \
        T *y, int8_t *codes, float *row_scales, int32_t *offsets, int64_t chunk, int64_t threads

extern "C" void int8_linear(EACH_ARGUMENT(float)) {
    linear_of(x, ldx, m, k, weight, scales, bias, n, after, y, codes, row_scales, offsets, chunk, threads);
}

extern "C" void int8_linear_narrow(EACH_ARGUMENT(uint16_t)) {
    linear_of(x, ldx, m, k, weight, scales, bias, n, after, y, codes, row_scales, offsets, chunk, threads);
}
