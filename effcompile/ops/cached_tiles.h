// Attention over rows in bf16, 8 or 4 bits by AMX's tiles: what is held in so few bits is bf16 as it is, without its scales.
//
// Queries, and weights of values, are two numbers of bf16 each, one rounded and what that leaves: 16 bits, as products of fp32 have 24.
// Two columns (of queries) or rows (of weights) of a tile take them: 8 queries at a time fill it.

#pragma once

#include "cached_rows.h"
#include "tiles.h"

namespace {

constexpr int64_t EIGHT = 8, WORDS = 256;  // queries at a time; words of a tile

inline bool tiled(const Rows& rows) { return rows.form != WIDE && rows.width % 32 == 0 && rows.width <= 128; }

// Each word: a number of a as bf16 and above it one of b, both without a bit that bf16 does not have; the same, rounded.
inline VU cut(V a, V b) { return (VU)a >> 16 | ((VU)b & 0xffff0000u); }
inline VU rounded_halves(V a, V b) { return ((VU)a + 0x8000u) >> 16 | (((VU)b + 0x8000u) & 0xffff0000u); }
inline V left_of(V x) { return x - (V)((VU)x & 0xffff0000u); }
inline VU nearest(V x) { return (VU)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline void put_words(float* to, VU words) { store(to, (V)words); }

// The rest of a number that was cut, or all that comes before it.
inline VU halves_of(V a, V b, bool rest) { return rest ? rounded_halves(left_of(a), left_of(b)) : cut(a, b); }

// W numbers of a, in the lower halves of words, and W of b in the upper ones: of rows in codes, without their scales.
inline VU both(const uint16_t* a, const uint16_t* b) { return (VU)words_at(a) | (VU)words_at(b) << 16; }
inline VU both(const int8_t* a, const int8_t* b) { return cut(as_floats(words_at(a)), as_floats(words_at(b))); }
inline VU both_looked_up(VI a, VI b) {  // of an index its lowest four bits are read
    const VU table = (VU)OF_PAIRS;
    return (VU)_mm512_permutexvar_epi32((__m512i)a, (__m512i)(table >> 16)) | (VU)_mm512_permutexvar_epi32((__m512i)b, (__m512i)table);
}

// What a thread holds of a span, as tiles.
struct TileRoom {
    float *queries, *laid, *weights, *made;
};

// Queries as tiles of the right side: [rows / 8][width / 32][16][16]. Pairs of columns are as keys have them: neighbours in bf16, else 16 apart.
inline void lay_queries(const float* const* q, int64_t rows, int64_t width, int64_t form, float* to) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (int64_t r = 0; r < rows; r += EIGHT)
        for (int64_t d = 0; d < width; d += 32, to += WORDS) {
            V words[W] = {};
            for (int64_t x = 0; x < std::min(EIGHT, rows - r); x++) {
                V a = load(q[r + x] + d), b = load(q[r + x] + d + W);
                if (form == BF16) {
                    const V first = a;
                    a = (V)_mm512_permutex2var_ps((__m512)first, even, (__m512)b);
                    b = (V)_mm512_permutex2var_ps((__m512)first, (__m512i)((VI)even + 1), (__m512)b);
                }
                // to the nearest: what errs here errs in all scores
                const VU of_a = nearest(a), of_b = nearest(b);
                words[x] = (V)(of_a | of_b << 16);
                words[EIGHT + x] = (V)(nearest(a - (V)(of_a << 16)) | nearest(b - (V)(of_b << 16)) << 16);
            }
            transpose_stages<1>(words);
            for (int64_t i = 0; i < W; i++) store(to + i * W, words[i]);
        }
}

// Sixteen keys as tiles of the left side, [width / 32][16][16]; zeros beyond `count`.
template <int FORM>
inline void lay_keys(const Rows& keys, int64_t count, float* to) {
    for (int64_t key = 0; key < W; key++, to += W) {
        const char* p = keys.row(key);
        for (int64_t c = 0; c < keys.width / 32; c++) {
            VU words = {};
            if (key < count && FORM == BF16) {
                words = (VU)load(reinterpret_cast<const float*>(p + c * 64));
            } else if (key < count && FORM == CODES) {
                words = both(reinterpret_cast<const int8_t*>(p) + c * 32, reinterpret_cast<const int8_t*>(p) + c * 32 + W);
            } else if (key < count) {
                const VI pairs = words_at(reinterpret_cast<const uint8_t*>(p) + c * 16);
                words = both_looked_up(pairs, pairs >> 4);
            }
            put_words(to + c * WORDS, words);
        }
    }
}

// The scales of 16 rows: of codes one, of pairs for each 32 columns one; 0 beyond `count`.
inline void scales_of(const Rows& rows, int64_t count, V* to) {
    const __mmask16 there = count >= W ? (__mmask16)-1 : (__mmask16)((1u << count) - 1);
    const __m512i row = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i at = _mm512_mullo_epi32(row, _mm512_set1_epi32((int)rows.stride));
    const auto words = [&](int64_t offset) {
        return (VU)_mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, at, rows.at + offset, 1);
    };
    if (rows.form == CODES) {
        to[0] = (V)words(rows.width);
        return;
    }
    const int64_t chunks = rows.width / 32;
    for (int64_t c = 0; c < chunks; c += 2) {
        const VU two = words(rows.width / 2 + c * 2 - (c + 1 < chunks ? 0 : 2));  // nothing beyond a row is read
        to[c] = (V)(c + 1 < chunks ? two << 16 : two & 0xffff0000u);
        if (c + 1 < chunks) to[c + 1] = (V)(two & 0xffff0000u);
    }
}

// Scores of 8 queries and 16 keys of what tiles made, of one or of each 32 columns: [16 keys][16].
inline void score_tile(const Rows& keys, int64_t count, const float* made, float scale, int64_t rows, float* scores, int64_t apart) {
    V scales[4], r[W];
    if (keys.form != BF16) scales_of(keys, count, scales);
    for (int64_t key = 0; key < W; key++) r[key] = load(made + key * W);
    if (keys.form == PAIRS) {
        alignas(64) float each[4][W];
        for (int64_t c = 0; c < keys.width / 32; c++) store(each[c], scales[c]);
#pragma GCC unroll 16
        for (int key = 0; key < W; key++) {
            r[key] = r[key] * each[0][key];
            for (int64_t c = 1; c < keys.width / 32; c++) r[key] = r[key] + load(made + c * WORDS + key * W) * each[c][key];
        }
    }
    V sums[EIGHT];
#pragma GCC unroll 8
    for (int i = 0; i < EIGHT; i++) sums[i] = first_of<8>(r[i], r[i + 8]) + second_of<8>(r[i], r[i + 8]);
    const auto turn = [&](auto stage) {
        constexpr int H = decltype(stage)::value;
#pragma GCC unroll 8
        for (int i = 0; i < EIGHT; i++)
            if (!(i & H)) {
                const V a = sums[i], b = sums[i + H];
                sums[i] = first_of<H>(a, b), sums[i + H] = second_of<H>(a, b);
            }
    };
    turn(std::integral_constant<int, 1>()), turn(std::integral_constant<int, 2>()), turn(std::integral_constant<int, 4>());
    const V factor = keys.form == CODES ? scales[0] * scale : V{} + scale;
#pragma GCC unroll 8
    for (int x = 0; x < EIGHT; x++)
        if (x < rows) store(scores + x * apart, sums[x] * factor);
}

// Products of 16 keys with 8 queries, of all columns or of each 32 (1024 bytes of each). Queries stay in 2, 3, 6 and 7.
inline void hold_queries(const float* queries, int64_t chunks) {
    before_tiles();
    _tile_loadd(6, queries, STEP);
    if (chunks > 1) _tile_loadd(7, queries + WORDS, STEP);
    if (chunks > 2) _tile_loadd(2, queries + 2 * WORDS, STEP);
    if (chunks > 3) _tile_loadd(3, queries + 3 * WORDS, STEP);
}

inline void multiply_keys(const void* keys, int64_t stride, int64_t of_chunk, int64_t chunks, bool each, float* made) {
    const char* from = static_cast<const char*>(keys);
    before_tiles();
    _tile_zero(0);
    _tile_loadd(4, from, stride);
    _tile_dpbf16ps(0, 4, 6);
    const auto next = [&](int64_t chunk) {
        if (!each) return;
        _tile_stored(0, made + (chunk - 1) * WORDS, STEP);
        _tile_zero(0);
    };
    if (chunks > 1) {
        _tile_loadd(5, from + of_chunk, stride);
        next(1);
        _tile_dpbf16ps(0, 5, 7);
    }
    if (chunks > 2) {
        _tile_loadd(4, from + 2 * of_chunk, stride);
        next(2);
        _tile_dpbf16ps(0, 4, 2);
    }
    if (chunks > 3) {
        _tile_loadd(5, from + 3 * of_chunk, stride);
        next(3);
        _tile_dpbf16ps(0, 5, 3);
    }
    _tile_stored(0, made + (each ? (chunks - 1) * WORDS : 0), STEP);
}

// The scores of a span: keys are laid for the first queries, whose scores are made of one tile while the next is multiplied.
inline void score_by_tiles(const float* const* q, int64_t rows, const Rows& keys, int64_t count, float scale, const TileRoom& room,
                           float* scores, int64_t apart, Ahead& ahead) {
    const int64_t chunks = keys.width / 32, tiles = (count + W - 1) / W, of_tile = chunks * WORDS;
    lay_queries(q, rows, keys.width, keys.form, room.queries);
    const auto lay = keys.form == BF16 ? lay_keys<BF16> : keys.form == CODES ? lay_keys<CODES> : lay_keys<PAIRS>;
    const int64_t lines = ahead.share(0.6 / (double)(tiles * ((rows + EIGHT - 1) / EIGHT)));
    const auto as_held = [&](int64_t tile) { return keys.form == BF16 && (tile + 1) * W <= count; };
    const auto lay_tile = [&](int64_t tile) {
        if (tile < tiles && !as_held(tile)) lay(keys.from(tile * W), count - tile * W, room.laid + tile * of_tile);
    };
    lay_tile(0);
    for (int64_t r = 0; r < rows; r += EIGHT) {
        hold_queries(room.queries + r / EIGHT * of_tile, chunks);
        for (int64_t tile = 0; tile <= tiles; tile++) {
            if (!r) lay_tile(tile + 1);  // tiles are read from the cache: what is stored has to have come there
            if (tile < tiles && as_held(tile))
                multiply_keys(keys.row(tile * W), keys.stride, 64, chunks, false, room.made + tile % 2 * of_tile);
            else if (tile < tiles)
                multiply_keys(room.laid + tile * of_tile, STEP, WORDS * 4, chunks, keys.form == PAIRS, room.made + tile % 2 * of_tile);
            ahead.ask(lines);
            if (tile > 0)
                score_tile(keys.from((tile - 1) * W), count - (tile - 1) * W, room.made + (tile - 1) % 2 * of_tile, scale, rows - r,
                           scores + r * apart + (tile - 1) * W, apart);
        }
    }
}

// Weights of 8 queries as tiles of the left side, times scales of values: [1 or width / 32][keys / 32][16][16]. Pairs of keys are 16 apart.
inline void lay_weights(const float* weights, int64_t apart, int64_t rows, const Rows& values, int64_t count, float* to) {
    const int64_t steps = (count + 31) / 32, chunks = values.form == PAIRS ? values.width / 32 : 1;
    for (int64_t step = 0; step < steps; step++) {
        V scales[2][4];
        for (int64_t half = 0; half < 2 && values.form != BF16; half++)
            scales_of(values.from(step * 32 + half * W), std::max<int64_t>(count - step * 32 - half * W, 0), scales[half]);
        for (int64_t x = 0; x < EIGHT; x++)
            for (int64_t c = 0; c < chunks; c++) {
                float* at = to + (c * steps + step) * WORDS + x * W;
                V a = {}, b = {};
                if (x < rows) a = load(weights + x * apart + step * 32), b = load(weights + x * apart + step * 32 + W);
                if (values.form != BF16) a = a * scales[0][c], b = b * scales[1][c];
                put_words(at, halves_of(a, b, false)), put_words(at + EIGHT * W, halves_of(a, b, true));
            }
    }
}

// 32 values, `tiles` times 16 columns of them from `column`, as tiles of the right side: [tiles][16 pairs][16]; zeros beyond `count`.
template <int FORM>
inline void lay_values(const Rows& values, int64_t count, int64_t column, int64_t tiles, float* to) {
    alignas(64) static const char none[512] = {};  // in codes a value of no scale, in bf16 a zero
    for (int64_t key = 0; key < W; key++, to += W) {
        const char *a = key < count ? values.row(key) : none, *b = key + W < count ? values.row(key + W) : none;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t at = column + t * W;
            if (FORM == BF16) {
                put_words(to + t * WORDS, both(reinterpret_cast<const uint16_t*>(a) + at, reinterpret_cast<const uint16_t*>(b) + at));
            } else if (FORM == CODES) {
                put_words(to + t * WORDS, both(reinterpret_cast<const int8_t*>(a) + at, reinterpret_cast<const int8_t*>(b) + at));
            } else if (t % 2 == 0) {
                const VI of_a = words_at(reinterpret_cast<const uint8_t*>(a) + at / 2), of_b = words_at(reinterpret_cast<const uint8_t*>(b) + at / 2);
                put_words(to + t * WORDS, both_looked_up(of_a, of_b)), put_words(to + (t + 1) * WORDS, both_looked_up(of_a >> 4, of_b >> 4));
            }
        }
    }
}

// 0 to 3 += weights of 32 keys (4, of the second 32 columns 5) times their values.
inline void multiply_values(const float* weights, int64_t of_chunk, const float* values, int64_t tiles) {
    before_tiles();
    _tile_loadd(4, weights, STEP);
    _tile_loadd(6, values, STEP);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + WORDS, STEP);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles == 2) return;
    _tile_loadd(5, weights + of_chunk, STEP);
    _tile_loadd(6, values + 2 * WORDS, STEP);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, values + 3 * WORDS, STEP);
    _tile_dpbf16ps(3, 5, 7);
}

// out = the sum of a span's values by weights.
inline void gather_by_tiles(const float* weights, int64_t apart, int64_t rows, const Rows& values, int64_t count, const TileRoom& room,
                            float* const* out, Ahead& ahead) {
    const int64_t steps = (count + 31) / 32, of_chunk = values.form == PAIRS ? steps * WORDS : 0;
    const auto lay = values.form == BF16 ? lay_values<BF16> : values.form == CODES ? lay_values<CODES> : lay_values<PAIRS>;
    const int64_t lines = ahead.share(1.0 / (double)(steps * ((values.width + 63) / 64) * ((rows + EIGHT - 1) / EIGHT)));
    for (int64_t r = 0; r < rows; r += EIGHT) {
        lay_weights(weights + r * apart, apart, rows - r, values, count, room.weights);
        for (int64_t column = 0; column < values.width; column += 64) {
            const int64_t tiles = std::min<int64_t>(4, (values.width - column) / W);
            float* laid = room.laid + column * steps * 16;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            const auto lay_step = [&](int64_t step) {
                if (!r && step < steps) lay(values.from(step * 32), count - step * 32, column, tiles, laid + step * tiles * WORDS);
            };
            lay_step(0);
            for (int64_t step = 0; step < steps; step++) {
                lay_step(step + 1);
                multiply_values(room.weights + column / 32 * of_chunk + step * WORDS, of_chunk, laid + step * tiles * WORDS, tiles);
                ahead.ask(lines);
            }
            _tile_stored(0, room.made, STEP);
            _tile_stored(1, room.made + WORDS, STEP);
            _tile_stored(2, room.made + 2 * WORDS, STEP);
            _tile_stored(3, room.made + 3 * WORDS, STEP);
            before_tiles();
            for (int64_t x = 0; x < std::min(EIGHT, rows - r); x++)
                for (int64_t t = 0; t < tiles; t++) {
                    const float* made = room.made + t * WORDS + x * W;
                    store(out[r + x] + column + t * W, load(made) + load(made + EIGHT * W));
                }
        }
    }
}

}  // namespace
