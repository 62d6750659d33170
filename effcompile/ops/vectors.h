// Vector registers of WIDTH 32-bit words under KIND (see block_sparse.cpp), transposed and multiplied: GCC's and Clang's vector extensions.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if KIND == 2
#include <immintrin.h>
#endif

namespace {

constexpr int W = WIDTH;

typedef float V __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));
typedef float VLoose __attribute__((vector_size(W * 4), aligned(2), may_alias));  // anywhere in memory
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint16_t VHLoose __attribute__((vector_size(W * 2), aligned(2), may_alias));

#if KIND == 0
typedef float Element;  // of x, y and dy
#else
typedef uint16_t Element;
#endif
#if KIND == 2
typedef uint16_t Weight;
#else
typedef float Weight;
#endif

inline V load(const float* p) { return *reinterpret_cast<const VLoose*>(p); }
inline void store(float* p, V v) { *reinterpret_cast<VLoose*>(p) = v; }

#if KIND == 2
inline V multiply_add(V acc, V a, V b) { return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
inline V multiply_add(V acc, const float* weight, V b) {
    int32_t word;
    std::memcpy(&word, weight, 4);
    return multiply_add(acc, (V)_mm512_set1_epi32(word), b);
}
#else
inline V multiply_add(V acc, V a, V b) { return acc + a * b; }
inline V multiply_add(V acc, const float* weight, V b) { return acc + *weight * b; }
#endif

// W words of a row of x or dy.
inline V load_words(const Element* p) {
#if KIND == 1
    VH half = *reinterpret_cast<const VHLoose*>(p);
    return (V)(__builtin_convertvector(half, VU) << 16);
#else
    return load(reinterpret_cast<const float*>(p));
#endif
}

// W results into y, rounded to nearest even for bf16.
inline void store_elements(Element* p, V v) {
#if KIND == 0
    store(p, v);
#else
    VU u = (VU)v;
    VU rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    VU is_nan = (VU)((u & 0x7fffffff) > 0x7f800000);
    *reinterpret_cast<VHLoose*>(p) = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), VH);
#endif
}

// Exchange, between two rows, the lanes whose index has bit H: one stage of a transposition.
template <int H, bool SECOND, size_t... I>
inline V exchanged(V a, V b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, (int)(SECOND ? ((I & H) ? W + I : I + H) : ((I & H) ? W + I - H : I))...);
}
template <int H>
inline V first_of(V a, V b) { return exchanged<H, false>(a, b, std::make_index_sequence<W>()); }
template <int H>
inline V second_of(V a, V b) { return exchanged<H, true>(a, b, std::make_index_sequence<W>()); }

template <int H>
inline void transpose_stages(V* r) {
    if constexpr (H < W) {
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & H)) {
                V a = r[i], b = r[i + H];
                r[i] = first_of<H>(a, b);
                r[i + H] = second_of<H>(a, b);
            }
        transpose_stages<H * 2>(r);
    }
}

// Lane i of the result: the sum of the lanes of r[i].
template <int H>
inline V lane_sums(V* r) {
#pragma GCC unroll 16
    for (int i = 0; i < H; i++) r[i] = first_of<H>(r[i], r[i + H]) + second_of<H>(r[i], r[i + H]);
    if constexpr (H > 1) return lane_sums<H / 2>(r);
    return r[0];
}

}  // namespace
