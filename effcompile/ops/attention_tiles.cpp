// Attention of fp32 numbers whose products are of bf16 tiles: softmax(q kᵀ scale + mask) v, sums and softmax in fp32.
//
// One head at a time: its keys and values are laid as tiles read them, then queries are taken 32 at a time, against all keys they may see.
// All scores of those are held, so that the softmax is the ordinary one. Needs AVX512-BF16.

#define WIDTH 16
#include "bf16_tiles.h"

#include <omp.h>
#include <utility>

namespace {

constexpr int64_t FORESEEN = 2048;  // keys of a head that the caches have room for beside those of another one

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

int64_t floats_of(const Sizes& s) { return up(Room::floats(s), 16); }

// The weights of a row's keys, unnormalised, as a row of left tiles; returns the inverse of their sum, 0 where nothing is seen.
float weigh(float* scores, int64_t seen, int64_t wide, float scale, const void* mask, bool added, float* to) {
    V most = V{} - INFINITY, sums = {};
    for (int64_t key = 0; key < seen; key += W) {
        const V v = score(scores, key, seen, scale, mask, added);
        store(scores + key, v);
        most = (V)_mm512_max_ps((__m512)v, (__m512)most);
    }
    const float largest = _mm512_reduce_max_ps((__m512)most), from = largest == -INFINITY ? 0.0f : largest;
    for (int64_t key = 0; key < wide; key += 32) {
        V e[2];
        for (int half = 0; half < 2; half++) {
            e[half] = key + half * W < seen ? weight_of((load(scores + key + half * W) - from) * LOG2_E) : V{};
            sums = sums + e[half];
        }
        store(to + key / 32 * WORDS, (V)_mm512_cvtne2ps_pbh((__m512)e[1], (__m512)e[0]));
    }
    const float sum = _mm512_reduce_add_ps((__m512)sums);
    return sum == 0.0f ? 0.0f : 1.0f / sum;
}

// One head as it is given, rows so many numbers apart.
template <typename T>
struct Head {
    const T *q, *k, *v;
    float* out;
    int64_t of_q, of_k, of_v, of_out;
};

// While one row's weights are computed, which leaves the caches idle, what is written of it comes nearer, and its share of the rows of the next
// head: those of a head are too far apart to be foreseen, and together more than can be waited for at once.
template <typename T>
struct Ahead {
    const Sizes& s;
    const Head<T>&head, &next;  // the same of the last one
    int64_t keys;               // of the next one, 0 if they are the same
    int64_t share = s.queries ? (keys + s.queries - 1) / s.queries : 0;

    __attribute__((always_inline)) void of(const T* row) const {
        for (int64_t i = 0; i < s.width; i += 64 / (int64_t)sizeof(T)) _mm_prefetch(reinterpret_cast<const char*>(row + i), _MM_HINT_T1);
    }
    __attribute__((always_inline)) void ask(int64_t row) const {
        for (int64_t i = 0; i < s.width; i += 16) __builtin_prefetch(head.out + row * head.of_out + i, 1);
        if (next.q != head.q) of(next.q + row * next.of_q);
        for (int64_t key = row * share; key < std::min(keys, (row + 1) * share); key++) of(next.k + key * next.of_k), of(next.v + key * next.of_v);
    }
};

// Queries [top, top + rows) of one head, of keys and values that are laid. `same`: its mask is of bools, one for all keys of a query.
template <typename T>
void attend(const Sizes& s, const Room& room, const Head<T>& head, const Ahead<T>& ahead, int64_t top, int64_t rows, const char* mask,
            int64_t of_mask, bool same, bool added, bool causal, float scale) {
    const int64_t seen = causal ? std::min(s.keys, top + rows) : s.keys, wide = up(seen, 32), deep = s.deep();
    lay_rows(head.q + top * head.of_q, head.of_q, rows, s.width, deep, room.queries);
    for (int64_t key = 0; key < wide; key += 32)
        multiply(room.queries, deep / 32 * WORDS, room.keys + key * deep / 2, deep / 32 * WORDS, WORDS, deep / 32, room.scores + key, s.wide());
    float inverse[ROWS];
    for (int64_t r = 0; r < ROWS; r++) {
        float* to = room.weights + r / 16 * (wide / 32) * WORDS + r % 16 * W;
        if (r < rows) {
            ahead.ask(top + r);
            const char* of_row = mask ? mask + (top + r) * of_mask : nullptr;
            const int64_t own = same && !*of_row ? 0 : causal ? std::min(seen, top + r + 1) : seen;
            inverse[r] = weigh(room.scores + r * s.wide(), own, wide, scale, same ? nullptr : of_row, added, to);
        } else {
            for (int64_t key = 0; key < wide; key += 32) store(to + key / 32 * WORDS, V{});
        }
    }
    for (int64_t d = 0; d < deep; d += 32) {
        multiply(room.weights, wide / 32 * WORDS, room.values + d / W * WORDS, WORDS, deep / W * WORDS, wide / 32, room.out, ROWS);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = d; i < std::min(s.width, d + 32); i += W) {
                const V v = inverse[r] == 0.0f ? V{} : load(room.out + r * ROWS + i - d) * inverse[r];
                put(head.out + (top + r) * head.of_out + i, v, s.width - i);
            }
    }
}

template <typename T>
void all_heads(const T* q, const T* k, const T* v, const void* mask, float* out, const int64_t* told, const int64_t* of_mask, int64_t masked,
               int64_t causal, float scale, float* scratch, int64_t threads) {
    const Sizes s{told[0], told[1], told[2], told[3], told[4], told[5]};
    const int64_t *of_q = told + 7, *of_k = of_q + 3, *of_v = of_k + 3, *of_out = of_v + 3;
    const bool added = masked == 2, same = masked && !of_mask[3];
    const int64_t unit = added ? 4 : 1, apart = floats_of(s);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Tiles tiles;
        tiles.of(TILE_ROWS, TILE_ROWS);
        const Room room(scratch + omp_get_thread_num() * apart, s);
        const auto head_of = [&](int64_t at) {
            const int64_t b = at / s.heads, h = at % s.heads, g = h / (s.heads / s.groups);
            return Head<T>{q + b * of_q[0] + h * of_q[1], k + b * of_k[0] + g * of_k[1], v + b * of_v[0] + g * of_v[1],
                           out + b * of_out[0] + h * of_out[1], of_q[2], of_k[2], of_v[2], of_out[2]};
        };
        std::pair<const T*, const T*> laid;
#pragma omp for schedule(static)
        for (int64_t at = 0; at < s.batch * s.heads; at++) {
            const Head<T> head = head_of(at), next = head_of(std::min(at + 1, s.batch * s.heads - 1));
            if (laid != std::pair(head.k, head.v)) {
                lay_keys(head.k, head.of_k, s, room.keys);
                lay_values(head.v, head.of_v, s, room.values);
                laid = {head.k, head.v};
            }
            const Ahead<T> ahead{s, head, next, std::pair(next.k, next.v) != laid && s.keys <= FORESEEN ? s.keys : 0};
            const int64_t b = at / s.heads, h = at % s.heads;
            const char* seen = masked ? static_cast<const char*>(mask) + (b * of_mask[0] + h * of_mask[1]) * unit : nullptr;
            for (int64_t top = 0; top < s.queries; top += ROWS)
                attend(s, room, head, ahead, top, std::min(ROWS, s.queries - top), seen, of_mask[2] * unit, same, added, causal, scale);
        }
    }
}

}  // namespace

extern "C" int64_t permitted() { return tiles_permitted(); }

// Floats of `scratch` that each thread needs.
extern "C" int64_t scratch_floats(const int64_t* told) { return floats_of({told[0], told[1], told[2], told[3], told[4], told[5]}); }

// Told as fp32_attention (fp32_attention.cpp) is, of values as wide as queries: q (batch, heads, queries, width) and k, v (batch, groups, keys,
// width) → out likewise. q, k, v are fp32, and by the second bf16.
#define EACH_ARGUMENT(T)                                                                                                                \
    const T *q, const T *k, const T *v, const void *mask, float *out, const int64_t *told, const int64_t *of_mask, int64_t masked, int64_t causal, \
        float scale, float *scratch, int64_t threads

extern "C" void attention_tiles(EACH_ARGUMENT(float)) {
    all_heads(q, k, v, mask, out, told, of_mask, masked, causal, scale, scratch, threads);
}

extern "C" void attention_tiles_narrow(EACH_ARGUMENT(uint16_t)) {
    all_heads(q, k, v, mask, out, told, of_mask, masked, causal, scale, scratch, threads);
}
