// Attention of fp32 numbers whose products are of bf16 tiles: softmax(q kᵀ scale + mask) v, sums and softmax in fp32.
//
// One head at a time: its keys and values are laid as tiles read them, then queries are taken 32 at a time, against all keys they may see.
// All scores of those are held, so that the softmax is the ordinary one. Needs AMX-BF16 and AVX512-BF16.

#define WIDTH 16
#define KIND 0
#include "integers.h"
#include "tiles.h"

#include <omp.h>

namespace {

constexpr int64_t ROWS = 32;    // queries that are taken at once
constexpr int64_t WORDS = 256;  // of a tile
constexpr float LOG2_E = 1.4426950408889634f;

// 32 numbers as pairs of bf16, rounded to nearest even; and those that are bf16.
inline V paired(const float* x, int64_t count) { return (V)_mm512_cvtne2ps_pbh((__m512)some_of(x + W, count - W), (__m512)some_of(x, count)); }
inline VU narrow(V x) { return (VU)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline V paired(const uint16_t* x, int64_t count) {
    const __mmask32 there = count >= 32 ? (__mmask32)-1 : count > 0 ? (__mmask32)((1u << count) - 1) : 0;
    return (V)_mm512_maskz_loadu_epi16(there, x);
}
// 16 of them, one in each word.
inline VU spread(const float* x, int64_t count) { return narrow(some_of(x, count)); }
inline VU spread(const uint16_t* x, int64_t count) {
    const __mmask16 there = count >= W ? (__mmask16)-1 : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
    return (VU)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, x));
}

struct Sizes {
    int64_t batch, heads, groups, queries, keys, width;
    int64_t deep() const { return up(width, 32); }
    int64_t wide() const { return up(keys, 32); }
};

struct Mask {  // bools that say what is seen, or numbers that are added; strides of (batch, heads, queries) in elements
    const void* at;
    const int64_t* strides;
    bool added;
};

// What one thread holds: keys, values, queries, scores and their weights, all but the scores as tiles.
struct Room {
    float *keys, *values, *queries, *weights, *scores, *out;

    Room(float* at, const Sizes& s)
        : keys(at), values(keys + s.wide() * s.deep() / 2), queries(values + s.wide() * s.deep() / 2),
          weights(queries + ROWS * s.deep() / 2), scores(weights + ROWS * s.wide() / 2), out(scores + ROWS * s.wide()) {}
    static int64_t floats(const Sizes& s) {
        return s.wide() * s.deep() + ROWS * s.deep() / 2 + ROWS * s.wide() * 3 / 2 + ROWS * ROWS;
    }
};

// Rows of x as tiles of the left side: [rows / 16][deep / 32][16][32] of bf16, zeros beyond.
template <typename T>
void lay_rows(const T* x, int64_t apart, int64_t rows, int64_t width, int64_t deep, float* to) {
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t d = 0; d < deep; d += 32)
            store(to + (r / 16 * (deep / 32) + d / 32) * WORDS + r % 16 * W, r < rows ? paired(x + r * apart + d, width - d) : V{});
}

// Keys as tiles of the right side: [keys / 16][deep / 32][16 pairs][16 keys].
template <typename T>
void lay_keys(const T* x, int64_t apart, const Sizes& s, float* to) {
    V rows[W];
    for (int64_t key = 0; key < s.wide(); key += W)
        for (int64_t d = 0; d < s.deep(); d += 32, to += WORDS) {
            for (int64_t r = 0; r < W; r++) rows[r] = key + r < s.keys ? paired(x + (key + r) * apart + d, s.width - d) : V{};
            transpose_stages<1>(rows);
            for (int64_t r = 0; r < W; r++) store(to + r * W, rows[r]);
        }
}

// Values so: [keys / 32][deep / 16][16 pairs of keys][16].
template <typename T>
void lay_values(const T* x, int64_t apart, const Sizes& s, float* to) {
    for (int64_t key = 0; key < s.wide(); key += 32)
        for (int64_t d = 0; d < s.deep(); d += W, to += WORDS)
            for (int64_t pair = 0; pair < W; pair++) {
                const int64_t first = key + 2 * pair;
                const VU low = first < s.keys ? spread(x + first * apart + d, s.width - d) : VU{};
                const VU high = first + 1 < s.keys ? spread(x + (first + 1) * apart + d, s.width - d) : VU{};
                store(to + pair * W, (V)(low | high << 16));
            }
}

// out (32, 32), `apart` floats from row to row: sums over `steps` of tiles of a, the two halves of its rows `of_a` words apart, and of b, whose
// two columns are `of_column` words apart and its steps `of_step`.
inline void multiply(const float* a, int64_t of_a, const float* b, int64_t of_column, int64_t of_step, int64_t steps, float* out, int64_t apart) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
        _tile_loadd(4, a + step * WORDS, STEP);
        _tile_loadd(6, b + step * of_step, STEP);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + step * of_step + of_column, STEP);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + of_a + step * WORDS, STEP);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, apart * 4);
    _tile_stored(1, out + W, apart * 4);
    _tile_stored(2, out + 16 * apart, apart * 4);
    _tile_stored(3, out + 16 * apart + W, apart * 4);
}

// Scores of a row that it sees, in base 2; minus infinity where it does not, and beyond `seen`.
inline V score(const float* scores, int64_t key, int64_t seen, float scale, const void* mask, bool added) {
    const int64_t here = seen - key;
    V v = load(scores + key) * scale;
    if (mask && added) v = v + some_of(static_cast<const float*>(mask) + key, here) * LOG2_E;
    if (mask && !added) {
        const __mmask16 there = here < W ? (__mmask16)((1u << here) - 1) : (__mmask16)-1;
        const __m128i bytes = _mm_maskz_loadu_epi8(there, static_cast<const uint8_t*>(mask) + key);
        const __mmask16 shown = _mm_test_epi8_mask(bytes, bytes);
        v = (V)_mm512_mask_blend_ps(shown, _mm512_set1_ps(-INFINITY), (__m512)v);
    }
    if (here < W) v = (V)_mm512_mask_blend_ps((__mmask16)((1u << here) - 1), _mm512_set1_ps(-INFINITY), (__m512)v);
    return v;
}

// 2^t for t <= 0 to 3e-06, less than a weight is rounded by: the best polynomial of degree 4 on [-1/2, 1/2]. NaN stays one.
inline V weight_of(V t) {
    const __m512 within = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)t), whole = _mm512_roundscale_ps(within, 0);
    const V f = (V)within - (V)whole;
    V p = f * 0.00957010144f + 0.0559178603f;
    p = p * f + 0.240247448f;
    p = p * f + 0.693121815f;
    p = p * f + 0.999999261f;
    return (V)_mm512_scalef_ps((__m512)p, whole);
}

// The weights of a row's keys, unnormalised, as a row of left tiles; returns the inverse of their sum, 0 where nothing is seen.
float weigh(float* scores, int64_t seen, int64_t wide, float scale, const void* mask, bool added, float* to) {
    V most = V{} - INFINITY, sums = {};
    for (int64_t key = 0; key < seen; key += W) {
        const V v = score(scores, key, seen, scale, mask, added);
        store(scores + key, v);
        most = v > most ? v : most;
    }
    const float largest = _mm512_reduce_max_ps((__m512)most), from = largest == -INFINITY ? 0.0f : largest;
    for (int64_t key = 0; key < wide; key += 32) {
        V e[2];
        for (int half = 0; half < 2; half++) {
            e[half] = key + half * W < seen ? weight_of(load(scores + key + half * W) - from) : V{};
            sums = sums + e[half];
        }
        store(to + key / 32 * WORDS, (V)_mm512_cvtne2ps_pbh((__m512)e[1], (__m512)e[0]));
    }
    const float sum = _mm512_reduce_add_ps((__m512)sums);
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// Queries [top, top + rows) of one head, of keys and values that are laid.
template <typename T>
void attend(const Sizes& s, const Room& room, const T* q, int64_t of_q, int64_t top, int64_t rows, const char* mask, int64_t of_mask,
            bool added, bool causal, float scale, float* out, int64_t of_out) {
    const int64_t seen = causal ? std::min(s.keys, top + rows) : s.keys, wide = up(seen, 32), deep = s.deep();
    lay_rows(q + top * of_q, of_q, rows, s.width, deep, room.queries);
    for (int64_t key = 0; key < wide; key += 32)
        multiply(room.queries, deep / 32 * WORDS, room.keys + key * deep / 2, deep / 32 * WORDS, WORDS, deep / 32, room.scores + key, s.wide());
    float inverse[ROWS];
    for (int64_t r = 0; r < ROWS; r++) {
        float* to = room.weights + r / 16 * (wide / 32) * WORDS + r % 16 * W;
        if (r < rows) {
            const int64_t own = causal ? std::min(seen, top + r + 1) : seen;
            inverse[r] = weigh(room.scores + r * s.wide(), own, wide, scale * LOG2_E, mask ? mask + (top + r) * of_mask : nullptr, added, to);
        } else {
            for (int64_t key = 0; key < wide; key += 32) store(to + key / 32 * WORDS, V{});
        }
    }
    for (int64_t d = 0; d < deep; d += 32) {
        multiply(room.weights, wide / 32 * WORDS, room.values + d / W * WORDS, WORDS, deep / W * WORDS, wide / 32, room.out, ROWS);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = d; i < std::min(s.width, d + 32); i += W) {
                const V v = inverse[r] == 0.0f ? V{} : load(room.out + r * ROWS + i - d) * inverse[r];
                put(out + (top + r) * of_out + i, v, s.width - i);
            }
    }
}

template <typename T>
void all_heads(const T* q, const T* k, const T* v, const void* mask, float* out, const int64_t* sizes, const int64_t* of_q, const int64_t* of_k,
               const int64_t* of_v, const int64_t* of_out, const int64_t* of_mask, int64_t added, int64_t causal, float scale, float* scratch,
               int64_t apart, int64_t threads) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    const int64_t unit = added ? 4 : 1;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Tiles tiles;
        tiles.of(TILE_ROWS, TILE_ROWS);
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t b = 0; b < s.batch; b++)
            for (int64_t h = 0; h < s.heads; h++) {
                const Room room(scratch + omp_get_thread_num() * apart, s);
                const int64_t g = h / (s.heads / s.groups);
                lay_keys(k + b * of_k[0] + g * of_k[1], of_k[2], s, room.keys);
                lay_values(v + b * of_v[0] + g * of_v[1], of_v[2], s, room.values);
                const char* seen = mask ? static_cast<const char*>(mask) + (b * of_mask[0] + h * of_mask[1]) * unit : nullptr;
                for (int64_t top = 0; top < s.queries; top += ROWS)
                    attend(s, room, q + b * of_q[0] + h * of_q[1], of_q[2], top, std::min(ROWS, s.queries - top), seen, of_mask[2] * unit,
                           added, causal, scale, out + b * of_out[0] + h * of_out[1], of_out[2]);
            }
    }
}

}  // namespace

extern "C" int64_t permitted() { return tiles_permitted(); }

// Floats of `scratch` that each thread needs.
extern "C" int64_t scratch_floats(const int64_t* sizes) {
    return up(Room::floats({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]}), 16);
}

// q (batch, heads, queries, width) and k, v (batch, groups, keys, width), with strides of (batch, heads, rows), in elements, and numbers of a
// row side by side → out likewise, in fp32; q, k, v are fp32 or, `narrow`, bf16. `causal`: query i sees keys up to i. `scratch` is 64 bytes aligned.
extern "C" void attention_tiles(const void* q, const void* k, const void* v, const void* mask, float* out, const int64_t* sizes, const int64_t* of_q,
                                const int64_t* of_k, const int64_t* of_v, const int64_t* of_out, const int64_t* of_mask, int64_t added,
                                int64_t causal, int64_t narrow, float scale, float* scratch, int64_t threads) {
    const auto run = [&](auto* none) {
        typedef decltype(none) At;
        all_heads((At)q, (At)k, (At)v, mask, out, sizes, of_q, of_k, of_v, of_out, of_mask, added, causal, scale, scratch, scratch_floats(sizes), threads);
    };
    if (narrow) run((const uint16_t*)nullptr);
    else run((const float*)nullptr);
}
