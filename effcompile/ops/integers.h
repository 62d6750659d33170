// Registers of whole numbers: products of bytes, rounding, and what may follow a product. WIDTH and KIND as in vectors.h.

#pragma once

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace {

constexpr float LEAST = 1e-30f;  // numbers without a larger one are 0: the inverse of their scale would overflow

typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef int8_t VB __attribute__((vector_size(W)));
typedef int16_t VS __attribute__((vector_size(W * 2)));
typedef int32_t VILoose __attribute__((vector_size(W * 4), aligned(1), may_alias));

inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline VI load_ints(const void* p) { return *reinterpret_cast<const VILoose*>(p); }
inline void store_ints(void* p, VI v) { *reinterpret_cast<VILoose*>(p) = v; }
inline V as_floats(VI v) { return __builtin_convertvector(v, V); }
inline V where(VI mask, V a, V b) { return mask ? a : b; }

// Each lane: sum += four products of unsigned with signed bytes. Exact: no step saturates. Of codes in words (WORDS): two products of them.
#ifdef WORDS
#if defined(__AVX512VNNI__)
inline VI dot(VI sum, VI weights, VI codes) { return (VI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, (__m512i)codes); }
#elif defined(__AVXVNNI__)
inline VI dot(VI sum, VI weights, VI codes) { return (VI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)codes); }
#elif WIDTH == 16
inline VI dot(VI sum, VI weights, VI codes) { return sum + (VI)_mm512_madd_epi16((__m512i)weights, (__m512i)codes); }
#else
inline VI dot(VI sum, VI weights, VI codes) { return sum + (VI)_mm256_madd_epi16((__m256i)weights, (__m256i)codes); }
#endif
#define SIGNED
#elif defined(__aarch64__)
// Codes of W as signed bytes: ARM multiplies signed bytes by signed ones.
inline VI lowered(VI weights) { return (VI)((VU)weights ^ 0x80808080u); }
#ifdef __ARM_FEATURE_DOTPROD
typedef int8x8_t Four;  // bytes of x, which SDOT takes for every lane
inline Four repeated(const int8_t* four) {
    uint32_t word;
    std::memcpy(&word, four, 4);
    return vcreate_s8(word);
}
inline VI dot_signed(VI sum, VI weights, Four codes) { return (VI)vdotq_lane_s32((int32x4_t)sum, (int8x16_t)weights, codes, 0); }
#else
typedef VI Four;
// 16 bits hold two products: at most 2 * 127 * 127.
inline VI dot_signed(VI sum, VI weights, Four codes) {
    const int8x16_t w = (int8x16_t)weights, c = (int8x16_t)codes;
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(c)), vmull_high_s8(w, c));
    return (VI)vpadalq_s16((int32x4_t)sum, pairs);
}
#endif
inline VI dot(VI sum, VI weights, Four codes) { return dot_signed(sum, lowered(weights), codes); }
#define SIGNED
#elif defined(__AVX512VNNI__)
inline VI dot(VI sum, VI weights, VI codes) { return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)codes); }
#elif defined(__AVXVNNI__)
inline VI dot(VI sum, VI weights, VI codes) { return (VI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)codes); }
#elif WIDTH == 16
// VPMADDUBSW saturates at 16 bits: |code| (at most 127) times the signed weight with the code's sign does not reach that.
inline VI dot(VI sum, VI weights, VI codes) {
    const __m512i signs = (__m512i)codes, w = _mm512_xor_si512((__m512i)weights, _mm512_set1_epi8((char)0x80));
    const __m512i turned = _mm512_mask_sub_epi8(w, _mm512_movepi8_mask(signs), _mm512_setzero_si512(), w);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(signs), turned);
    return sum + (VI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#define SIGNED
#else
inline VI dot(VI sum, VI weights, VI codes) {
    const __m256i signs = (__m256i)codes, w = _mm256_xor_si256((__m256i)weights, _mm256_set1_epi8((char)0x80));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8(w, signs));
    return sum + (VI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#define SIGNED
#endif

#ifndef __ARM_FEATURE_DOTPROD
inline VI repeated(const int8_t* four) {
    int32_t word;
    std::memcpy(&word, four, 4);
    return word - VI{};
}
#endif

// To the nearest whole number, ties to even.
#if defined(__aarch64__)
inline VI rounded(V v) { return (VI)vcvtnq_s32_f32((float32x4_t)v); }
#elif WIDTH == 16
inline VI rounded(V v) { return (VI)_mm512_cvtps_epi32((__m512)v); }
#else
inline VI rounded(V v) { return (VI)_mm256_cvtps_epi32((__m256)v); }
#endif

// The lowest byte of each lane.
inline VB as_bytes(VI v) {
#ifdef __aarch64__  // GCC takes the lanes one by one
    const int16x4_t halves = vmovn_s32((int32x4_t)v);
    const int32x2_t bytes = vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves)));
    VB made;
    std::memcpy(&made, &bytes, sizeof(made));
    return made;
#else
    return __builtin_convertvector(v, VB);
#endif
}

inline VI words_of(const float* x, int64_t count) {  // `count` of them, then zeros
    VI words = {};
    std::memcpy(&words, x, std::min<int64_t>(count, W) * 4);
    return words;
}

// The first `count` of them, or as many as a vector has.
inline V some_of(const float* p, int64_t count) { return count >= W ? load(p) : count > 0 ? (V)words_of(p, count) : V{}; }
inline VI some_ints(const int32_t* p, int64_t count) { return (VI)some_of(reinterpret_cast<const float*>(p), count); }
inline void put(float* p, V v, int64_t count) {
    if (count >= W) store(p, v);
    else std::memcpy(p, &v, count * sizeof(float));
}

// The same as bf16, rounded to nearest even.
inline void put(uint16_t* p, V v, int64_t count) {
#ifdef __AVX512BF16__
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)v);
#else
    const VU u = (VU)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, is_nan = (VU)((u & 0x7fffffff) > 0x7f800000);
    const VH halves = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), VH);
#endif
    if (count >= W) std::memcpy(p, &halves, sizeof(halves));
    else std::memcpy(p, &halves, count * sizeof(uint16_t));
}

// The first `count` bytes, or all of them. A copy of a length that is not known is a call.
inline void put(int8_t* p, VB v, int64_t count) {
    if (count >= W) std::memcpy(p, &v, W);
    else std::memcpy(p, &v, count);
}

template <int H, typename T, size_t... I>
inline T turned(T v, std::index_sequence<I...>) { return __builtin_shufflevector(v, v, (int)(I ^ H)...); }

template <int H = W / 2>
inline int32_t largest_lane(VI v) {
    const VI other = turned<H>(v, std::make_index_sequence<W>()), most = other > v ? other : v;
    if constexpr (H > 1) return largest_lane<H / 2>(most);
    return most[0];
}

template <int H = W / 2, typename T>
inline auto sum_of_lanes(T v) {
    const T sums = v + turned<H>(v, std::make_index_sequence<W>());
    if constexpr (H > 1) return sum_of_lanes<H / 2>(sums);
    return sums[0];
}

// How x becomes codes, where a weight says it behind its own: a scale for each column, then the sum of codes of each row of the weight, for codes
// of x are lowered by as much as is the middle of their row. Flags of `after` tell of which weights.
constexpr int64_t FUNCTIONS = 255, LAST_LOWERS = 256, FIRST_LOWERS = 512;
struct Coding {
    const float* columns = nullptr;  // (K)
    const int32_t* sums = nullptr;   // (N)

    Coding() {}
    Coding(const uint8_t* weight, int64_t n, int64_t k, bool lowers) {
        if (!lowers) return;
        columns = reinterpret_cast<const float*>(weight + up(n, 16) * up(k, 4));
        sums = reinterpret_cast<const int32_t*>(columns + k);
    }
};

// The next numbers of a row, `left` of which there are, each times its column's scale if there are any.
inline V entering(const float* x, int64_t left, const float* columns) {
    const V numbers = left < W ? (V)words_of(x, std::max<int64_t>(left, 0)) : load(x);
    return columns ? numbers * some_of(columns, left) : numbers;
}

// Of each lane the largest magnitude as its bits, and where numbers are LOWERED that of those that are positive and, in the second, of the others.
// Magnitudes are ordered as their bits are, infinity and NaN above all.
template <bool LOWERED>
inline void widen(VI* largest, V numbers) {
    const VI bits = LOWERED ? (VI)numbers : (VI)numbers & 0x7fffffff;
    largest[0] = bits > largest[0] ? bits : largest[0];
    if constexpr (LOWERED) {
        const VI turned = bits ^ (VI{} + INT32_MIN);
        largest[1] = turned > largest[1] ? turned : largest[1];
    }
}

template <bool LOWERED>
inline void widen(VI* largest, V z0, V z1) {
    VI here[2] = {largest[0], LOWERED ? largest[1] : VI{}};
    widen<LOWERED>(here, z0), widen<LOWERED>(here, z1);
    largest[0] = here[0];
    if constexpr (LOWERED) largest[1] = here[1];
}

inline float of_bits(int32_t bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

// What numbers are multiplied with to be codes of at most MOST, and by how much those are lowered.
struct Codes {
    float inverse;
    int32_t lower;

    // Where the largest has these bits: 0 where it is infinite, NaN, or as good as 0. Their scale is NaN in the first two cases, so that results are.
    template <int MOST = 127>
    static Codes around(int32_t largest, float* scale) {
        const bool finite = largest < INFINITE, some = finite && of_bits(largest) > LEAST;
        *scale = !finite ? NAN : some ? of_bits(largest) / (float)MOST : 0.0f;
        return {some ? (float)MOST / of_bits(largest) : 0.0f, 0};
    }

    // The same of numbers from `least`, below 0, to `most`, of which 0 remains a code: half of them is as many as bytes have, less what rounding twice
    // may take.
    static Codes between(int32_t most, int32_t least, float* scale) {
        constexpr float HALF = 126.5f;
        const float above = 0.5f * of_bits(most), below = 0.5f * of_bits(least), half = above + below;
        const bool finite = most < INFINITE && least < INFINITE, some = finite && half > LEAST;
        *scale = !finite ? NAN : some ? half / HALF : 0.0f;
        const float inverse = some ? HALF / half : 0.0f;
        return {inverse, some ? (int32_t)std::nearbyint((above - below) * inverse) : 0};
    }

    static constexpr int32_t INFINITE = 0x7f800000;

    // Of the next numbers, `left` of which there are: others have codes of 0.
    template <bool LOWERED>
    inline VI of(V numbers, int64_t left) const {
        VI whole = rounded(numbers * inverse);
        if constexpr (LOWERED) whole = lowered(whole, left);
        return inverse != 0.0f ? whole : VI{};
    }

  private:
    inline VI lowered(VI whole, int64_t left) const {
        if (left >= W) return whole - lower;
        alignas(64) int32_t there[W];
        for (int i = 0; i < W; i++) there[i] = i < left ? lower : 0;
        return whole - load_ints(there);
    }
};

// Codes in words of `count` numbers that share a scale, then zeros up to `padded`.
template <int MOST>
inline void quantize_words(const float* x, int64_t count, int64_t padded, int16_t* codes, float* scale) {
    VI largest = {};
    for (int64_t i = 0; i < count; i += W) widen<false>(&largest, entering(x + i, count - i, nullptr));
    const float inverse = Codes::around<MOST>(largest_lane(largest), scale).inverse;
    for (int64_t i = 0; i < padded; i += W) {
        VI whole = rounded((V)(count - i < W ? words_of(x + i, std::max<int64_t>(count - i, 0)) : load_ints(x + i)) * inverse);
        whole = inverse != 0.0f ? whole : VI{};
        const VS words = __builtin_convertvector(whole, VS);
        std::memcpy(codes + i, &words, std::min<int64_t>(W, padded - i) * 2);
    }
}

// Codes of `count` numbers that share a scale, then zeros up to `padded`; returns 128 times the sum of the codes. Where one is infinite or
// NaN the scale is NaN and the codes are 0, so that results are NaN. Codes are side by side, or RUN of them, and the next `apart` bytes on. Where there is
// a place for it, they are lowered by what is written there.
template <int64_t RUN = 0, bool LOWERED = false>
inline int32_t quantize(const float* x, int64_t count, int64_t padded, int8_t* codes, float* scale, int64_t apart = 0,
                        const float* columns = nullptr, int32_t* lower = nullptr) {
    if constexpr (!LOWERED)
        if (lower) return quantize<RUN, true>(x, count, padded, codes, scale, apart, columns, lower);
    const auto next = [=](int64_t i) { return entering(x + i, count - i, columns ? columns + i : nullptr); };
    VI largest[2] = {};
    for (int64_t i = 0; i < count; i += W) widen<LOWERED>(largest, next(i));
    const int32_t most = largest_lane(largest[0]);
    const Codes how = LOWERED ? Codes::between(most, largest_lane(largest[1]), scale) : Codes::around(most, scale);
    if constexpr (LOWERED) *lower = how.lower;
    VI sums = {};
    for (int64_t i = 0; i < padded; i += W) {
        const VI whole = how.template of<LOWERED>(next(i), count - i);
        sums += whole;
        const VB bytes = as_bytes(whole);
        if constexpr (RUN) std::memcpy(codes + i / RUN * apart + i % RUN, &bytes, W);
        else put(codes + i, bytes, W == 4 ? W : padded - i);  // padded is a multiple of four
    }
    return sum_of_lanes(sums) * 128;
}

// ------------------------------------------------------------------ what may follow a product

enum After { NOTHING, GELU, GELU_TANH, SILU, RELU, GELU_SHORT, GELU_HALVES };  // as AFTER of int8_codes.py, then those of kernels alone

// 2^t for t <= 0, to a unit in the last place or two: a polynomial of the fraction in [-1/2, 1/2] (Cephes, exp2f), the whole part into the
// exponent. No less than 2^-100: what it is multiplied with afterwards then makes no subnormal numbers, which take a hundred times as long.
inline V power_of_two(V t) {
    t = where(t < -100.0f, V{} - 100.0f, t);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    const V shifted = t + magic, f = t - (shifted - magic);
    V p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    return (V)((VI)p + ((VI)shifted << 23));
}

// 1 / x to a unit in the last place or two, for what is neither infinite nor nearly so.
inline V inverse(V x) {
#if WIDTH == 16
    const V about = (V)_mm512_rcp14_ps((__m512)x);
    return about * (2.0f - x * about);
#else
    return 1.0f / x;
#endif
}

// 1 / (1 + e^-z), by an exponential that cannot overflow; 0 where that has ended at its least, which is something times a large z.
inline V sigmoid(V z) {
    const V e = power_of_two(where(z < 0.0f, z, V{} - z) * 1.4426950408889634f);
    return where(z < 0.0f, where(z < -69.0f, V{}, e), V{} + 1.0f) * inverse(e + 1.0f);
}

// x * Phi(x), by the complementary error function of Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7).
inline V gelu(V x) {
    const V z = where(x < 0.0f, V{} - x, x) * 0.7071067811865476f, t = inverse(z * 0.3275911f + 1.0f);
    V p = t * 1.061405429f - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const V tail = p * t * power_of_two(z * z * -1.4426950408889634f) * 0.5f;  // Phi(-|x|)
    return x * where(x < 0.0f, tail, 1.0f - tail);
}

#if WIDTH == 16
inline V above(V x, float least) { return (V)_mm512_max_ps(_mm512_set1_ps(least), (__m512)x); }  // NaN stays one
inline V below(V x, float most) { return (V)_mm512_min_ps(_mm512_set1_ps(most), (__m512)x); }
#else
inline V above(V x, float least) { return where(x < least, V{} + least, x); }
inline V below(V x, float most) { return where(x > most, V{} + most, x); }
#endif

// The same to 4e-04, a tenth of what bytes are rounded by: the best polynomial of x^2 for (Phi(x) - 1/2) / x on [-4, 4].
inline V gelu_short(V x) {
    const V from = above(x, -4.0f), within = below(from, 4.0f), u = within * within;
    V p = u * 2.27816126e-08f - 1.59861194e-06f;
    p = p * u + 4.79557273e-05f;
    p = p * u - 0.000814017655f;
    p = p * u + 0.0087723996f;
    p = p * u - 0.0645731369f;
    p = p * u + 0.397883369f;
    return from * (within * p + 0.5f);
}

// The same to 5e-05, and of a normal x to 7e-06 of its root mean square, where bf16 is rounded by 2e-03: so on [-4.5, 4.5].
inline V gelu_halves(V x) {
    const V from = above(x, -4.5f), within = below(from, 4.5f), u = within * within;
    V p = u * -1.4000275e-12f + 1.69726408e-10f;
    p = p * u - 9.19358125e-09f;
    p = p * u + 2.95885946e-07f;
    p = p * u - 6.36520111e-06f;
    p = p * u + 9.78708876e-05f;
    p = p * u - 0.00112267601f;
    p = p * u + 0.00983317757f;
    p = p * u - 0.0663370456f;
    p = p * u + 0.398883789f;
    return from * (within * p + 0.5f);
}

inline V followed(V x, int after) {
    if (after == GELU_HALVES) return gelu_halves(x);
    if (after == GELU) return gelu(x);
    if (after == GELU_TANH) return x * sigmoid((x * x * 0.044715f + 1.0f) * x * 1.5957691216057308f);
    if (after == SILU) return x * sigmoid(x);
    if (after == GELU_SHORT) return gelu_short(x);
    if (after == RELU) return where(x < 0.0f, V{}, x);  // NaN stays one
    return x;
}

// What `make` makes of `after` as a constant: what follows is chosen once, and not for each vector.
template <typename Make>
inline auto made_for(int after, const Make& make) {
    if (after == GELU) return make(std::integral_constant<int, GELU>{});
    if (after == GELU_TANH) return make(std::integral_constant<int, GELU_TANH>{});
    if (after == SILU) return make(std::integral_constant<int, SILU>{});
    if (after == RELU) return make(std::integral_constant<int, RELU>{});
    if (after == GELU_SHORT) return make(std::integral_constant<int, GELU_SHORT>{});
    if (after == GELU_HALVES) return make(std::integral_constant<int, GELU_HALVES>{});
    return make(std::integral_constant<int, NOTHING>{});
}

}  // namespace
