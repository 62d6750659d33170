// Attention of few queries over a cache on a CPU: keys and values, in fp32, bf16, 8 or 4 bits, are read once for all queries that share them.
//
// Compiled once per instruction set by machine/native.py, which passes WIDTH, the 32-bit words of a vector register.
// Of a span of keys all scores are made first, then their softmax, then the sum of values: both passes read memory in order. Spans are each
// a task of its own, and are put together behind all of them: results are the same for any number of threads.

#define KIND 0
#include "cached_rows.h"
#ifdef __AMX_BF16__
#include "cached_tiles.h"
#endif

#include <omp.h>

namespace {

constexpr int64_t ROWS = 512;  // queries that may share a head of keys
constexpr int64_t SPAN = 256;  // keys of one task
constexpr int64_t KEYS = 64;   // keys whose rows are held as fp32 at once, in the L1 cache

// C: vectors of a row; 0 where it is told at run time, or ends within one.
template <int C>
inline V part_of(const float* p, int64_t count) {
    return C || count >= W ? load(p) : (V)words_of(p, std::max<int64_t>(count, 0));
}

// Products of Q queries, of which a vector has room for so many, with `count` keys of its rest, one after the other: memory is read in order,
// a key once for all of them. (Sixteen keys at once read a cache in DRAM at a third of its speed, eight queries are no faster than four.)
template <int Q, int C>
inline void products(const float* const* q, const float* keys, int64_t apart, int64_t count, int64_t width, float scale,
                     float* scores, int64_t scores_apart) {
    constexpr int K = W / (Q > 2 ? 4 : Q);
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
        }
#pragma GCC unroll 4
        for (int x = 0; x < Q; x++) sums[x * K + key] = mine[x];
    }
    const V made = lane_sums<W / 2>(sums) * scale;
    for (int x = 0; x < Q; x++) std::memcpy(scores + x * scores_apart, reinterpret_cast<const float*>(&made) + x * K, K * 4);
}

// out += the sum of values by weights, of `count` rows, for Q queries. NV vectors of columns of each stay in registers.
template <int Q, int NV, int C>
inline void gather(const float* weights, int64_t weights_apart, const float* values, int64_t apart, int64_t count, int64_t columns,
                   float* const* out, int64_t from, Ahead& ahead, int64_t lines) {
    V sums[Q][NV];
#pragma GCC unroll 4
    for (int x = 0; x < Q; x++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) sums[x][v] = part_of<C>(out[x] + from + v * W, columns - v * W);
    for (int64_t key = 0; key < count; key++) {
        if (key % 4 == 0) ahead.ask(lines);
        V rows[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) rows[v] = part_of<C>(values + key * apart + v * W, columns - v * W);
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

// Four queries at a time, as registers hold them, and what is left: f(their number, the first of them).
template <typename F>
inline void by_four(int64_t rows, F f) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) f(std::integral_constant<int, 4>(), r);
    if (rows - r == 3) f(std::integral_constant<int, 3>(), r);
    if (rows - r == 2) f(std::integral_constant<int, 2>(), r);
    if (rows - r == 1) f(std::integral_constant<int, 1>(), r);
}

// Scores of a block of keys. `part`: of all scores of a span one.
template <int C>
void scored(const float* const* q, int64_t rows, const float* keys, int64_t apart, int64_t count, int64_t width, float scale, float* scores,
            int64_t scores_apart, Ahead& ahead, double part) {
    by_four(rows, [&](auto some, int64_t r) {
        constexpr int Q = decltype(some)::value, K = W / (Q > 2 ? 4 : Q);
        const int64_t lines = ahead.share(part * Q * K);
        for (int64_t key = 0; key < count; key += K) {
            products<Q, C>(q + r, keys + key * apart, apart, count - key, width, scale, scores + r * scores_apart + key, scores_apart);
            ahead.ask(lines);
        }
    });
}

// What a block of values adds to the results. `part`: of all that a span adds what one value adds to one result.
inline void gathered(const float* weights, int64_t weights_apart, int64_t rows, const float* values, int64_t apart, int64_t count, int64_t width,
                     float* const* out, Ahead& ahead, double part) {
    by_four(rows, [&](auto some, int64_t r) {
        constexpr int Q = decltype(some)::value, NV = W == 16 || Q == 1 ? 4 : 2;  // as many as registers hold
        const float* mine = weights + r * weights_apart;
        const double of_four = part * 4 * Q / (double)width;  // values, and one column
        int64_t i = 0;
        for (; i + NV * W <= width; i += NV * W)
            gather<Q, NV, 1>(mine, weights_apart, values + i, apart, count, width - i, out + r, i, ahead, ahead.share(of_four * NV * W));
        for (; i < width; i += 2 * W) gather<Q, 2, 0>(mine, weights_apart, values + i, apart, count, width - i, out + r, i, ahead,
                                                     ahead.share(of_four * 2 * W));
    });
}

// What a row's keys weigh together: e^(score - largest) of them.
struct Weighed {
    float largest, sum;
};

// Scores as e^(score - largest), in place; 0 where no key is seen.
inline Weighed softmax(float* scores, int64_t count) {
    V most = V{} - INFINITY;
    for (int64_t i = 0; i < count; i += W) {
        const V here = load(scores + i);
        most = where(here > most, here, most);
    }
    float largest = most[0];
    for (int lane = 1; lane < W; lane++) largest = std::max(largest, most[lane]);
    const float from = largest == -INFINITY ? 0.0f : largest;  // all are NaN, or none is seen
    V sums = {};
    for (int64_t i = 0; i < count; i += W) {
        const V score = load(scores + i), e = power_of_two((score - from) * 1.4426950408889634f);
        const V kept = where(score == -INFINITY, V{}, where(score == score, e, score));
        store(scores + i, kept);
        sums = sums + kept;
    }
    float sum = 0;
    for (int lane = 0; lane < W; lane++) sum += sums[lane];
    return {largest, sum};
}

struct Call {
    const float* q;
    const char *k, *v;
    const void* mask;
    float* out;
    int64_t batch, groups, shared, queries, keys, width;
    const int64_t *of_q, *of_k, *of_v, *of_mask;
    int64_t key_form, value_form, added;
    float scale;

    int64_t rows() const { return shared * queries; }
    int64_t spans() const { return (keys + SPAN - 1) / SPAN; }
    int64_t tasks() const { return batch * groups * spans(); }
    int64_t wide() const { return up(std::min(keys, SPAN), 32); }  // scores of a row
    bool narrow() const { return key_form || value_form; }
    int64_t columns() const { return up(width, 32); }
    // Of rows that are not held as fp32: queries, rows and weights of a span as tiles, and what these make; or some rows as fp32.
    int64_t laid() const { return (up(rows(), 8) + wide() / 4 * 3) * columns() + std::max<int64_t>(16 * columns(), 1024); }
    int64_t room() const { return narrow() ? std::max(laid(), std::min(keys, KEYS) * columns()) : 0; }
    int64_t floats() const { return up(rows() * wide(), 16) + room(); }  // as `scratch_floats` of cached_attention.py
    float* result(int64_t b, int64_t head, int64_t r) const {
        return out + ((b * queries + r % queries) * groups * shared + head * shared + r / queries) * width;
    }
};

// Keys [from, from + count) of one head.
struct Task {
    int64_t b, head, from, count;
    Rows keys, values;

    Task(const Call& c, int64_t task)
        : b(task / c.spans() / c.groups), head(task / c.spans() % c.groups), from(task % c.spans() * SPAN), count(std::min(SPAN, c.keys - from)),
          keys(rows_of(c.k, c.of_k, c.key_form, c.width)), values(rows_of(c.v, c.of_v, c.value_form, c.width)) {}

    Rows rows_of(const char* at, const int64_t* strides, int64_t form, int64_t width) const {
        const int64_t bytes = bytes_of(form);
        return {at + (b * strides[0] + head * strides[1] + from * strides[2]) * bytes, strides[2] * bytes, width, form};
    }
};

void make_scores(const Call& c, const Task& t, const float* const* query, float* scores, float* room, Ahead& ahead) {
    const int64_t rows = c.rows(), wide = c.wide();
    const double part = 0.6 / (double)(rows * t.count);
    const auto all = c.width == 4 * W ? scored<4> : c.width == 8 * W ? scored<8> : scored<0>;
    for (int64_t from = 0; from < t.count; from += KEYS) {
        const int64_t count = std::min(KEYS, t.count - from);
        int64_t apart;
        const float* of = t.keys.dense(from, count, room, &apart);
        all(query, rows, of, apart, count, c.width, c.scale, scores + from, wide, ahead, part);
    }
}

void gather_values(const Call& c, const Task& t, const float* weights, float* room, float* const* result, Ahead& ahead) {
    const int64_t rows = c.rows(), wide = c.wide();
    const double part = 1.0 / (double)(rows * t.count);
    for (int64_t from = 0; from < t.count; from += KEYS) {
        int64_t apart;
        const int64_t count = std::min(KEYS, t.count - from);
        const float* of = t.values.dense(from, count, room, &apart);
        gathered(weights + from, wide, rows, of, apart, count, c.width, result, ahead, part);
    }
}

// What a query's mask says of its keys, and minus infinity behind them.
inline void hide(const Call& c, const Task& t, int64_t r, float* row) {
    const int64_t at = t.b * c.of_mask[0] + (t.head * c.shared + r / c.queries) * c.of_mask[1] + r % c.queries * c.of_mask[2] + t.from;
    const float* add = c.added ? static_cast<const float*>(c.mask) + at : nullptr;
    const uint8_t* seen = c.mask && !c.added ? static_cast<const uint8_t*>(c.mask) + at : nullptr;
    for (int64_t key = 0; add && key < t.count; key++) row[key] += add[key];
    for (int64_t key = 0; seen && key < t.count; key++) row[key] = seen[key] ? row[key] : -INFINITY;
    for (int64_t key = t.count; key < c.wide(); key++) row[key] = -INFINITY;
}

// Sums of values of a span by weights that are not yet divided, and what the weights are.
void attend(const Call& c, const Task& t, float* own, float* const* result, Weighed* weighed, Ahead next) {
    const int64_t rows = c.rows(), wide = c.wide();
    float *scores = own, *room = own + up(rows * wide, 16);
    const float* query[ROWS];
    for (int64_t r = 0; r < rows; r++)
        query[r] = c.q + t.b * c.of_q[0] + (t.head * c.shared + r / c.queries) * c.of_q[1] + r % c.queries * c.of_q[2];
    Ahead values(t.values, t.count);
#ifdef __AMX_BF16__
    float *laid = room + up(rows, 8) * c.columns(), *weights = laid + wide / 2 * c.columns();
    const TileRoom tiles{room, laid, weights, weights + wide / 4 * c.columns()};
    if (tiled(t.keys)) score_by_tiles(query, rows, t.keys, t.count, c.scale, tiles, scores, wide, values);
    else
#endif
        make_scores(c, t, query, scores, room, values);
    const int64_t lines = values.share(0.4 / (double)rows);
    for (int64_t r = 0; r < rows; r++) {
        hide(c, t, r, scores + r * wide);
        weighed[r] = softmax(scores + r * wide, wide);
        values.ask(lines);
    }
#ifdef __AMX_BF16__
    if (tiled(t.values)) return gather_by_tiles(scores, wide, rows, t.values, t.count, tiles, result, next);
#endif
    for (int64_t r = 0; r < rows; r++) std::memset(result[r], 0, c.width * 4);
    gather_values(c, t, scores, room, result, next);
}

// Of one query what its spans are together.
void put_together(const Call& c, int64_t query, const float* parts, const Weighed* weighed) {
    const int64_t rows = c.rows(), spans = c.spans(), head = query / rows, r = query % rows;
    float *to = c.result(head / c.groups, head % c.groups, r), largest = -INFINITY, sum = 0;
    for (int64_t span = 0; span < spans; span++) largest = std::max(largest, weighed[(head * spans + span) * rows + r].largest);
    for (int64_t span = 0; span < spans; span++) {
        const int64_t at = (head * spans + span) * rows + r;
        const float factor = weighed[at].largest == -INFINITY ? 0.0f : std::exp(weighed[at].largest - largest);
        sum += factor * weighed[at].sum;
        for (int64_t i = 0; i < c.width; i++) to[i] = (span ? to[i] : 0.0f) + factor * parts[at * c.width + i];
    }
    for (int64_t i = 0; i < c.width; i++) to[i] *= sum == 0.0f ? 0.0f : 1.0f / sum;
}

void run(const Call& c, float* scratch, int64_t threads) {
    const int64_t rows = c.rows(), tasks = c.tasks(), spans = c.spans();
    scratch += -(reinterpret_cast<intptr_t>(scratch) / 4) & 15;  // a cache line
    float* parts = scratch + threads * c.floats();
    Weighed* weighed = reinterpret_cast<Weighed*>(parts + tasks * rows * c.width);
#pragma omp parallel num_threads((int)threads) if (threads > 1 && tasks > 1)
    {
        float *own = scratch + omp_get_thread_num() * c.floats(), *result[ROWS];
#ifdef __AMX_BF16__
        Tiles tiles;
        tiles.of(TILE_ROWS, TILE_ROWS);
#endif
#pragma omp for schedule(static)
        for (int64_t at = 0; at < tasks; at++) {
            const Task task(c, at), next(c, std::min(at + 1, tasks - 1));
            for (int64_t r = 0; r < rows; r++)
                result[r] = spans > 1 ? parts + (at * rows + r) * c.width : c.result(task.b, task.head, r);
            attend(c, task, own, result, weighed + at * rows, Ahead(next.keys, next.count));
            for (int64_t r = 0; r < rows && spans == 1; r++) {
                const float sum = weighed[at * rows + r].sum, inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
                for (int64_t i = 0; i < c.width; i++) result[r][i] *= inverse;
            }
        }
        if (spans > 1) {
#pragma omp for schedule(static)
            for (int64_t query = 0; query < c.batch * c.groups * rows; query++) put_together(c, query, parts, weighed);
        }
    }
}

}  // namespace

// q (B, groups * shared, S, D) -> out (B, S, groups * shared, D), dense; k and v (B, groups, K, D) with rows of adjacent elements. Strides are
// in elements: of q (b, h, s), of k and of v (b, h, row), of the mask (b, h, s); an element of a mask is a bool or a float that is added.
// `scratch`: as many floats as `scratch_floats` of cached_attention.py says.
extern "C" void cached_attention(const float* q, const void* k, const void* v, const void* mask, float* out, const int64_t* sizes,
                                 const int64_t* of_q, const int64_t* of_k, const int64_t* of_v, const int64_t* of_mask,
                                 int64_t key_form, int64_t value_form, int64_t added, float scale, float* scratch, int64_t threads) {
    run({q, static_cast<const char*>(k), static_cast<const char*>(v), mask, out, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
         of_q, of_k, of_v, of_mask, key_form, value_form, added, scale}, scratch, threads);
}

#ifdef __AMX_BF16__
extern "C" int64_t permitted() { return tiles_permitted(); }
#endif
