// LayerNorm of a row in fp32 (Ba et al., arXiv 1607.06450).

#pragma once

#include "integers.h"

namespace {

constexpr int64_t SUMS = 4;  // that are added to in turn: one would wait for itself

// to = (s - mean s) * (variance of s + eps)^(-1/2) * weight + bias with s = x + residual, (d); residual, weight and bias may be null; `to` may be x.
inline void layer_norm_row(const float* x, const float* residual, const float* weight, const float* bias, float eps, int64_t d, float* to) {
    V sums[SUMS] = {}, squares[SUMS] = {};
    for (int64_t i = 0, turn = 0; i < d; i += W, turn = (turn + 1) % SUMS) {
        V v = some_of(x + i, d - i);
        if (residual) v = v + some_of(residual + i, d - i);
        put(to + i, v, d - i);
        sums[turn] = sums[turn] + v;
    }
    const float mean = sum_of_lanes(sums[0] + sums[1] + sums[2] + sums[3]) / (float)d;
    for (int64_t i = 0, turn = 0; i < d; i += W, turn = (turn + 1) % SUMS) {
        V v = some_of(to + i, d - i) - mean;
        if (d - i < W) v = (V)words_of((const float*)&v, d - i);
        squares[turn] = squares[turn] + v * v;
    }
    const float inverse = 1.0f / std::sqrt(sum_of_lanes(squares[0] + squares[1] + squares[2] + squares[3]) / (float)d + eps);
    for (int64_t i = 0; i < d; i += W) {
        V v = (some_of(to + i, d - i) - mean) * inverse;
        if (weight) v = v * some_of(weight + i, d - i);
        if (bias) v = v + some_of(bias + i, d - i);
        put(to + i, v, d - i);
    }
}

}  // namespace
