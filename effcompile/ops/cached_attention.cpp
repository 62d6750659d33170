// Attention of few queries over a cache on a CPU: keys and values, in fp32, bf16, 8 or 4 bits, are read once for all queries that share them.
//
// Compiled once per instruction set by machine/native.py, which passes WIDTH, the 32-bit words of a vector register.
// Of a head of keys all scores are made first, then their softmax, then the sum of values: both passes read memory in order.

#define KIND 0
#include "integers.h"

#include <omp.h>

namespace {

constexpr int64_t ROWS = 512;  // queries that may share a head of keys
constexpr int64_t KEYS = 64;   // keys whose rows are held as fp32 at once, in the L1 cache
constexpr int64_t AHEAD = 32;  // keys that are fetched before they are multiplied

// Of a row: fp32, bf16, s8 and behind them their scale in fp32, or pairs of 4 bits and behind them scales in bf16 (cache_rows.py).
enum Form { WIDE, BF16, CODES, PAIRS };

inline int64_t bytes_of(int64_t form) { return form == WIDE ? 4 : form == BF16 ? 2 : 1; }  // of an element as it is held

// W bytes, or halves, as whole numbers.
#if WIDTH == 16
inline VI words_at(const int8_t* p) { return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const uint8_t* p) { return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const uint16_t* p) { return (VI)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#elif WIDTH == 8
inline VI words_at(const uint16_t* p) { return (VI)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const int8_t* p) { return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const uint8_t* p) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
#else
inline VI words_at(const int8_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
inline VI words_at(const uint8_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
inline VI words_at(const uint16_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
#endif

inline float as_float(uint32_t word) {
    float made;
    std::memcpy(&made, &word, 4);
    return made;
}

inline float bf16_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    return as_float((uint32_t)half << 16);
}

inline void widen_bf16(const uint16_t* p, int64_t width, float* to) {
    uint32_t* words = reinterpret_cast<uint32_t*>(to);
    int64_t i = 0;
    for (; W > 4 && i + W <= width; i += W) store(to + i, (V)(words_at(p + i) << 16));
    for (; i < width; i++) words[i] = (uint32_t)p[i] << 16;
}

inline void widen_codes(const int8_t* p, int64_t width, float* to) {
    float scale;
    std::memcpy(&scale, p + width, 4);
    int64_t i = 0;
    for (; W > 4 && i + W <= width; i += W) store(to + i, as_floats(words_at(p + i)) * scale);
    for (; i < width; i++) to[i] = p[i] * scale;
}

// A whole group of 32: a code is looked up among what 16 of them stand for, or raised numbers are lowered.
inline void widen_group(const uint8_t* pairs, float scale, float* to) {
#if WIDTH == 16
    const V table = (V{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - 8.0f) * scale;
#endif
    for (int64_t i = 0; i < 16; i += W) {
        const VI words = words_at(pairs + i);
#if WIDTH == 16  // of an index its lowest four bits are read
        store(to, (V)_mm512_permutexvar_ps((__m512i)words, (__m512)table));
        store(to + 16, (V)_mm512_permutexvar_ps((__m512i)(words >> 4), (__m512)table));
#else
        store(to + i, as_floats((words & 15) - 8) * scale);
        store(to + 16 + i, as_floats((words >> 4) - 8) * scale);
#endif
    }
}

inline void widen_pairs(const uint8_t* p, int64_t width, float* to) {
    const uint8_t* scales = p + width / 2;
    int64_t i = 0;
    for (; i + 32 <= width; i += 32, p += 16, scales += 2) widen_group(p, bf16_at(scales), to + i);
    const int64_t half = (width - i) / 2;
    const float scale = half ? bf16_at(scales) : 0.0f;
    for (int64_t at = 0; at < half; at++) {
        to[i + at] = ((p[at] & 15) - 8) * scale;
        to[i + half + at] = ((p[at] >> 4) - 8) * scale;
    }
}

struct Rows {  // of keys or of values of one head
    const void* at;
    int64_t stride, width, form;

    // `count` rows from row `from` as fp32, `apart` floats apart; `room` holds them where they have to be made.
    const float* dense(int64_t from, int64_t count, float* room, int64_t* apart) const {
        *apart = form == WIDE ? stride : width;
        const char* p = static_cast<const char*>(at) + from * stride * bytes_of(form);
        if (form == WIDE) return reinterpret_cast<const float*>(p);
        for (int64_t row = 0; row < count; row++, p += stride * bytes_of(form)) {
            float* to = room + row * width;
            if (form == BF16) widen_bf16(reinterpret_cast<const uint16_t*>(p), width, to);
            else if (form == CODES) widen_codes(reinterpret_cast<const int8_t*>(p), width, to);
            else widen_pairs(reinterpret_cast<const uint8_t*>(p), width, to);
        }
        return room;
    }
};

// C: vectors of a row; 0 where it is told at run time, or ends within one.
template <int C>
inline V part_of(const float* p, int64_t count) {
    return C || count >= W ? load(p) : (V)words_of(p, std::max<int64_t>(count, 0));
}

// Products of Q queries with `count` keys, W / Q at the most, one after the other: memory is read in order, a key once for all of them.
// (Sixteen keys at once read a cache in DRAM at a third of its speed.)
template <int Q, int C>
inline void products(const float* const* q, const float* keys, int64_t apart, int64_t count, int64_t width, bool ahead, float scale,
                     float* scores, int64_t scores_apart) {
    constexpr int K = W / Q;
    V sums[W] = {};
#pragma GCC unroll 16
    for (int key = 0; key < K; key++) {
        if (key >= count) break;
        V mine[Q] = {};
#pragma GCC unroll 8
        for (int64_t i = 0; i < (C ? C * W : width); i += W) {
            const V of = part_of<C>(keys + key * apart + i, width - i);
#pragma GCC unroll 4
            for (int x = 0; x < Q; x++) mine[x] = mine[x] + part_of<C>(q[x] + i, width - i) * of;
            if (ahead) __builtin_prefetch(keys + (key + AHEAD) * apart + i, 0, 2);
        }
#pragma GCC unroll 4
        for (int x = 0; x < Q; x++) sums[x * K + key] = mine[x];
    }
    const V made = lane_sums<W / 2>(sums) * scale;
    for (int x = 0; x < Q; x++) std::memcpy(scores + x * scores_apart, reinterpret_cast<const float*>(&made) + x * K, K * 4);
}

// out += the sum of values by weights, of `count` rows, for Q queries. NV vectors of columns of each stay in registers.
template <int Q, int NV, int C>
inline void gather(const float* weights, int64_t weights_apart, const float* values, int64_t apart, int64_t count, int64_t columns, bool ahead,
                   float* const* out, int64_t from) {
    V sums[Q][NV];
#pragma GCC unroll 4
    for (int x = 0; x < Q; x++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) sums[x][v] = part_of<C>(out[x] + from + v * W, columns - v * W);
    for (int64_t key = 0; key < count; key++) {
        V rows[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            rows[v] = part_of<C>(values + key * apart + v * W, columns - v * W);
            if (ahead) __builtin_prefetch(values + (key + AHEAD) * apart + v * W, 0, 2);
        }
#pragma GCC unroll 4
        for (int x = 0; x < Q; x++) {
            const float weight = weights[x * weights_apart + key];
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) sums[x][v] = sums[x][v] + weight * rows[v];
        }
    }
#pragma GCC unroll 4
    for (int x = 0; x < Q; x++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++)
            std::memcpy(out[x] + from + v * W, &sums[x][v], C ? W * 4 : std::max<int64_t>(0, std::min<int64_t>(W, columns - v * W)) * 4);
}

// Keys or values of one block for Q queries: their scores, or what is added to their results.
template <int Q, int C>
inline void scored(const float* const* q, const float* keys, int64_t apart, int64_t count, int64_t width, bool ahead, float scale,
                   float* scores, int64_t scores_apart) {
    for (int64_t key = 0; key < count; key += W / Q)
        products<Q, C>(q, keys + key * apart, apart, count - key, width, ahead, scale, scores + key, scores_apart);
}
template <int Q>
inline void gathered(const float* weights, int64_t weights_apart, const float* values, int64_t apart, int64_t count, int64_t width, bool ahead,
                     float* const* out) {
    constexpr int NV = W == 16 || Q == 1 ? 4 : 2;  // as many as registers hold
    int64_t i = 0;
    for (; i + NV * W <= width; i += NV * W) gather<Q, NV, 1>(weights, weights_apart, values + i, apart, count, width - i, ahead, out, i);
    for (; i < width; i += 2 * W) gather<Q, 2, 0>(weights, weights_apart, values + i, apart, count, width - i, ahead, out, i);
}

// Of all queries, as many at a time as there are.
template <int C>
void scored_by_all(const float* const* q, int64_t rows, const float* keys, int64_t apart, int64_t count, int64_t width, bool ahead, float scale,
                   float* scores, int64_t scores_apart) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) scored<4, C>(q + r, keys, apart, count, width, ahead && !r, scale, scores + r * scores_apart, scores_apart);
    for (; r + 2 <= rows; r += 2) scored<2, C>(q + r, keys, apart, count, width, ahead && !r, scale, scores + r * scores_apart, scores_apart);
    for (; r < rows; r++) scored<1, C>(q + r, keys, apart, count, width, ahead && !r, scale, scores + r * scores_apart, scores_apart);
}

// Scores as e^(score - largest), in place; returns one over their sum, 0 where no key is seen.
inline float softmax(float* scores, int64_t count) {
    V most = V{} - INFINITY;
    for (int64_t i = 0; i < count; i += W) {
        const V here = load(scores + i);
        most = where(here > most, here, most);
    }
    float largest = most[0];
    for (int lane = 1; lane < W; lane++) largest = std::max(largest, most[lane]);
    if (largest == -INFINITY) {
        std::memset(scores, 0, count * 4);
        return 0.0f;
    }
    V sums = {};
    for (int64_t i = 0; i < count; i += W) {
        const V score = load(scores + i), e = power_of_two((score - largest) * 1.4426950408889634f);
        const V kept = where(score == -INFINITY, V{}, where(score == score, e, score));
        store(scores + i, kept);
        sums = sums + kept;
    }
    float sum = 0;
    for (int lane = 0; lane < W; lane++) sum += sums[lane];
    return 1.0f / sum;
}

}  // namespace

// q (B, groups * shared, S, D) -> out (B, S, groups * shared, D), dense; k and v (B, groups, K, D) with rows of adjacent elements. Strides are
// in elements: of q (b, h, s), of k and of v (b, h, row), of the mask (b, h, s); an element of a mask is a bool or a float that is added.
// `scratch` holds for each thread shared * S rows of K floats, rounded up to vectors, and KEYS * D floats.
extern "C" void cached_attention(const float* q, const void* k, const void* v, const void* mask, float* out, const int64_t* sizes,
                                 const int64_t* of_q, const int64_t* of_k, const int64_t* of_v, const int64_t* of_mask,
                                 int64_t key_form, int64_t value_form, int64_t added, float scale, float* scratch, int64_t scratch_apart,
                                 int64_t threads) {
    const int64_t batch = sizes[0], groups = sizes[1], shared = sizes[2], queries = sizes[3], keys = sizes[4], width = sizes[5];
    const int64_t padded = (keys + W - 1) / W * W;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && batch * groups > 1)
    for (int64_t task = 0; task < batch * groups; task++) {
        const int64_t b = task / groups, head = task % groups;
        float *scores = scratch + omp_get_thread_num() * scratch_apart, *room = scores + shared * queries * padded;
        const Rows of_keys{(const char*)k + (b * of_k[0] + head * of_k[1]) * bytes_of(key_form), of_k[2], width, key_form};
        const Rows of_values{(const char*)v + (b * of_v[0] + head * of_v[1]) * bytes_of(value_form), of_v[2], width, value_form};
        const int64_t rows = shared * queries;
        const float* query[ROWS];
        float* result[ROWS];
        for (int64_t r = 0; r < rows; r++) {
            query[r] = q + b * of_q[0] + (head * shared + r / queries) * of_q[1] + r % queries * of_q[2];
            result[r] = out + ((b * queries + r % queries) * groups * shared + head * shared + r / queries) * width;
        }
        int64_t apart;
        for (int64_t from = 0; from < keys; from += KEYS) {
            const int64_t count = std::min(KEYS, keys - from);
            const float* of = of_keys.dense(from, count, room, &apart);
            const auto all = width == 4 * W ? scored_by_all<4> : width == 8 * W ? scored_by_all<8> : scored_by_all<0>;
            all(query, rows, of, apart, count, width, key_form == WIDE, scale, scores + from, padded);
        }
        float inverse[ROWS];
        for (int64_t r = 0; r < rows; r++) {
            float* row = scores + r * padded;
            const int64_t at = b * of_mask[0] + (head * shared + r / queries) * of_mask[1] + r % queries * of_mask[2];
            const float* add = added ? static_cast<const float*>(mask) + at : nullptr;
            const uint8_t* seen = mask && !added ? static_cast<const uint8_t*>(mask) + at : nullptr;
            for (int64_t key = 0; add && key < keys; key++) row[key] += add[key];
            for (int64_t key = 0; seen && key < keys; key++) row[key] = seen[key] ? row[key] : -INFINITY;
            for (int64_t key = keys; key < padded; key++) row[key] = -INFINITY;
            inverse[r] = softmax(row, padded);
            std::memset(result[r], 0, width * 4);
        }
        for (int64_t from = 0; from < keys; from += KEYS) {
            const int64_t count = std::min(KEYS, keys - from);
            const float *of = of_values.dense(from, count, room, &apart), *weights = scores + from;
            int64_t r = 0;
            const bool ahead = value_form == WIDE;
            for (; r + 4 <= rows; r += 4) gathered<4>(weights + r * padded, padded, of, apart, count, width, ahead && !r, result + r);
            for (; r + 2 <= rows; r += 2) gathered<2>(weights + r * padded, padded, of, apart, count, width, ahead && !r, result + r);
            for (; r < rows; r++) gathered<1>(weights + r * padded, padded, of, apart, count, width, ahead && !r, result + r);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < width; i++) result[r][i] *= inverse[r];
    }
}
