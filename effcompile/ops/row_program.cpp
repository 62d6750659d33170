// A list of operators over rows of tokens, attentions among them, run by one call: what a framework does between them costs more than they
// do for one token.
//
// Each is a function of its own library (`group_linear.cpp`, `int8_linear.cpp`, `few_rows.cpp`, `rows.cpp`, `cached_attention.cpp`), or adds,
// multiplies or appends to a cache here. Values are dense, (batch * rows, width), in slots; the caller fills in those of inputs and outputs. Heads of a
// value stand side by side in a row.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

enum Kind { GROUPS, BYTES, NORM, GATE, TURN, ADD, MULTIPLY, APPEND, ATTEND, WIDE_LINEAR, LAYER_NORM, FOLLOW, SCALE, SHIFT };

struct Step {
    int64_t kind, a, b, out, more;  // slots; -1 where there is none. more: the residual sum of a norm, sin of a rotation
    int64_t k, n;                   // widths of a linear; columns; half of a head, or of one, and heads
    int64_t bits, after;            // of an attention: its mask, -1 for none
    const void *call, *weight, *scales, *bias;
    double eps;  // of an attention its scale; what a scaling multiplies with
};
// An append writes a at the end of the cache b; an attention of a reads keys from the cache b and values from the cache `more`.

struct Cache {  // (batch, heads, rows, width) as it is after the call: new rows are its last; strides in elements
    void* at;
    int64_t of_batch, of_head, of_row, heads, rows, form;
};

enum Form { WIDE, BF16, CODES, PAIRS };  // of its rows, as cached_attention.cpp has them

struct Mask {
    const void* at;
    int64_t strides[3], added;
};

typedef void Groups(const float*, int64_t, int64_t, int64_t, int64_t, const void*, const void*, int64_t, int64_t, float*, int8_t*, float*,
                    int32_t*, int64_t, int64_t);
typedef void Bytes(const float*, int64_t, int64_t, int64_t, const void*, const void*, const void*, int64_t, int64_t, float*, int8_t*, float*,
                   int32_t*, int64_t, int64_t);
typedef void Norm(const float*, const float*, const void*, double, int64_t, int64_t, float*, float*, int64_t);
typedef void Gate(const float*, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t);
typedef void Turn(const float*, const float*, const float*, int64_t, int64_t, int64_t, int64_t, const int64_t*, const int64_t*, int64_t,
                  float*, int64_t);
typedef void Wide(const float*, int64_t, int64_t, int64_t, const void*, const void*, int64_t, float*, int64_t);
typedef void LayerNorm(const float*, const float*, const void*, const void*, double, int64_t, int64_t, float*, int64_t);
typedef void Follow(const float*, int64_t, int64_t, float*, int64_t);
typedef void Attend(const float*, const void*, const void*, const void*, float*, const int64_t*, const int64_t*, const int64_t*,
                    const int64_t*, const int64_t*, int64_t, int64_t, int64_t, float, float*, int64_t);

// To bf16, to nearest even; NaN stays one.
inline uint16_t narrowed(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// Codes of a row and their scale, as cache_rows.py has them.
void coded(const float* from, int64_t width, int8_t* to) {
    float most = 0;
    bool finite = true;
    for (int64_t i = 0; i < width; i++) {
        finite = finite && std::isfinite(from[i]);
        most = std::max(most, std::fabs(from[i]));
    }
    const bool some = finite && most > 1e-30f;
    const float inverse = some ? 127.0f / most : 0.0f, scale = !finite ? NAN : some ? most / 127.0f : 0.0f;
    for (int64_t i = 0; i < width; i++) to[i] = finite ? (int8_t)std::lrint(from[i] * inverse) : 0;
    std::memcpy(to + width, &scale, 4);
}

// Pairs of codes of 4 bits, and behind them their scales.
void paired(const float* from, int64_t width, uint8_t* to) {
    uint8_t* scales = to + width / 2;
    for (int64_t at = 0; at < width; at += 32, from += 32, scales += 2) {
        const int64_t count = std::min<int64_t>(32, width - at), half = count / 2;
        float low = from[0], high = from[0];
        bool finite = true;
        for (int64_t i = 0; i < count; i++) {
            finite = finite && std::isfinite(from[i]);
            low = std::min(low, from[i]);
            high = std::max(high, from[i]);
        }
        const float top = high > -low ? high : low;
        const bool some = finite && std::fabs(top) > 1e-30f;
        const uint16_t held = !finite ? 0x7fc0 : some ? narrowed(top / -8.0f) : 0;
        const uint32_t word = (uint32_t)held << 16;
        float scale;
        std::memcpy(&scale, &word, 4);
        uint8_t codes[32];
        for (int64_t i = 0; i < count; i++) codes[i] = some ? (uint8_t)(std::min(std::max(std::nearbyint(from[i] / scale), -8.0f), 7.0f) + 8) : 8;
        for (int64_t i = 0; i < half; i++) *to++ = codes[i] | codes[half + i] << 4;
        std::memcpy(scales, &held, 2);
    }
}

// New rows (batch, rows, heads * width) into the last rows of a cache.
void append(const Cache& to, const float* from, int64_t batch, int64_t rows, int64_t width) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t s = 0; s < rows; s++)
            for (int64_t h = 0; h < to.heads; h++, from += width) {
                const int64_t at = b * to.of_batch + h * to.of_head + (to.rows - rows + s) * to.of_row;
                if (to.form == WIDE)
                    std::memcpy(static_cast<float*>(to.at) + at, from, width * 4);
                else if (to.form == CODES)
                    coded(from, width, static_cast<int8_t*>(to.at) + at);
                else if (to.form == PAIRS)
                    paired(from, width, static_cast<uint8_t*>(to.at) + at);
                else
                    for (int64_t i = 0; i < width; i++) static_cast<uint16_t*>(to.at)[at + i] = narrowed(from[i]);
            }
}

// Queries (batch, rows, heads * width) over a cache.
void attend(const Step& s, const Cache& keys, const Cache& values, const Mask* mask, const float* q, float* out, int64_t batch, int64_t rows,
            float* scratch, int64_t threads) {
    const int64_t sizes[6] = {batch, keys.heads, s.n / keys.heads, rows, keys.rows, s.k}, none[3] = {0, 0, 0};
    const int64_t of_q[3] = {rows * s.n * s.k, s.k, s.n * s.k};
    const int64_t of_k[3] = {keys.of_batch, keys.of_head, keys.of_row};
    const int64_t of_v[3] = {values.of_batch, values.of_head, values.of_row};
    reinterpret_cast<Attend*>(s.call)(q, keys.at, values.at, mask ? mask->at : nullptr, out, sizes, of_q, of_k, of_v,
                                      mask ? mask->strides : none, keys.form, values.form, mask ? mask->added : 0, (float)s.eps, scratch, threads);
}

}  // namespace

// `scratch` holds the codes of x of the widest linear, and 8 bytes for each of its groups or rows, at 64 bytes for each 32 columns;
// or what `cached_attention` wants of it.
extern "C" void row_program(const Step* steps, int64_t count, float* const* slots, int64_t batch, int64_t rows, int8_t* scratch,
                            int64_t threads, int64_t of_cos, const Cache* caches, const Mask* masks) {
    const int64_t m = batch * rows;
    for (const Step* s = steps; s < steps + count; s++) {
        const float* a = slots[s->a];
        if (s->kind == APPEND) {
            append(caches[s->b], a, batch, rows, s->k);
            continue;
        }
        float* out = slots[s->out];
        if (s->kind == ATTEND) {
            attend(*s, caches[s->b], caches[s->more], s->bits < 0 ? nullptr : masks + s->bits, a, out, batch, rows,
                   reinterpret_cast<float*>(scratch), threads);
            continue;
        }
        const float* b = s->b < 0 ? nullptr : slots[s->b];
        float* more = s->more < 0 ? nullptr : slots[s->more];
        if (s->kind == GROUPS || s->kind == BYTES) {
            const int64_t scales = m * (s->kind == GROUPS ? (s->k + 31) / 32 : 1);
            // of bytes as many as tiles read at a time, where they multiply
            const int64_t columns = s->kind == BYTES && s->k > 32 ? (s->k + 63) / 64 * 64 : (s->k + 31) / 32 * 32;
            int8_t* codes = scratch;
            float* x_scales = reinterpret_cast<float*>(codes + m * columns);
            int32_t* offsets = reinterpret_cast<int32_t*>(x_scales + scales);
            if (s->kind == GROUPS)
                reinterpret_cast<Groups*>(s->call)(a, s->k, m, s->k, s->bits, s->weight, s->bias, s->n, s->after, out, codes, x_scales,
                                                   offsets, m, threads);
            else
                reinterpret_cast<Bytes*>(s->call)(a, s->k, m, s->k, s->weight, s->scales, s->bias, s->n, s->after, out, codes, x_scales,
                                                  offsets, m, threads);
        } else if (s->kind == NORM) {
            reinterpret_cast<Norm*>(s->call)(a, b, s->weight, s->eps, m, s->n, out, more, threads);
        } else if (s->kind == GATE) {
            reinterpret_cast<Gate*>(s->call)(a, s->n, b, s->n, m, s->n, out, threads);
        } else if (s->kind == TURN) {
            const int64_t wide = s->n * 2 * s->k, strides[3] = {rows * wide, 2 * s->k, wide};
            reinterpret_cast<Turn*>(s->call)(a, b, more, batch, s->n, rows, s->k, strides, strides, of_cos, out, threads);
        } else if (s->kind == WIDE_LINEAR) {
            reinterpret_cast<Wide*>(s->call)(a, s->k, m, s->k, s->weight, s->bias, s->n, out, threads);
        } else if (s->kind == LAYER_NORM) {
            reinterpret_cast<LayerNorm*>(s->call)(a, b, s->weight, s->bias, s->eps, m, s->n, out, threads);
        } else if (s->kind == FOLLOW) {
            reinterpret_cast<Follow*>(s->call)(a, m * s->n, s->after, out, threads);
        } else if (s->kind == SCALE) {
            for (int64_t i = 0; i < m * s->n; i++) out[i] = a[i] * (float)s->eps;
        } else if (s->kind == SHIFT) {
            const float* by = static_cast<const float*>(s->bias);
            for (int64_t row = 0; row < m; row++)
                for (int64_t i = 0; i < s->n; i++) out[row * s->n + i] = a[row * s->n + i] + by[i];
        } else if (s->kind == ADD) {
            for (int64_t i = 0; i < m * s->n; i++) out[i] = a[i] + b[i];
        } else {
            for (int64_t i = 0; i < m * s->n; i++) out[i] = a[i] * b[i];
        }
    }
}
