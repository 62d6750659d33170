// Attention of fp32 numbers on a CPU: softmax(q kᵀ scale + mask) v, exact but for the rounding of fp32.
//
// Compiled once per instruction set by machine/native.py, which passes WIDTH, the 32-bit words of a vector register.
// Keys that a mask hides from all queries of a tile, at either end, are not multiplied: a causal mask costs half of a full one, padding nothing.
// Of a head the keys are laid once, turned, so that scores are sums of vectors, and the values side by side; then some queries at a time: their
// scores with a block of keys, the softmax, and the sums of values, which a later block scales (Milakov and Gimelshein, Online normalizer
// calculation for softmax, 2018).

#define KIND 0
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <omp.h>
#include <utility>
#if WIDTH == 16
#include <immintrin.h>
#endif

namespace {

typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef int8_t VB __attribute__((vector_size(W)));

#if WIDTH == 16 || defined(__aarch64__)  // 32 registers
constexpr int VECS = 4;  // vectors of a row of a tile
#else
constexpr int VECS = 2;
#endif
constexpr int ROWS = 6;            // queries of a tile: ROWS * VECS sums in registers
constexpr int64_t QUERIES = 48;    // that share what is read of keys and values from the L2 cache
constexpr int64_t KEYS = 512;      // of a block, whose scores are held
constexpr int64_t VALUES = 128;    // rows of values that stay in the L1 cache
constexpr float LOG2_E = 1.4426950408889634f;

inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Part i of n things in as many parts as it takes when one holds `most`: where it begins. Parts are as equal as can be.
struct Parts {
    int64_t n, count;
    Parts(int64_t n, int64_t most) : n(n), count((n + most - 1) / most) {}
    int64_t at(int64_t i) const { return i * n / count; }
};

inline V some_of(const float* p, int64_t count) {  // the first `count`, then zeros
    if (count >= W) return load(p);
    V v = {};
    if (count > 0) std::memcpy(&v, p, count * 4);
    return v;
}
inline void put(float* p, V v, int64_t count) {
    if (count >= W) store(p, v);
    else std::memcpy(p, &v, count * 4);
}

inline V larger(V a, V b) { return a > b ? a : b; }

template <int H, size_t... I>
inline V turned(V v, std::index_sequence<I...>) { return __builtin_shufflevector(v, v, (int)(I ^ H)...); }
template <int H = W / 2>
inline float largest_of(V v) {
    v = larger(v, turned<H>(v, std::make_index_sequence<W>()));
    if constexpr (H > 1) return largest_of<H / 2>(v);
    return v[0];
}
template <int H = W / 2>
inline float sum_of(V v) {
    v = v + turned<H>(v, std::make_index_sequence<W>());
    if constexpr (H > 1) return sum_of<H / 2>(v);
    return v[0];
}

// 2^t for t <= 0, to a unit in the last place or two (the polynomial of integers.h); 0 below 2^-126: subnormal numbers take a hundred times
// as long. NaN stays one.
inline V power_of_two(V t) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    const V shifted = t + magic, whole = shifted - magic, f = t - whole;
    V p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
#if WIDTH == 16
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (V)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)whole);
#else
    const V e = (V)((VI)p + ((VI)shifted << 23));
    return t < -126.0f ? V{} : t == t ? e : t;
#endif
}

// Where a tile of results goes: to `c`, after what is there is added if there is `more`; or, times a factor of each row, to `last`.
struct Into {
    float* c;
    int64_t apart;
    bool more;
    float* last = nullptr;
    int64_t last_apart = 0;
    const float* factors = nullptr;
};

// a b, R rows of N vectors: of a (R, depth) rows are `a_apart` floats apart, of b (depth, N vectors) `b_apart`.
template <int R, int N>
void multiply(const float* a, int64_t a_apart, const float* b, int64_t b_apart, int64_t depth, const Into& into) {
    V sums[R][N];
    const float* from = into.c;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++, from += into.apart)
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) sums[r][v] = into.more ? load(from + v * W) : V{};
    for (int64_t i = 0; i < depth; i++) {
        V of[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) of[v] = load(b + i * b_apart + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const float factor = a[r * a_apart + i];
#pragma GCC unroll 4
            for (int v = 0; v < N; v++) sums[r][v] = sums[r][v] + factor * of[v];
        }
    }
    float* to = into.last ? into.last : into.c;
    const int64_t apart = into.last ? into.last_apart : into.apart;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++, to += apart) {
        const float factor = into.last ? into.factors[r] : 1.0f;
#pragma GCC unroll 4
        for (int v = 0; v < N; v++) store(to + v * W, into.last && factor == 0.0f ? V{} : sums[r][v] * factor);
    }
}

typedef decltype(&multiply<1, 1>) Multiply;
template <size_t... I>
struct Tiles {
    static constexpr Multiply all[] = {multiply<I / VECS + 1, I % VECS + 1>...};
};
template <size_t... I>
constexpr Tiles<I...> tiles_of(std::index_sequence<I...>) { return {}; }
inline Multiply multiply_of(int64_t rows, int64_t vecs) {
    return decltype(tiles_of(std::make_index_sequence<ROWS * VECS>()))::all[(rows - 1) * VECS + vecs - 1];
}

struct Sizes {
    int64_t batch, heads, groups, queries, keys, width, wide;  // wide: of a row of values
    int64_t columns() const { return up(wide, W); }
    int64_t scores() const { return up(std::min(keys, KEYS), W); }
    // Values are read where they are, but for rows that are no whole vectors, and where so many are far apart that their pages are not at hand.
    bool copied() const { return wide % W || (keys > KEYS && queries > ROWS); }
    // Of one thread, each part of whole vectors: keys, values, scores, results.
    int64_t of_keys() const { return up(keys, W) * width; }
    int64_t of_values() const { return copied() ? keys * columns() : 0; }
    int64_t floats() const { return up(of_keys() + of_values() + QUERIES * (scores() + columns()), 16); }
};

// Keys of one head as panels of up to VECS vectors of keys, each as (width, vectors of the panel). A panel lies where its first key is.
void lay_keys(const float* k, int64_t apart, const Sizes s, float scale, float* to) {
    for (int64_t from = 0; from < s.keys; from += KEYS) {
        const int64_t count = std::min(KEYS, s.keys - from);
        const Parts panels(up(count, W) / W, VECS);
        for (int64_t p = 0; p < panels.count; p++) {
            const int64_t first = panels.at(p), vecs = panels.at(p + 1) - first;
            float* panel = to + (from + first * W) * s.width;
            for (int64_t v = 0; v < vecs; v++) {
                const int64_t key = from + (first + v) * W;
                for (int64_t i = 0; i < s.width; i += W) {
                    V rows[W];
                    const float* of = k + key * apart + i;
                    const bool whole = key + W <= s.keys && i + W <= s.width;
                    if (whole)
#pragma GCC unroll 16
                        for (int r = 0; r < W; r++) rows[r] = load(of + r * apart) * scale;
                    else
                        for (int r = 0; r < W; r++) rows[r] = key + r < s.keys ? some_of(of + r * apart, s.width - i) * scale : V{};
                    transpose_stages<1>(rows);
                    float* made = panel + (i * vecs + v) * W;
                    if (whole)
#pragma GCC unroll 16
                        for (int r = 0; r < W; r++) store(made + r * vecs * W, rows[r]);
                    else
                        for (int r = 0; r < std::min<int64_t>(W, s.width - i); r++) store(made + r * vecs * W, rows[r]);
                }
            }
        }
    }
}

void copy_values(const float* v, int64_t apart, const Sizes s, float* to) {
    for (int64_t key = 0; key < s.keys; key++)
        for (int64_t i = 0; i < s.columns(); i += W) store(to + key * s.columns() + i, some_of(v + key * apart + i, s.wide - i));
}

enum Mask { NONE, SEEN, ADDED };

// Added, so that a score that is NaN stays so where it is not seen, as torch has it.
template <int MASK>
inline V masked(V score, const char* mask, int64_t key, int64_t count) {
    if constexpr (MASK == ADDED) return score + some_of(reinterpret_cast<const float*>(mask) + key, count);
    if constexpr (MASK == SEEN) {
        VB seen = {};
        if (count >= W) std::memcpy(&seen, mask + key, W);
        else std::memcpy(&seen, mask + key, count);
#if WIDTH == 16
        return (V)_mm512_mask_add_ps((__m512)score, _mm_testn_epi8_mask((__m128i)seen, (__m128i)seen), (__m512)score, _mm512_set1_ps(-INFINITY));
#else
        return score + (__builtin_convertvector(seen, VI) ? V{} : V{} - INFINITY);
#endif
    }
    return score;
}

inline V first_lanes(V v, int64_t count) {  // the others -inf
    VI lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    return lane < (int32_t)count ? v : V{} - INFINITY;
}

// Whether one of `count` keys, W at the most, is seen.
template <int MASK>
inline bool some_seen(const char* mask, int64_t key, int64_t count) {
    uint64_t words[W == 4 && MASK == SEEN ? 1 : W * (MASK == ADDED ? 4 : 1) / 8] = {}, any = 0;
    if constexpr (MASK == ADDED) {
        V added = some_of(reinterpret_cast<const float*>(mask) + key, count);
        if (count < W) added = first_lanes(added, count);
#if WIDTH == 16
        return _mm512_cmp_ps_mask((__m512)added, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
#endif
        const VI differs = added != V{} - INFINITY;
        std::memcpy(words, &differs, sizeof(differs));
    } else if (count >= W) {
        std::memcpy(words, mask + key, W);
    } else {
        std::memcpy(words, mask + key, count);
    }
    for (const uint64_t word : words) any |= word;
    return any;
}

// Rows [row, next) of a block of queries, and keys [first, last) beyond which none of them sees one. `first` is where a vector begins.
struct Tile {
    int64_t row, next, first, last;

    template <int MASK>
    void include(const char* mask, int64_t most) {
        int64_t end = up(most, W), from = 0;
        while (end > last && !some_seen<MASK>(mask, end - W, std::min<int64_t>(W, most - end + W))) end -= W;
        last = std::max(last, std::min(end, most));
        while (from < first && !some_seen<MASK>(mask, from, std::min<int64_t>(W, most - from))) from += W;
        first = std::min(first, from);
    }
};

// What has been summed of a query so far.
struct Sum {
    float most = -INFINITY, sum = 0.0f;
};

// Scores of a query with `seen` keys as weights, then zeros up to `extent`; returns what its results so far are multiplied with.
template <int MASK>
float weigh(float* scores, int64_t seen, int64_t extent, const char* mask, Sum& all) {
    V most = V{} + all.most, other = most, sums = {}, others = {};  // two of each: no step waits for the one before
    int64_t key = 0;
    for (; key + 2 * W <= seen; key += 2 * W) {
        const V v = masked<MASK>(load(scores + key), mask, key, W), w = masked<MASK>(load(scores + key + W), mask, key + W, W);
        if constexpr (MASK) store(scores + key, v), store(scores + key + W, w);
        most = larger(v, most);
        other = larger(w, other);
    }
    for (; key + W <= seen; key += W) {
        const V v = masked<MASK>(load(scores + key), mask, key, W);
        if constexpr (MASK) store(scores + key, v);
        most = larger(v, most);
    }
    if (key < seen) {
        const V v = first_lanes(masked<MASK>(load(scores + key), mask, key, seen - key), seen - key);
        store(scores + key, v);
        most = larger(v, most);
        key += W;
    }
    const float largest = largest_of(larger(other, most)), from = largest == -INFINITY ? 0.0f : largest;
    int64_t i = 0;
    for (; i + 2 * W <= key; i += 2 * W) {
        const V e = power_of_two((load(scores + i) - from) * LOG2_E), f = power_of_two((load(scores + i + W) - from) * LOG2_E);
        store(scores + i, e);
        store(scores + i + W, f);
        sums = sums + e;
        others = others + f;
    }
    for (; i < key; i += W) {
        const V e = power_of_two((load(scores + i) - from) * LOG2_E);
        store(scores + i, e);
        sums = sums + e;
    }
    for (; key < extent; key += W) store(scores + key, V{});
    const float factor = all.most == largest || all.most == -INFINITY ? 1.0f : power_of_two(V{} + (all.most - from) * LOG2_E)[0];
    all.most = largest;
    all.sum = all.sum * factor + sum_of(sums + others);
    return factor;
}

struct Head {
    const float *q, *k, *v;
    const char* mask;
    float* out;
    int64_t of_q, of_k, of_v, of_mask, of_out;  // floats between rows; bytes of the mask
    bool same;                                  // the mask says the same of all keys of a query
};

struct Room {
    float *keys, *values, *scores, *out;
    Room(float* at, const Sizes& s)
        : keys(at), values(keys + s.of_keys()), scores(values + s.of_values()),
          out(scores + QUERIES * s.scores()) {}
};

// What tiles of queries [top, top + rows) see; returns how many tiles.
template <int MASK>
int64_t look(const Sizes& s, const Head& head, int64_t top, int64_t rows, bool causal, Tile* tiles) {
    const Parts parts(rows, ROWS);
    for (int64_t t = 0; t < parts.count; t++) {
        Tile& tile = tiles[t];
        const int64_t next = parts.at(t + 1), most = causal ? std::min(s.keys, top + next) : s.keys;
        tile = MASK ? Tile{parts.at(t), next, most, 0} : Tile{parts.at(t), next, 0, most};
        if constexpr (MASK)
            for (int64_t r = tile.row; r < next; r++) {
                const char* mask = head.mask + (top + r) * head.of_mask;
                if (!head.same) tile.include<MASK>(mask, most);
                else if (*mask) tile.first = 0, tile.last = most;
            }
        if (tile.first >= tile.last) tile.first = tile.last = 0;
    }
    return parts.count;
}

// Queries [top, top + rows) of one head, of keys that are laid and values whose rows are whole vectors, `of_v` floats apart.
template <int MASK>
void attend(const Sizes& s, const Room& room, const Head& head, const float* values, int64_t of_v, int64_t top, int64_t rows, bool causal) {
    const int64_t wide = s.scores(), columns = s.columns(), unit = MASK == ADDED ? 4 : 1;
    const bool straight = s.wide % W == 0;
    Tile tiles[QUERIES / ROWS];
    Sum sums[QUERIES];
    float inverse[QUERIES] = {};
    const Tile* end = tiles + look<MASK>(s, head, top, rows, causal, tiles);
    for (int64_t from = 0; from < s.keys; from += KEYS) {
        const int64_t count = std::min(KEYS, s.keys - from);
        const auto within = [&](int64_t key) { return std::clamp<int64_t>(key - from, 0, count); };
        const Parts panels(up(count, W) / W, VECS), columns_at_once(columns / W, VECS);
        for (int64_t p = 0; p < panels.count; p++) {
            const int64_t first = panels.at(p), next = panels.at(p + 1);
            for (const Tile* t = tiles; t < end; t++)
                if (within(t->first) < within(t->last) && next * W > within(t->first) && first * W < within(t->last))
                    multiply_of(t->next - t->row, next - first)(
                        head.q + (top + t->row) * head.of_q, head.of_q, room.keys + (from + first * W) * s.width, (next - first) * W, s.width,
                        {room.scores + t->row * wide + first * W, wide, false});
        }
        for (const Tile* t = tiles; t < end; t++) {
            const int64_t first = within(t->first), last = within(t->last), extent = up(last, W);
            for (int64_t r = t->row; r < t->next && first < last; r++) {
                const int64_t seen = causal ? std::clamp(top + r + 1 - from, first, last) : last;
                float* scores = room.scores + r * wide;
                if (seen == first || (MASK && head.same && !head.mask[(top + r) * head.of_mask])) {
                    std::memset(scores + first, 0, (extent - first) * 4);
                    continue;
                }
                const char* mask = MASK ? head.mask + (top + r) * head.of_mask + (from + first) * unit : nullptr;
                const float factor = (MASK && head.same ? weigh<NONE> : weigh<MASK>)(scores + first, seen - first, extent - first, mask, sums[r]);
                inverse[r] = sums[r].sum == 0.0f ? 0.0f : 1.0f / sums[r].sum;
                if (factor != 1.0f)
                    for (int64_t i = 0; i < columns; i += W) store(room.out + r * columns + i, load(room.out + r * columns + i) * factor);
            }
        }
        for (int64_t block = 0; block < count; block += VALUES)
            for (int64_t p = 0; p < columns_at_once.count; p++) {
                const int64_t column = columns_at_once.at(p) * W, vecs = columns_at_once.at(p + 1) - columns_at_once.at(p);
                for (const Tile* t = tiles; t < end; t++) {
                    const int64_t key = std::max(block, within(t->first)), depth = std::min(block + VALUES, within(t->last)) - key;
                    if (depth <= 0) continue;
                    Into into{room.out + t->row * columns + column, columns, from + key > t->first};
                    if (straight && from + key + depth == t->last) {
                        into.last = head.out + (top + t->row) * head.of_out + column;
                        into.last_apart = head.of_out;
                        into.factors = inverse + t->row;
                    }
                    multiply_of(t->next - t->row, vecs)(room.scores + t->row * wide + key, wide, values + (from + key) * of_v + column, of_v,
                                                        depth, into);
                }
            }
    }
    for (const Tile* t = tiles; t < end; t++)
        for (int64_t r = t->row; r < t->next && !(straight && t->last); r++)
            for (int64_t i = 0; i < s.wide; i += W) {
                const V v = inverse[r] == 0.0f ? V{} : load(room.out + r * columns + i) * inverse[r];
                put(head.out + (top + r) * head.of_out + i, v, s.wide - i);
            }
}

}  // namespace

// Floats of `scratch` that each thread needs.
extern "C" int64_t scratch_floats(const int64_t* sizes) {
    return Sizes{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]}.floats();
}

// q (batch, heads, queries, width), k (batch, groups, keys, width) and v (batch, groups, keys, wide) → out (batch, heads, queries, wide), numbers
// of a row side by side. `told`: these seven sizes, then the strides of q, k, v and out, each of (batch, heads, rows), in elements, as are the
// four of the mask, whose last is 1 or, of bools, 0. `masked`: 1 for bools that say what is seen, 2 for numbers that are added. `causal`: query i sees keys up to i. `scratch` is 64 bytes
// aligned.
extern "C" void fp32_attention(const float* q, const float* k, const float* v, const void* mask, float* out, const int64_t* told,
                               const int64_t* of_mask, int64_t masked, int64_t causal, float scale, float* scratch, int64_t threads) {
    const Sizes s{told[0], told[1], told[2], told[3], told[4], told[5], told[6]};
    const int64_t *of_q = told + 7, *of_k = of_q + 3, *of_v = of_k + 3, *of_out = of_v + 3;
    const int64_t blocks = (s.queries + QUERIES - 1) / QUERIES, unit = masked == ADDED ? 4 : 1, heads = s.batch * s.heads;
    const auto attend_with = masked == ADDED ? attend<ADDED> : masked == SEEN ? attend<SEEN> : attend<NONE>;
    const auto head_at = [&](int64_t at) {
        const int64_t b = at / s.heads, h = at % s.heads, g = h / (s.heads / s.groups);
        return Head{q + b * of_q[0] + h * of_q[1],
                    k + b * of_k[0] + g * of_k[1],
                    v + b * of_v[0] + g * of_v[1],
                    masked ? static_cast<const char*>(mask) + (b * of_mask[0] + h * of_mask[1]) * unit : nullptr,
                    out + b * of_out[0] + h * of_out[1],
                    of_q[2], of_k[2], of_v[2], of_mask[2] * unit, of_out[2],
                    masked && !of_mask[3]};
    };
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        const Room room(scratch + omp_get_thread_num() * s.floats(), s);
        std::pair<const float*, const float*> laid;  // keys may be those of all batches, and values not
#pragma omp for schedule(static)
        for (int64_t task = 0; task < heads * blocks; task++) {
            const int64_t at = task / blocks, top = task % blocks * QUERIES;
            const Head head = head_at(at);
            if (laid != std::pair(head.k, head.v)) {
                lay_keys(head.k, head.of_k, s, scale, room.keys);
                if (s.copied()) copy_values(head.v, head.of_v, s, room.values);
                laid = {head.k, head.v};
            }
            attend_with(s, room, head, s.copied() ? room.values : head.v, s.copied() ? s.columns() : head.of_v, top, std::min(QUERIES, s.queries - top), causal);
        }
    }
}
