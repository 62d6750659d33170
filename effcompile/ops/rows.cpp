// What lies between a transformer's products on a CPU, as `rows.py` defines it, in fp32: one pass over memory, and one call, for each.
//
// Compiled once per instruction set by machine/native.py, which passes WIDTH, the 32-bit words of a vector register.

#define KIND 0
#include "norm_row.h"

// y = s * (mean s^2 + eps)^(-1/2) * weight with s = x + residual, all (rows, d) but weight (d). `residual` and `s` are null together.
extern "C" void rms_norm(const float* x, const float* residual, const float* weight, double eps, int64_t rows, int64_t d, float* y, float* s,
                         int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float* from = x + row * d;
        V squares = {};
        for (int64_t i = 0; i < d; i += W) {
            V v = some_of(from + i, d - i);
            if (residual) {
                v = v + some_of(residual + row * d + i, d - i);
                put(s + row * d + i, v, d - i);
            }
            squares = squares + v * v;
        }
        const float inverse = 1.0f / std::sqrt(sum_of_lanes(squares) / (float)d + (float)eps);
        from = residual ? s + row * d : from;
        for (int64_t i = 0; i < d; i += W) put(y + row * d + i, some_of(from + i, d - i) * inverse * some_of(weight + i, d - i), d - i);
    }
}

// y = (s - mean s) * (variance of s + eps)^(-1/2) * weight + bias with s = x + residual; residual, weight and bias (d) may be null.
extern "C" void layer_norm(const float* x, const float* residual, const float* weight, const float* bias, double eps, int64_t rows, int64_t d,
                           float* y, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && rows > 1)
    for (int64_t row = 0; row < rows; row++)
        layer_norm_row(x + row * d, residual ? residual + row * d : nullptr, weight, bias, (float)eps, d, y + row * d);
}

// y = silu(gate) * up, all (rows, d); rows of gate and up this far apart, those of y dense.
extern "C" void swiglu(const float* gate, int64_t of_gate, const float* up, int64_t of_up, int64_t rows, int64_t d, float* y, int64_t threads) {
    // in pieces of a row, of which there are enough for few rows too
    const int64_t piece = 1024, pieces = (d + piece - 1) / piece;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && rows * d > 4096)
    for (int64_t at = 0; at < rows * pieces; at++) {
        const int64_t row = at / pieces, first = at % pieces * piece, last = std::min(d, first + piece);
        const float *g = gate + row * of_gate, *u = up + row * of_up;
        for (int64_t i = first; i < last; i += W) {
            const V v = some_of(g + i, last - i);
            put(y + row * d + i, v * sigmoid(v) * some_of(u + i, last - i), last - i);
        }
    }
}

// y = f(x), all (count); f is one of those that may follow a product.
extern "C" void follow(const float* x, int64_t count, int64_t after, float* y, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && count > 4096)
    for (int64_t i = 0; i < count; i += W) put(y + i, followed(some_of(x + i, count - i), (int)after), count - i);
}

// y = a + b, all (count).
extern "C" void add(const float* a, const float* b, int64_t count, float* y, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && count > 4096)
    for (int64_t i = 0; i < count; i += W) put(y + i, some_of(a + i, count - i) + some_of(b + i, count - i), count - i);
}

// y = x * cos + [-x2, x1] * sin, x and y (batch, heads, rows, 2 * half) with these strides, cos and sin (batch or 1, rows, 2 * half) dense.
extern "C" void rotary(const float* x, const float* cos, const float* sin, int64_t batch, int64_t heads, int64_t rows, int64_t half,
                       const int64_t* of_x, const int64_t* of_y, int64_t of_cos, float* y, int64_t threads) {
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && batch * rows > 1)
    for (int64_t at = 0; at < batch * rows; at++) {
        const int64_t b = at / rows, r = at % rows;
        const float *c = cos + b * of_cos + r * 2 * half, *n = sin + b * of_cos + r * 2 * half;
        for (int64_t h = 0; h < heads; h++) {
            const float* from = x + b * of_x[0] + h * of_x[1] + r * of_x[2];
            float* to = y + b * of_y[0] + h * of_y[1] + r * of_y[2];
            for (int64_t i = 0; i < half; i += W) {
                const int64_t here = half - i;
                const V first = some_of(from + i, here), second = some_of(from + half + i, here);
                put(to + i, first * some_of(c + i, here) - second * some_of(n + i, here), here);
                put(to + half + i, second * some_of(c + half + i, here) + first * some_of(n + half + i, here), here);
            }
        }
    }
}
