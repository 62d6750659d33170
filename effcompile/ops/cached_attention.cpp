// Attention of few queries over a cache on a CPU: keys and values, in fp32, bf16 or 8 bits, are read once for all queries that share them.
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

enum Form { WIDE, BF16, CODES };  // of a row: fp32, bf16, or s8 and behind them their scale in fp32

inline int64_t bytes_of(int64_t form) { return form == WIDE ? 4 : form == BF16 ? 2 : 1; }  // of an element as it is held

struct Rows {  // of keys or of values of one head
    const void* at;
    int64_t stride, width, form;

    // `count` rows from row `from` as fp32, `apart` floats apart; `room` holds them where they have to be made.
    const float* dense(int64_t from, int64_t count, float* room, int64_t* apart) const {
        if (form == WIDE) {
            *apart = stride;
            return static_cast<const float*>(at) + from * stride;
        }
        *apart = width;
        for (int64_t row = 0; form == CODES && row < count; row++) {
            const int8_t* p = static_cast<const int8_t*>(at) + (from + row) * stride;
            float scale;
            std::memcpy(&scale, p + width, 4);
            for (int64_t i = 0; i < width; i++) room[row * width + i] = p[i] * scale;
        }
        for (int64_t row = 0; form == BF16 && row < count; row++) {
            const uint16_t* p = static_cast<const uint16_t*>(at) + (from + row) * stride;
            uint32_t* words = reinterpret_cast<uint32_t*>(room + row * width);
            for (int64_t i = 0; i < width; i++) words[i] = (uint32_t)p[i] << 16;
        }
        return room;
    }
};

template <bool WHOLE>
inline V some_of(const float* p, int64_t count) {
    return WHOLE || count >= W ? load(p) : (V)words_of(p, std::max<int64_t>(count, 0));
}

// Products of a query with W keys, one after the other: memory is read in order. (Sixteen at once read a cache in DRAM at a third of its speed.)
template <bool WHOLE>
inline V products(const float* q, const float* keys, int64_t apart, int64_t width) {
    V sums[W];
    for (int key = 0; key < W; key++, keys += apart) {
        V sum = {};
        for (int64_t i = 0; i < width; i += W) {
            sum = sum + some_of<WHOLE>(q + i, width - i) * some_of<WHOLE>(keys + i, width - i);
            __builtin_prefetch(keys + i + AHEAD * apart, 0, 2);
        }
        sums[key] = sum;
    }
    return lane_sums<W / 2>(sums);
}

// Those with the last keys, fewer than W.
inline V products_of_rest(const float* q, const float* keys, int64_t apart, int64_t count, int64_t width) {
    V made = {};
    for (int64_t key = 0; key < count; key++) {
        float sum = 0;
        for (int64_t i = 0; i < width; i++) sum += q[i] * keys[key * apart + i];
        made[key] = sum;
    }
    return made;
}

// out += the sum of values by weights, of `count` rows. NV vectors of columns stay in registers.
template <int NV, bool WHOLE>
inline void gather(const float* weights, const float* values, int64_t apart, int64_t count, int64_t columns, float* out) {
    V sums[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sums[v] = some_of<WHOLE>(out + v * W, columns - v * W);
    for (int64_t key = 0; key < count; key++) {
        const float weight = weights[key];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            sums[v] = sums[v] + weight * some_of<WHOLE>(values + key * apart + v * W, columns - v * W);
            __builtin_prefetch(values + (key + AHEAD) * apart + v * W, 0, 2);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) std::memcpy(out + v * W, &sums[v], WHOLE ? W * 4 : std::max<int64_t>(0, std::min<int64_t>(W, columns - v * W)) * 4);
}

// All columns.
inline void gathered(const float* weights, const float* values, int64_t apart, int64_t count, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + 8 * W <= width; i += 8 * W) gather<8, true>(weights, values + i, apart, count, width - i, out + i);
    for (; i + 4 * W <= width; i += 4 * W) gather<4, true>(weights, values + i, apart, count, width - i, out + i);
    for (; i < width; i += 2 * W) gather<2, false>(weights, values + i, apart, count, width - i, out + i);
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
                                 int64_t key_form, int64_t value_form, int64_t added, float scale, float* scratch, int64_t scratch_apart, int64_t threads) {
    const int64_t batch = sizes[0], groups = sizes[1], shared = sizes[2], queries = sizes[3], keys = sizes[4], width = sizes[5];
    const int64_t padded = (keys + W - 1) / W * W;
#pragma omp parallel for num_threads((int)threads) if (threads > 1 && batch * groups > 1)
    for (int64_t task = 0; task < batch * groups; task++) {
        const int64_t b = task / groups, head = task % groups;
        float *scores = scratch + omp_get_thread_num() * scratch_apart, *room = scores + shared * queries * padded;
        const Rows of_keys{(const char*)k + (b * of_k[0] + head * of_k[1]) * bytes_of(key_form), of_k[2], width, key_form};
        const Rows of_values{(const char*)v + (b * of_v[0] + head * of_v[1]) * bytes_of(value_form), of_v[2], width, value_form};
        int64_t apart;
        for (int64_t from = 0; from < keys; from += KEYS) {
            const int64_t count = std::min(KEYS, keys - from);
            const float* rows = of_keys.dense(from, count, room, &apart);
            for (int64_t r = 0; r < shared * queries; r++) {
                const float* query = q + b * of_q[0] + (head * shared + r / queries) * of_q[1] + r % queries * of_q[2];
                for (int64_t key = 0; key < count; key += W) {
                    const float* of = rows + key * apart;
                    const V made = count - key < W ? products_of_rest(query, of, apart, count - key, width)
                                   : width % W     ? products<false>(query, of, apart, width)
                                                   : products<true>(query, of, apart, width);
                    store(scores + r * padded + from + key, made * scale);
                }
            }
        }
        float inverse[ROWS];
        for (int64_t r = 0; r < shared * queries; r++) {
            float* row = scores + r * padded;
            const int64_t at = b * of_mask[0] + (head * shared + r / queries) * of_mask[1] + r % queries * of_mask[2];
            for (int64_t key = 0; mask && key < keys; key++)
                row[key] = added ? row[key] + ((const float*)mask)[at + key] : ((const uint8_t*)mask)[at + key] ? row[key] : -INFINITY;
            for (int64_t key = keys; key < padded; key++) row[key] = -INFINITY;
            inverse[r] = softmax(row, padded);
            float* result = out + ((b * queries + r % queries) * groups * shared + head * shared + r / queries) * width;
            std::memset(result, 0, width * 4);
        }
        for (int64_t from = 0; from < keys; from += KEYS) {
            const int64_t count = std::min(KEYS, keys - from);
            const float* rows = of_values.dense(from, count, room, &apart);
            for (int64_t r = 0; r < shared * queries; r++) {
                float* result = out + ((b * queries + r % queries) * groups * shared + head * shared + r / queries) * width;
                gathered(scores + r * padded + from, rows, apart, count, width, result);
            }
        }
        for (int64_t r = 0; r < shared * queries; r++) {
            float* result = out + ((b * queries + r % queries) * groups * shared + head * shared + r / queries) * width;
            for (int64_t i = 0; i < width; i++) result[i] *= inverse[r];
        }
    }
}
