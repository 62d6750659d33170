// Attention of fp32 numbers by products of bytes: softmax(q kᵀ scale + mask) v, as int8_attention.py defines it. For AVX512-VNNI.
//
// Of a head the keys are quantised row by row and laid so that scores are sums of vectors of 16 keys, the values column by column. Then some
// queries at a time, so few that their scores stay in the L1 cache: products, the largest score of a query, weights of 8 bits, sums of values.

#define KIND 0
#include "integers.h"

#include <omp.h>

namespace {

constexpr int ROWS = 6, VECS = 4;      // of a tile: ROWS * VECS sums in registers
constexpr int64_t HELD = 32 * 1024;    // bytes of scores that stay in the L1 cache
constexpr int64_t QUERIES = 48;        // of a block at the most
constexpr int64_t PART = 192;          // queries of a task
constexpr float LOG2_E = 1.4426950408889634f;
enum Mask { NONE, SEEN, ADDED };

struct Sizes {
    int64_t batch, heads, groups, queries, keys, width, wide;  // wide: of a row of values
    int64_t depth() const { return up(width, 4); }
    int64_t extent() const { return up(keys, W); }
    int64_t columns() const { return up(wide, W); }
    int64_t at_once() const { return std::clamp<int64_t>(HELD / (extent() * 4) / ROWS * ROWS, ROWS, QUERIES); }
    // Bytes of one thread, each part of whole lines.
    int64_t bytes() const {
        return up(extent() * depth() + 8 * extent(), 64) + up(extent() * columns() + 8 * columns(), 64) + up(at_once() * extent() * 5, 64) +
               up(at_once() * (depth() + W), 64) + 64 * ROWS + W * up(depth(), 4 * W);
    }
};

struct Room {
    uint8_t* keys;
    float *of_keys, *hidden;  // scale of each key; 0, or -inf behind the last one
    int8_t* values;
    float* of_values;  // scale of each column; behind them what codes are made with
    float* scores;
    uint8_t* weights;
    int8_t* queries;
    float* most;      // of each row of a tile, W lanes
    int8_t* turning;  // codes of W keys
    Room(uint8_t* at, const Sizes& s) {
        keys = at, of_keys = (float*)(at + s.extent() * s.depth()), hidden = of_keys + s.extent();
        at += up(s.extent() * s.depth() + 8 * s.extent(), 64);
        values = (int8_t*)at, of_values = (float*)(at + s.extent() * s.columns());
        at += up(s.extent() * s.columns() + 8 * s.columns(), 64);
        scores = (float*)at, weights = at + s.at_once() * s.extent() * 4;
        at += up(s.at_once() * s.extent() * 5, 64);
        queries = (int8_t*)at, most = (float*)(at + up(s.at_once() * (s.depth() + W), 64));
        turning = (int8_t*)(most + W * ROWS);
    }
};

inline VI four(const void* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return word - VI{};
}
inline VI product(VI sum, VI whole, VI with_sign) { return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)whole, (__m512i)with_sign); }

// Sums of R rows of `a` (bytes, `a_apart` between rows) with N vectors of `b`, each of which is `b_apart` bytes long.
template <int R, int N, bool SIGNED_A>
inline void sums_of(VI (&sums)[R][N], const void* a, int64_t a_apart, const void* b, int64_t b_apart, int64_t quads) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) sums[r][v] = VI{};
    for (int64_t q = 0; q < quads; q++) {
        VI of[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) of[v] = load_ints((const char*)b + v * b_apart + q * 64);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const VI each = four((const char*)a + r * a_apart + q * 4);
#pragma GCC unroll 4
            for (int v = 0; v < N; v++) sums[r][v] = SIGNED_A ? product(sums[r][v], of[v], each) : product(sums[r][v], each, of[v]);
        }
    }
}

// Scores of R queries with N vectors of keys, without the queries' scales, and the largest of each lane.
template <int R, int N>
void score(const int8_t* q, const int32_t* lowered, const Room& room, const Sizes& s, int64_t key, float* to) {
    VI sums[R][N];
    sums_of<R, N, true>(sums, q, s.depth(), room.keys + key * s.depth(), s.depth() * W, s.depth() / 4);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        V most = load(room.most + r * W);
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) {
            const V z = as_floats(sums[r][v] - lowered[r]) * load(room.of_keys + key + v * W) + load(room.hidden + key + v * W);
            store(to + r * s.extent() + v * W, z);
            most = (V)_mm512_max_ps((__m512)z, (__m512)most);
        }
        store(room.most + r * W, most);
    }
}

// Results of R queries in N vectors of columns.
template <int R, int N>
void result(const uint8_t* weights, const float* inverse, const Room& room, const Sizes& s, int64_t column, int64_t quads, float* out, int64_t apart) {
    VI sums[R][N];
    sums_of<R, N, false>(sums, weights, s.extent(), room.values + column * s.extent(), s.extent() * W, quads);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) {
            const int64_t at = column + v * W;
            put(out + r * apart + at, as_floats(sums[r][v]) * (load(room.of_values + at) * inverse[r]), s.wide - at);
        }
}

typedef decltype(&score<1, 1>) Score;
typedef decltype(&result<1, 1>) Result;
template <size_t... I>
struct Tiles {
    static constexpr Score scores[] = {score<I / VECS + 1, I % VECS + 1>...};
    static constexpr Result results[] = {result<I / VECS + 1, I % VECS + 1>...};
};
template <size_t... I>
constexpr Tiles<I...> tiles_of(std::index_sequence<I...>) { return {}; }
typedef decltype(tiles_of(std::make_index_sequence<ROWS * VECS>())) All;

struct Head {
    const float *q, *k, *v;
    const char* mask;
    float* out;
    int64_t of_q, of_k, of_v, of_mask, of_out;  // floats between rows; bytes of the mask
    bool same;                                  // the mask says the same of all keys of a query
};

constexpr int64_t AHEAD = 8;  // rows that are asked for before they are read: those of a head are too far apart to be foreseen
inline void ask(const float* row, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(row + i);
}

// W keys at a time: their codes row by row, then turned as words of four.
void lay_keys(const Head& head, const Sizes& s, float scale, const Room& room) {
    const int64_t depth = s.depth(), apart = up(depth, 4 * W);
    for (int64_t key = 0; key < s.extent(); key += W) {
        for (int64_t r = 0; r < W; r++) {
            const bool there = key + r < s.keys;
            if (key + r + AHEAD < s.keys) ask(head.k + (key + r + AHEAD) * head.of_k, s.width);
            room.hidden[key + r] = there ? 0.0f : -INFINITY;
            room.of_keys[key + r] = 0.0f;
            if (there) quantize(head.k + (key + r) * head.of_k, s.width, depth, room.turning + r * apart, room.of_keys + key + r);
            else std::memset(room.turning + r * apart, 0, depth);
            room.of_keys[key + r] *= scale;
        }
        uint8_t* to = room.keys + key * depth;
        for (int64_t i = 0; i < depth; i += 4 * W) {
            V words[W];
#pragma GCC unroll 16
            for (int r = 0; r < W; r++) words[r] = (V)load_ints(room.turning + r * apart + i);
            transpose_stages<1>(words);
            const int64_t count = std::min<int64_t>(W, (depth - i) / 4);
            for (int r = 0; r < count; r++) store_ints(to + (i / 4 + r) * 4 * W, (VI)((VU)words[r] ^ 0x80808080u));
        }
    }
}

void lay_values(const Head& head, const Sizes& s, const Room& room) {
    const int64_t whole = s.wide / W * W;
    VI* most = reinterpret_cast<VI*>(room.of_values);  // magnitudes as bits, then scales
    VI* inverses = reinterpret_cast<VI*>(room.of_values + s.columns());
    for (int64_t i = 0; i < s.columns() / W; i++) most[i] = VI{};
    for (int64_t key = 0; key < s.keys; key++) {
        const float* row = head.v + key * head.of_v;
        if (key + AHEAD < s.keys) ask(row + AHEAD * head.of_v, s.wide);
        for (int64_t i = 0; i < s.columns(); i += W) {
            const VI here = (VI)(i < whole ? load(row + i) : some_of(row + i, s.wide - i)) & 0x7fffffff;
            most[i / W] = here > most[i / W] ? here : most[i / W];
        }
    }
    for (int64_t i = 0; i < s.columns() / W; i++) {
        V inverse;
        for (int lane = 0; lane < W; lane++) inverse[lane] = Codes::around(most[i][lane], room.of_values + i * W + lane).inverse;
        inverses[i] = (VI)inverse;
    }
    for (int64_t key = 0; key < s.extent(); key += 4)
        for (int64_t i = 0; i < s.columns(); i += W) {
            const V inverse = (V)inverses[i / W];
            VI word = {};
            for (int j = 0; j < 4 && key + j < s.keys; j++) {
                const float* from = head.v + (key + j) * head.of_v + i;
                const VI codes = rounded((i < whole ? load(from) : some_of(from, s.wide - i)) * inverse);
                word |= (inverse != 0.0f ? codes & 255 : VI{}) << (8 * j);
            }
            store_ints(room.values + i * s.extent() + key * W, word);
        }
}

// Scores as what is added to them has them, not in base 2: the least number that there is stays one. Those from `seen` on are hidden. Returns the
// largest; NaN if one is.
template <int MASK>
float masked(float* scores, float of_query, const char* mask, bool same, int64_t seen, int64_t extent) {
    V most = V{} - INFINITY;
    __mmask16 none = 0;
    for (int64_t i = 0; i < extent; i += W) {
        const int64_t count = std::min<int64_t>(W, seen - i);
        V z = load(scores + i) * of_query;
        if constexpr (MASK == ADDED) {
            const float* added = reinterpret_cast<const float*>(mask) + i;
            z = z + (count >= W ? load(added) : some_of(added, count));
        }
        __mmask16 here = count >= W ? 0xffff : count <= 0 ? 0 : (1 << count) - 1;
        if constexpr (MASK == SEEN) {
            __m128i bytes = _mm_set1_epi8(*mask);
            if (!same && count >= W) bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(mask + i));
            else if (!same) {
                bytes = _mm_setzero_si128();
                std::memcpy(&bytes, mask + i, std::max<int64_t>(count, 0));
            }
            here &= _mm_test_epi8_mask(bytes, bytes);
        }
        z = (V)_mm512_mask_blend_ps(here, _mm512_set1_ps(-INFINITY), (__m512)z);
        none |= _mm512_cmp_ps_mask((__m512)z, (__m512)z, _CMP_UNORD_Q);
        most = (V)_mm512_max_ps((__m512)z, (__m512)most);
        store(scores + i, z);
    }
    return none ? NAN : _mm512_reduce_max_ps((__m512)most);
}

// Weights of a query in 8 bits, the largest of which is 255, and their sum. 2^t: a polynomial of the fraction in [0, 1), good to 1e-4.
int32_t weigh(const float* scores, float most, float factor, int64_t extent, uint8_t* weights) {
    VI sums = {};
    for (int64_t i = 0; i < extent; i += W) {
        const V t = (load(scores + i) - most) * factor, f = (V)_mm512_reduce_ps((__m512)t, 0x09);
        V p = f * (255 * 0.0780244967f) + (255 * 0.2260672218f);
        p = p * f + (255 * 0.6958335009f);
        p = p * f + (255 * 0.9999252235f);
        const VI codes = rounded((V)_mm512_scalef_ps((__m512)p, (__m512)t));
        sums += codes;
        const VB bytes = as_bytes(codes);
        std::memcpy(weights + i, &bytes, W);
    }
    return sum_of_lanes(sums);
}

// Queries [top, top + rows) of one head whose keys and values are laid.
template <int MASK>
void attend(const Sizes& s, const Room& room, const Head& head, int64_t top, int64_t rows, bool causal) {
    float of_queries[QUERIES], inverse[QUERIES];
    int32_t lowered[QUERIES];
    const int64_t keys = causal ? std::min(s.keys, top + rows) : s.keys, extent = up(keys, W);
    for (int64_t r = 0; r < rows; r++) {
        const float* query = head.q + (top + r) * head.of_q;
        if (top + r + AHEAD < s.queries) ask(query + AHEAD * head.of_q, s.width);
        lowered[r] = quantize(query, s.width, s.depth(), room.queries + r * s.depth(), of_queries + r);
    }
    for (int64_t tile = 0; tile < rows; tile += ROWS) {
        const int64_t count = std::min<int64_t>(ROWS, rows - tile);
        float* scores = room.scores + tile * s.extent();
        for (int64_t i = 0; i < count * W; i += W) store(room.most + i, V{} - INFINITY);
        for (int64_t key = 0; key < extent; key += VECS * W) {
            const int64_t vecs = std::min<int64_t>(VECS, (extent - key) / W);
            All::scores[(count - 1) * VECS + vecs - 1](room.queries + tile * s.depth(), lowered + tile, room, s, key, scores + key);
        }
        for (int64_t r = tile; r < tile + count; r++, scores += s.extent()) {
            float most = _mm512_reduce_max_ps((__m512)load(room.most + (r - tile) * W)), factor = std::max(of_queries[r], LEAST);
            if (MASK || causal) {
                const char* mask = MASK ? head.mask + (top + r) * head.of_mask : nullptr;
                most = masked<MASK>(scores, of_queries[r] / LOG2_E, mask, head.same, causal ? std::min(keys, top + r + 1) : keys, extent);
                factor = LOG2_E;
            }
            uint8_t* weights = room.weights + r * s.extent();
            const bool number = std::isfinite(most) && std::isfinite(of_queries[r]);
            if (number) inverse[r] = 1.0f / (float)weigh(scores, most, factor, extent, weights);
            else std::memset(weights, 0, extent), inverse[r] = most == -INFINITY ? 0.0f : NAN;
        }
    }
    for (int64_t column = 0; column < s.columns(); column += VECS * W)
        for (int64_t tile = 0; tile < rows; tile += ROWS) {
            const int64_t count = std::min<int64_t>(ROWS, rows - tile), vecs = std::min<int64_t>(VECS, (s.columns() - column) / W);
            All::results[(count - 1) * VECS + vecs - 1](room.weights + tile * s.extent(), inverse + tile, room, s, column, up(keys, 4) / 4,
                                                        head.out + (top + tile) * head.of_out, head.of_out);
        }
}

// A number that none is makes all that a query sees NaN: a key's, all results.
bool lay(const Head& head, const Sizes& s, float scale, const Room& room) {
    lay_keys(head, s, scale * LOG2_E, room);
    lay_values(head, s, room);
    bool numbers = true;
    for (int64_t key = 0; key < s.keys; key++) numbers &= std::isfinite(room.of_keys[key]);
    return numbers;
}

}  // namespace

// Floats of `scratch` that each thread needs.
extern "C" int64_t scratch_floats(const int64_t* sizes) {
    return Sizes{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]}.bytes() / 4;
}

// As fp32_attention of fp32_attention.cpp.
extern "C" void int8_attention(const float* q, const float* k, const float* v, const void* mask, float* out, const int64_t* told,
                               const int64_t* of_mask, int64_t given, int64_t causal, float scale, float* scratch, int64_t threads) {
    const Sizes s{told[0], told[1], told[2], told[3], told[4], told[5], told[6]};
    const int64_t *of_q = told + 7, *of_k = of_q + 3, *of_v = of_k + 3, *of_out = of_v + 3;
    const int64_t parts = (s.queries + PART - 1) / PART, unit = given == ADDED ? 4 : 1;
    const auto attend_with = given == ADDED ? attend<ADDED> : given == SEEN ? attend<SEEN> : attend<NONE>;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        const Room room(reinterpret_cast<uint8_t*>(scratch) + omp_get_thread_num() * s.bytes(), s);
        std::pair<const float*, const float*> laid;  // keys may be those of all batches, and values not
        bool numbers = true;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < s.batch * s.heads * parts; task++) {
            const int64_t at = task / parts, b = at / s.heads, h = at % s.heads, g = h / (s.heads / s.groups);
            const Head head{q + b * of_q[0] + h * of_q[1],
                            k + b * of_k[0] + g * of_k[1],
                            v + b * of_v[0] + g * of_v[1],
                            given ? static_cast<const char*>(mask) + (b * of_mask[0] + h * of_mask[1]) * unit : nullptr,
                            out + b * of_out[0] + h * of_out[1],
                            of_q[2], of_k[2], of_v[2], of_mask[2] * unit, of_out[2],
                            given && !of_mask[3]};
            if (laid != std::pair(head.k, head.v)) numbers = lay(head, s, scale, room), laid = {head.k, head.v};
            const int64_t end = std::min(s.queries, (task % parts + 1) * PART);
            for (int64_t top = task % parts * PART; top < end; top += s.at_once()) {
                const int64_t rows = std::min(s.at_once(), end - top);
                if (numbers) attend_with(s, room, head, top, rows, causal);
                else
                    for (int64_t r = top; r < top + rows; r++) std::fill_n(head.out + r * head.of_out, s.wide, NAN);
            }
        }
    }
}
