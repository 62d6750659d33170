// LayerNorm of a row in fp32 (Ba et al., arXiv 1607.06450).

#pragma once

#include "integers.h"

namespace {

constexpr int SUMS = 4;  // that are added to in turn: one would wait for itself

// each(i, turn, count) for each vector of d numbers: where it begins, which sum it is added to, and how many of it are there. Of whole vectors
// the compiler knows that they are.
template <typename Each>
inline __attribute__((always_inline)) void in_turn(int64_t d, const Each& each) {
    int64_t i = 0;
    for (; i + SUMS * W <= d; i += SUMS * W)
#pragma GCC unroll 4
        for (int turn = 0; turn < SUMS; turn++) each(i + turn * W, turn, (int64_t)W);
    for (int turn = 0; i < d; i += W, turn++) each(i, turn, d - i);
}

// to = (s - mean s) * (variance of s + eps)^(-1/2) * weight + bias with s = x + residual, (d); residual, weight and bias may be null; `to` may be x.
inline void layer_norm_row(const float* x, const float* residual, const float* weight, const float* bias, float eps, int64_t d, float* to) {
    V sums[SUMS] = {}, squares[SUMS] = {};
    const auto sum = [&](int64_t i, int turn, int64_t count, V v) __attribute__((always_inline)) {
        put(to + i, v, count);
        sums[turn] = sums[turn] + v;
    };
    if (residual)
        in_turn(d, [&](int64_t i, int turn, int64_t count) __attribute__((always_inline)) {
            sum(i, turn, count, some_of(x + i, count) + some_of(residual + i, count));
        });
    else in_turn(d, [&](int64_t i, int turn, int64_t count) __attribute__((always_inline)) { sum(i, turn, count, some_of(x + i, count)); });
    const float mean = sum_of_lanes(sums[0] + sums[1] + sums[2] + sums[3]) / (float)d;
    in_turn(d, [&](int64_t i, int turn, int64_t count) __attribute__((always_inline)) {
        V v = some_of(to + i, count) - mean;
        if (count < W) v = (V)words_of((const float*)&v, count);
        squares[turn] = squares[turn] + v * v;
    });
    const float inverse = 1.0f / std::sqrt(sum_of_lanes(squares[0] + squares[1] + squares[2] + squares[3]) / (float)d + eps);
    in_turn(d, [&](int64_t i, int, int64_t count) __attribute__((always_inline)) {
        V v = (some_of(to + i, count) - mean) * inverse;
        if (weight) v = v * some_of(weight + i, count);
        if (bias) v = v + some_of(bias + i, count);
        put(to + i, v, count);
    });
}

}  // namespace
