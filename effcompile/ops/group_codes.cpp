// Codes and scales of weights in groups of 32, as group_codes.py defines them: of a group's scales the one that leaves least of it.
//
// Compiled once per instruction set by machine/native.py, which passes WIDTH, the 32-bit words of a vector register.

#define KIND 0
#include "integers.h"

namespace {

constexpr int64_t GROUP = 32;
constexpr int VECTORS = GROUP / W;

template <bool MOST, int H = W / 2>
inline float extreme_lane(V v) {
    const V other = turned<H>(v, std::make_index_sequence<W>()), found = (MOST ? other > v : other < v) ? other : v;
    if constexpr (H > 1) return extreme_lane<MOST, H / 2>(found);
    return found[0];
}

// Bits as bf16, rounded to nearest even; what is no number stays none.
inline uint16_t half_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline float wide(uint16_t half) {
    const uint32_t u = (uint32_t)half << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

struct Group {
    V x[VECTORS];
    VI codes[VECTORS];

    Group(const float* from, int64_t count) {
        for (int v = 0; v < VECTORS; v++) x[v] = some_of(from + v * W, count - v * W);
    }

    // What is left of the group under a scale, whose codes are made.
    inline float left(float scale, int32_t low, int32_t high) {
        V sum = {};
        for (int v = 0; v < VECTORS; v++) {
            VI whole = rounded(x[v] / scale);
            whole = whole > high ? VI{} + high : whole;
            codes[v] = whole < low ? VI{} + low : whole;
            const V gone = as_floats(codes[v]) * scale - x[v];
            sum += gone * gone;
        }
        return sum_of_lanes(sum);
    }

    // The scale as bf16, whose codes are made.
    inline uint16_t coded(int64_t bits) {
        static const float four[] = {-8.0f, -7.5f}, eight[] = {127.0f, 126.6f, 127.4f};
        V most = x[0], least = x[0];
        VI magnitude = {};
        for (int v = 0; v < VECTORS; v++) {
            most = x[v] > most ? x[v] : most, least = x[v] < least ? x[v] : least;
            const VI here = (VI)x[v] & 0x7fffffff;
            magnitude = here > magnitude ? here : magnitude;
        }
        const float high = extreme_lane<true>(most), low = extreme_lane<false>(least);
        const float top = bits == 4 ? (high > -low ? high : low) : std::max(high, -low);
        const int32_t largest = largest_lane(magnitude);
        if (largest >= 0x7f800000) {  // the scale is infinite or NaN as well
            for (int v = 0; v < VECTORS; v++) codes[v] = VI{};
            return largest > 0x7f800000 ? 0x7fc0 : half_of(bits == 4 ? -top : top);
        }
        const float* parts = bits == 4 ? four : eight;
        const int32_t lowest = bits == 4 ? -8 : -127, highest = bits == 4 ? 7 : 127;
        uint16_t found = 0;
        float fewest = INFINITY, last = 0;
        for (int at = 0; at < (bits == 4 ? 2 : 3); at++) {
            uint16_t tried = half_of(top / parts[at]);
            if (!(tried & 0x7fff)) tried = 0x3f80;  // 1: of nothing but zeros, or as good as zeros
            const float remains = left(last = wide(tried), lowest, highest);
            if (at && !(remains < fewest)) continue;
            found = tried, fewest = remains;
        }
        if (wide(found) != last) left(wide(found), lowest, highest);
        return found;
    }
};

}  // namespace

// weight (n, k) dense; scales (n, ⌈k/32⌉) of bf16; codes (n, k), or in their place `rounded` (n, k): what they stand for.
extern "C" void group_codes(const float* weight, int64_t n, int64_t k, int64_t bits, int8_t* codes, uint16_t* scales, float* rounded,
                            int64_t threads) {
    const int64_t groups = (k + GROUP - 1) / GROUP;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && n * k > 1 << 16)
    for (int64_t row = 0; row < n; row++)
        for (int64_t at = 0; at < groups; at++) {
            const int64_t from = row * k + at * GROUP, count = std::min(GROUP, k - at * GROUP);
            Group group(weight + from, count);
            const uint16_t half = scales[row * groups + at] = group.coded(bits);
            for (int v = 0; v < VECTORS && v * W < count; v++) {
                if (codes) put(codes + from + v * W, as_bytes(group.codes[v]), count - v * W);
                else put(rounded + from + v * W, as_floats(group.codes[v]) * wide(half), count - v * W);
            }
        }
}
