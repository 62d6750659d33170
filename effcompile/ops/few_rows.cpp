// Linears of few rows in fp32 on a CPU, x W^T + bias: the weight is read once, as it is stored, at the speed of memory.
//
// Compiled once per instruction set by machine/native.py, which passes WIDTH, the 32-bit words of a vector register.

#define KIND 0
#include "integers.h"

namespace {

constexpr int64_t BLOCK = 16;    // outputs that one thread makes at a time: their weights stay in the L2 cache for more rows of x
constexpr int64_t AHEAD = 1024;  // floats of W that are fetched before they are multiplied
constexpr int MOST = 4;          // rows of x at a time: those of some thousand columns fit no L1 cache

struct Linear {
    const float *x, *weight, *bias;
    int64_t ldx, k, n;
    float* y;

    // R rows of x times the rows [from, to) of W, one after the other: memory is read in one stream. (512 columns on an EPYC with Zen 4: 27 GB/s,
    // as a plain read; four rows at once, which would spare sums over lanes, 14.) Of few rows of x several sums: one would wait for itself.
    template <int R>
    void outputs(int64_t row, int64_t from, int64_t to) const {
        constexpr int APART = R < 4 ? 4 / R : 1;
        const float* a = x + row * ldx;
        for (int64_t at = from; at < to; at++) {
            const float* w = weight + at * k;
            V sums[R][APART] = {};
            int64_t i = 0;
            for (; i + APART * W <= k; i += APART * W) {
#pragma GCC unroll 4
                for (int p = 0; p < APART; p++) {
                    const V of_w = load(w + i + p * W);
                    __builtin_prefetch(w + i + p * W + AHEAD, 0, 2);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) sums[r][p] = sums[r][p] + of_w * load(a + r * ldx + i + p * W);
                }
            }
            for (; i < k; i += W) {
                const V of_w = some_of(w + i, k - i);
                for (int r = 0; r < R; r++) sums[r][0] = sums[r][0] + of_w * some_of(a + r * ldx + i, k - i);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                V sum = sums[r][0];
                for (int p = 1; p < APART; p++) sum = sum + sums[r][p];
                y[(row + r) * n + at] = sum_of_lanes(sum) + (bias ? bias[at] : 0.0f);
            }
        }
    }

    template <int R>
    void outputs(int64_t row, int64_t rows, int64_t from, int64_t to) const {
        if constexpr (R > 1)
            if (rows < R) return outputs<R - 1>(row, rows, from, to);
        outputs<R>(row, from, to);
    }
};

}  // namespace

// x (m, k) with rows ldx apart, weight (n, k) and y (m, n) dense; bias (n) may be null.
extern "C" void few_rows(const float* x, int64_t ldx, int64_t m, int64_t k, const float* weight, const float* bias, int64_t n, float* y,
                         int64_t threads) {
    const Linear linear{x, weight, bias, ldx, k, n, y};
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && n * k > 1 << 16)
    for (int64_t from = 0; from < n; from += BLOCK)
        for (int64_t row = 0; row < m; row += MOST) linear.outputs<MOST>(row, std::min<int64_t>(MOST, m - row), from, std::min(n, from + BLOCK));
}
