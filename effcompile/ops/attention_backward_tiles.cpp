// The gradients of an attention of bf16 numbers by tiles of bf16 (Dao et al. 2022, arXiv 2205.14135, algorithm 4), sums and softmax in fp32:
//
//     p = exp(scale q kᵀ + mask - lse)    dv = pᵀ dy    ds = p (dy vᵀ - Σ dy y) scale    dq = ds k    dk = dsᵀ q
//
// One head at a time: its keys and values are laid as tiles read them, then queries are taken 32 at a time, against all keys they may see.
// What they weigh is kept, turned, for up to 256 queries, whose products with it are then one each. Needs AVX512-BF16.

#define WIDTH 16
#include "bf16_tiles.h"

#include <omp.h>

namespace {

constexpr int64_t CHUNK = 256;  // queries whose weights are held
constexpr float HIDDEN = -3e8f;  // a log of a sum below this has none of the sum in its 24 bits

typedef const uint16_t* Given;

// What one thread holds. Tiles: keys and values as right sides of scores, `depths` keys as that of dq; a block's queries, their dy and its ds
// as left sides; a chunk's p and ds, turned, as left sides, its queries and their dy as right sides. Numbers: scores and dy vᵀ of a block,
// one product, the sums of dk and dv.
struct Room {
    float *keys, *values, *depths, *queries, *upper, *block, *weights, *turned, *chunk_queries, *chunk_upper, *scores, *slopes, *out, *dk, *dv;

    Room(float* at, const Sizes& s) {
        const int64_t wide = s.wide(), deep = s.deep();
        const auto next = [&](int64_t floats) { return std::exchange(at, at + floats); };
        keys = next(wide * deep / 2), values = next(wide * deep / 2), depths = next(wide * deep / 2);
        queries = next(ROWS * deep / 2), upper = next(ROWS * deep / 2), block = next(ROWS * wide / 2);
        weights = next(CHUNK * wide / 2), turned = next(CHUNK * wide / 2);
        chunk_queries = next(CHUNK * deep / 2), chunk_upper = next(CHUNK * deep / 2);
        scores = next(ROWS * wide), slopes = next(ROWS * wide), out = next(ROWS * ROWS);
        dk = next(wide * deep), dv = next(wide * deep);
    }
    static int64_t floats(const Sizes& s) {
        const int64_t wide = s.wide(), deep = s.deep();
        return wide * deep * 7 / 2 + ROWS * deep + ROWS * wide / 2 + CHUNK * (wide + deep) + 2 * ROWS * wide + ROWS * ROWS;
    }
};

struct Seen {  // what is added to a head's scores, `of_row` floats from query to query, if anything; and whether query i sees keys up to i
    const float* mask;
    int64_t of_row;
    bool causal;
    float scale;
};

// Σ dy y of a row.
inline float inner(Given a, Given b, int64_t width) {
    V sum = {};
    for (int64_t d = 0; d < width; d += W) sum = sum + (V)(spread(a + d, width - d) << 16) * (V)(spread(b + d, width - d) << 16);
    return sum_of_lanes(sum);
}

// A row's scores and dy vᵀ become p and ds. Where a large number hides all keys, the sum of weights is lost in `lse`: they are alike.
void weigh(float* scores, float* slopes, int64_t own, int64_t wide, const Seen& see, const float* mask, float lse, float away) {
    const float from = lse == -INFINITY ? 0.0f : lse, share = from < HIDDEN ? 1.0f / (float)own : 1.0f;
    for (int64_t key = 0; key < wide; key += W) {
        const V p = key < own ? weight_of((score(scores, key, own, see.scale, mask, true) - from) * LOG2_E) * share : V{};
        store(scores + key, p);
        store(slopes + key, key < own ? p * (load(slopes + key) - away) * see.scale : V{});
    }
}

// Numbers of 32 queries (rows of `apart`) as left tiles of their keys, [keys / 16][steps][16][16 pairs of queries].
void lay_turned(const float* x, int64_t apart, int64_t wide, int64_t steps, float* to) {
    V pairs[W];
    for (int64_t key = 0; key < wide; key += W, to += steps * WORDS) {
        for (int64_t i = 0; i < W; i++) pairs[i] = (V)(narrow(load(x + 2 * i * apart + key)) | narrow(load(x + (2 * i + 1) * apart + key)) << 16);
        transpose_stages<1>(pairs);
        for (int64_t i = 0; i < W; i++) store(to + i * W, pairs[i]);
    }
}

// Sums (wide, deep) += left tiles of keys times right tiles of a chunk's queries.
void add(const float* left, const float* right, const Sizes& s, int64_t steps, bool first, float* out, float* sums) {
    for (int64_t key = 0; key < s.wide(); key += ROWS)
        for (int64_t d = 0; d < s.deep(); d += ROWS) {
            multiply(left + key / W * steps * WORDS, steps * WORDS, right + d / W * WORDS, WORDS, s.deep() / W * WORDS, steps, out, ROWS);
            for (int64_t r = 0; r < ROWS; r++)
                for (int64_t i = 0; i < ROWS; i += W) {
                    float* to = sums + (key + r) * s.deep() + d + i;
                    store(to, first ? load(out + r * ROWS + i) : load(to) + load(out + r * ROWS + i));
                }
        }
}

void write(const float* sums, const Sizes& s, uint16_t* to, int64_t apart) {
    for (int64_t key = 0; key < s.keys; key++)
        for (int64_t d = 0; d < s.width; d += W) put(to + key * apart + d, load(sums + key * s.deep() + d), s.width - d);
}

struct Head {  // strides from row to row, in elements
    Given q, dy, y;
    const float* lse;
    uint16_t* dq;
    int64_t of_q, of_dy, of_y, of_lse, of_dq;
};

// 32 queries of a head, or what is left of them, from `top` on: dq, and p and ds as step `place` of `steps` of the chunk.
void block_of(const Sizes& s, const Room& room, const Head& h, const Seen& see, int64_t top, int64_t place, int64_t steps) {
    const int64_t rows = std::min(ROWS, s.queries - top), deep = s.deep(), wide = s.wide();
    const int64_t seen = see.causal ? std::min(s.keys, top + rows) : s.keys, near = up(seen, 32);
    lay_rows(h.q + top * h.of_q, h.of_q, rows, s.width, deep, room.queries);
    lay_rows(h.dy + top * h.of_dy, h.of_dy, rows, s.width, deep, room.upper);
    for (int64_t key = 0; key < near; key += 32) {
        multiply(room.queries, deep / 32 * WORDS, room.keys + key * deep / 2, deep / 32 * WORDS, WORDS, deep / 32, room.scores + key, wide);
        multiply(room.upper, deep / 32 * WORDS, room.values + key * deep / 2, deep / 32 * WORDS, WORDS, deep / 32, room.slopes + key, wide);
    }
    for (int64_t r = 0; r < ROWS; r++) {
        float *scores = room.scores + r * wide, *slopes = room.slopes + r * wide;
        const int64_t query = top + r, own = r >= rows ? 0 : see.causal ? std::min(seen, query + 1) : seen;
        const float away = own ? inner(h.dy + query * h.of_dy, h.y + query * h.of_y, s.width) : 0.0f;
        weigh(scores, slopes, own, wide, see, see.mask ? see.mask + query * see.of_row : nullptr, own ? h.lse[query * h.of_lse] : 0.0f, away);
        for (int64_t key = 0; key < near; key += 32)
            store(room.block + (r / 16 * (near / 32) + key / 32) * WORDS + r % 16 * W, paired(slopes + key, 32));
    }
    lay_turned(room.scores, wide, wide, steps, room.weights + place * WORDS);
    lay_turned(room.slopes, wide, wide, steps, room.turned + place * WORDS);
    for (int64_t d = 0; d < deep; d += 32) {
        multiply(room.block, near / 32 * WORDS, room.depths + d / W * WORDS, WORDS, deep / W * WORDS, near / 32, room.out, ROWS);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = d; i < std::min(s.width, d + 32); i += W)
                put(h.dq + (top + r) * h.of_dq + i, load(room.out + r * ROWS + i - d), s.width - i);
    }
}

void one_head(const Sizes& s, const Room& room, const Head& h, const Seen& see) {
    for (int64_t top = 0; top < s.queries; top += CHUNK) {
        Sizes part = s;
        part.keys = std::min(CHUNK, s.queries - top);
        const int64_t steps = part.wide() / 32;
        lay_values(h.q + top * h.of_q, h.of_q, part, room.chunk_queries);
        lay_values(h.dy + top * h.of_dy, h.of_dy, part, room.chunk_upper);
        for (int64_t place = 0; place < steps; place++) block_of(s, room, h, see, top + place * ROWS, place, steps);
        add(room.weights, room.chunk_upper, s, steps, top == 0, room.out, room.dv);
        add(room.turned, room.chunk_queries, s, steps, top == 0, room.out, room.dk);
    }
}

}  // namespace

extern "C" int64_t permitted() { return tiles_permitted(); }

// Floats of `scratch` that each thread needs.
extern "C" int64_t scratch_floats(const int64_t* sizes) {
    return up(Room::floats({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]}), 16);
}

// q, dy, y, dq (batch, heads, queries, width), k, v, dk, dv (batch, heads, keys, width) of bf16, numbers of a row side by side; strides of
// (batch, heads, rows) in elements: of q, k, v, dy, y, dq, dk, dv, lse (batch, heads, queries) and of the mask, which is fp32, added, and may be
// null. `causal`: query i sees keys up to i. `scratch` is 64 bytes aligned.
extern "C" void attention_backward_tiles(Given q, Given k, Given v, Given dy, Given y, const float* lse, const float* mask, uint16_t* dq,
                                         uint16_t* dk, uint16_t* dv, const int64_t* sizes, const int64_t (*strides)[3], int64_t causal, float scale,
                                         float* scratch, int64_t threads) {
    const Sizes s{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    const int64_t apart = scratch_floats(sizes);
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Tiles tiles;
        tiles.of(TILE_ROWS, TILE_ROWS);
        const Room room(scratch + omp_get_thread_num() * apart, s);
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t b = 0; b < s.batch; b++)
            for (int64_t h = 0; h < s.heads; h++) {
                const auto at = [&](int which) { return b * strides[which][0] + h * strides[which][1]; };
                lay_keys(k + at(1), strides[1][2], s, room.keys);
                lay_keys(v + at(2), strides[2][2], s, room.values);
                lay_values(k + at(1), strides[1][2], s, room.depths);
                const Head head{q + at(0), dy + at(3), y + at(4), lse + at(8), dq + at(5), strides[0][2], strides[3][2], strides[4][2], strides[8][2], strides[5][2]};
                one_head(s, room, head, {mask ? mask + at(9) : nullptr, strides[9][2], causal != 0, scale});
                write(room.dk, s, dk + at(6), strides[6][2]);
                write(room.dv, s, dv + at(7), strides[7][2]);
            }
    }
}
