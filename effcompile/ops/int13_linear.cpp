// Linears in 13 bits on a CPU: y = f(dequantised(codes(x) W^T) + bias), activations quantised row by row inside.
//
// Compiled as int8_linear.cpp is. Codes of x and of W are signed words of at most 4095: VPDPWSSD, or without VNNI VPMADDWD and
// VPADDD, sums two products of them in 32 bits, and 64 such steps cannot overflow (64 * 2 * 4095^2 < 2^31). Then sums are taken in fp32. The
// interleaving [N / 16][K / 2][16][2] is what it reads as one register.

#define KIND 0
#define WORDS
#define TILED 0
#define STEPS 64
#include "vector_linear.h"

namespace {
constexpr int MOST = 4095;
}

// x (M, K), rows ldx apart → y (M, N), both fp32. `codes` (M, K to the next multiple of two) and `row_scales` (M) are workspace. Rows are taken in
// chunks of `chunk`, so that their codes stay in a core's cache.
extern "C" void int13_linear(const float* x, int64_t ldx, int64_t m, int64_t k, const uint8_t* weight, const float* scales, const float* bias,
                             int64_t n, int64_t after, float* y, int8_t* codes, float* row_scales, int32_t*, int64_t chunk, int64_t threads) {
    const int64_t pairs = (k + 1) / 2, stride = 4 * pairs;
    const Outputs<float> outputs{{n, scales, bias, row_scales, nullptr}, (int)after, y, n};
    const VectorLinear<Outputs<float>> linear{n, pairs, weight, codes, stride, outputs};
    const int64_t chunks = (m + chunk - 1) / chunk, panels = linear.panels();
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < m; i++)
            quantize_words<MOST>(x + i * ldx, k, 2 * pairs, reinterpret_cast<int16_t*>(codes + i * stride), row_scales + i);
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < chunks * panels; task++) {
            const int64_t c = task / panels, p = task % panels, top = c * chunk, bottom = std::min(m, top + chunk);
            linear.panel(p, top, bottom, (p + threads) % panels);
        }
    }
}
