// Recurrences of layers that keep a state of one size. Definitions: ops/recurrence_steps.py. All tensors are dense and in fp32; the state that is
// left may be the one that was given.

#define KIND 0
#include "integers.h"

#include <cmath>
#include <vector>

namespace {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int64_t LITTLE = 1 << 15;  // elements of states that are done before another thread has begun
constexpr int COLUMNS = 4;           // vectors of a state's rows that are done together

inline float exponential(float x) { return std::exp(x); }
inline V exponential(V x) { return power_of_two(x * LOG2_E); }

struct Sizes {
    int64_t batch, tokens, heads, rows, width, groups;
};

// One head of one row of the batch: S (rows, width), b and c of its group.
void space_of_head(const Sizes& z, const float* x, const float* dt, const float* a, bool each, const float* b, const float* c, float skip,
                   const float* before, float* y, float* s) {
    if (s != before) std::memcpy(s, before, z.rows * z.width * sizeof(float));
    for (int64_t t = 0; t < z.tokens; t++) {
        const float step = dt[t * z.heads], *bt = b + t * z.groups * z.width, *ct = c + t * z.groups * z.width;
        const float one = each ? 0.0f : exponential(step * a[0]);
        for (int64_t p = 0; p < z.rows; p++) {
            const float value = x[t * z.heads * z.rows + p], put_in = step * value;
            float* row = s + p * z.width;
            V sum = {};
            for (int64_t n = 0; n < z.width; n += W) {
                const int64_t count = z.width - n;
                const V kept = each ? exponential(some_of(a + n, count) * step) : V{} + one;
                const V now = some_of(row + n, count) * kept + some_of(bt + n, count) * put_in;
                put(row + n, now, count);
                sum += now * some_of(ct + n, count);
            }
            y[t * z.heads * z.rows + p] = sum_of_lanes(sum) + skip * value;
        }
    }
}

// What makes a vector's length 1, or what divides it by nothing.
inline float inverse_length(const float* x, int64_t count, bool normed) {
    if (!normed) return 1.0f;
    V sum = {};
    for (int64_t i = 0; i < count; i += W) {
        const V v = some_of(x + i, count - i);
        sum += v * v;
    }
    return 1.0f / std::sqrt(sum_of_lanes(sum) + 1e-6f);
}

// One head of one row of the batch: S (rows, width), q and k of its group.
void rule_of_head(const Sizes& z, const float* q, const float* k, const float* v, const float* g, const float* beta, bool normed,
                  const float* before, float* y, float* s) {
    if (s != before) std::memcpy(s, before, z.rows * z.width * sizeof(float));
    const float scale = 1.0f / std::sqrt((float)z.rows);
    std::vector<float> key(z.rows), query(z.rows);
    for (int64_t t = 0; t < z.tokens; t++) {
        const float *kt = k + t * z.groups * z.rows, *qt = q + t * z.groups * z.rows, *vt = v + t * z.heads * z.width;
        const float by_k = inverse_length(kt, z.rows, normed), by_q = inverse_length(qt, z.rows, normed) * scale;
        for (int64_t r = 0; r < z.rows; r++) key[r] = kt[r] * by_k, query[r] = qt[r] * by_q;
        const float kept = exponential(g[t * z.heads]), rate = beta[t * z.heads];
        for (int64_t n = 0; n < z.width; n += COLUMNS * W) {
            V known[COLUMNS] = {}, made[COLUMNS] = {}, change[COLUMNS];
            for (int64_t r = 0; r < z.rows; r++)
                for (int i = 0; i < COLUMNS; i++) {
                    const int64_t at = n + i * W;
                    known[i] += some_of(s + r * z.width + at, z.width - at) * key[r];
                }
            for (int i = 0; i < COLUMNS; i++) {
                const int64_t at = n + i * W;
                change[i] = (some_of(vt + at, z.width - at) - known[i] * kept) * rate;
            }
            for (int64_t r = 0; r < z.rows; r++)
                for (int i = 0; i < COLUMNS && n + i * W < z.width; i++) {
                    const int64_t at = n + i * W;
                    const V now = some_of(s + r * z.width + at, z.width - at) * kept + change[i] * key[r];
                    put(s + r * z.width + at, now, z.width - at);
                    made[i] += now * query[r];
                }
            for (int i = 0; i < COLUMNS && n + i * W < z.width; i++) put(y + t * z.heads * z.width + n + i * W, made[i], z.width - n - i * W);
        }
    }
}

inline int threads_for(const Sizes& z, int64_t threads) {
    return z.batch * z.tokens * z.heads * z.rows * z.width > LITTLE ? (int)threads : 1;
}

}  // namespace

// sizes: batch, tokens, heads, rows and width of a state, groups of b and c. `each`: a has a number for each of the width.
extern "C" void state_space(const float* x, const float* dt, const float* a, const float* b, const float* c, const float* d, const float* before,
                            float* y, float* after, const int64_t* sizes, int64_t each, int64_t threads) {
    const Sizes z = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    const int many = threads_for(z, threads);
#pragma omp parallel for schedule(static) num_threads(many) if (many > 1)
    for (int64_t i = 0; i < z.batch * z.heads; i++) {
        const int64_t row = i / z.heads, head = i % z.heads, group = head / (z.heads / z.groups);
        const int64_t first = row * z.tokens, states = i * z.rows * z.width, shared = (first * z.groups + group) * z.width;
        space_of_head(z, x + (first * z.heads + head) * z.rows, dt + first * z.heads + head, a + head * (each ? z.width : 1), each, b + shared,
                      c + shared, d ? d[head] : 0.0f, before + states, y + (first * z.heads + head) * z.rows, after + states);
    }
}

// sizes: batch, tokens, heads, rows (K) and width (V) of a state, groups of q and k.
extern "C" void delta_rule(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* before, float* y,
                           float* after, const int64_t* sizes, int64_t normed, int64_t threads) {
    const Sizes z = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]};
    const int many = threads_for(z, threads);
#pragma omp parallel for schedule(static) num_threads(many) if (many > 1)
    for (int64_t i = 0; i < z.batch * z.heads; i++) {
        const int64_t row = i / z.heads, head = i % z.heads, group = head / (z.heads / z.groups);
        const int64_t first = row * z.tokens, states = i * z.rows * z.width, shared = (first * z.groups + group) * z.rows;
        rule_of_head(z, q + shared, k + shared, v + (first * z.heads + head) * z.width, g + first * z.heads + head, beta + first * z.heads + head,
                     normed, before + states, y + (first * z.heads + head) * z.width, after + states);
    }
}
