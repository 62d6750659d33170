// What layers that keep a state of one size compute. Definitions: ops/recurrence_steps.py. All in fp32; states, weights and results are dense,
// and of the rest each token's numbers stand side by side. The state that is left may be the one that was given.

#define KIND 0
#include "integers.h"

#include <cmath>
#include <vector>

namespace {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr int64_t LITTLE = 1 << 15;  // elements of states that are done before another thread has begun
constexpr int COLUMNS = 4;           // vectors of a state's rows that are done together
constexpr int64_t LONGEST = 16;      // of a convolution whose weights are held in registers

inline V exponential(V x) { return power_of_two(x * LOG2_E); }

struct Strides {
    int64_t batch, token;
};

struct Sizes {
    int64_t batch, tokens, heads, rows, width, groups;
};

// W channels of one row of the batch: w and S (channels, kernel).
void conv_of_channels(const float* x, Strides by, int64_t tokens, int64_t channels, int64_t kernel, int64_t first, const float* w,
                      const float* bias, const float* before, bool silu, float* y, float* after) {
    const int64_t count = std::min<int64_t>(W, channels - first);
    V weights[LONGEST], seen[LONGEST];  // the oldest first
    for (int64_t j = 0; j < kernel; j++) {
        float of_w[W] = {}, of_s[W] = {};
        for (int64_t i = 0; i < count; i++) of_w[i] = w[(first + i) * kernel + j], of_s[i] = before[(first + i) * kernel + j];
        weights[j] = load(of_w), seen[j] = load(of_s);
    }
    const V added = bias ? some_of(bias + first, count) : V{};
    for (int64_t t = 0; t < tokens; t++) {
        for (int64_t j = 0; j + 1 < kernel; j++) seen[j] = seen[j + 1];
        seen[kernel - 1] = some_of(x + t * by.token + first, count);
        V sum = added;
        for (int64_t j = 0; j < kernel; j++) sum += seen[j] * weights[j];
        put(y + t * channels + first, silu ? sum * sigmoid(sum) : sum, count);
    }
    for (int64_t j = 0; j < kernel; j++)
        for (int64_t i = 0; i < count; i++) after[(first + i) * kernel + j] = seen[j][i];
}

// One head of one row of the batch: S (rows, width), b and c of its group.
void space_of_head(const Sizes& z, const float* x, Strides by_x, const float* dt, Strides by_dt, const float* a, bool each, bool logs,
                   const float* b, Strides by_b, const float* c, Strides by_c, float skip, const float* before, float* y, float* s) {
    if (s != before) std::memcpy(s, before, z.rows * z.width * sizeof(float));
    const float decay = each ? 0.0f : logs ? -std::exp(a[0]) : a[0];
    for (int64_t t = 0; t < z.tokens; t++) {
        const float step = dt[t * by_dt.token], *bt = b + t * by_b.token, *ct = c + t * by_c.token;
        const float one = each ? 0.0f : std::exp(step * decay);
        for (int64_t p = 0; p < z.rows; p++) {
            const float value = x[t * by_x.token + p], put_in = step * value;
            float* row = s + p * z.width;
            V sum = {};
            for (int64_t n = 0; n < z.width; n += W) {
                const int64_t count = z.width - n;
                V kept = V{} + one;
                if (each) {
                    const V given = some_of(a + n, count);
                    kept = exponential((logs ? V{} - exponential(given) : given) * step);
                }
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
void rule_of_head(const Sizes& z, const float* q, Strides by_q, const float* k, Strides by_k, const float* v, Strides by_v, const float* g,
                  Strides by_g, const float* beta, Strides by_beta, bool normed, const float* before, float* y, float* s) {
    if (s != before) std::memcpy(s, before, z.rows * z.width * sizeof(float));
    const float scale = 1.0f / std::sqrt((float)z.rows);
    std::vector<float> key(z.rows), query(z.rows);
    for (int64_t t = 0; t < z.tokens; t++) {
        const float *kt = k + t * by_k.token, *qt = q + t * by_q.token, *vt = v + t * by_v.token;
        const float of_k = inverse_length(kt, z.rows, normed), of_q = inverse_length(qt, z.rows, normed) * scale;
        for (int64_t r = 0; r < z.rows; r++) key[r] = kt[r] * of_k, query[r] = qt[r] * of_q;
        const float kept = std::exp(g[t * by_g.token]), rate = beta[t * by_beta.token];
        float* yt = y + t * z.heads * z.width;
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
            for (int i = 0; i < COLUMNS && n + i * W < z.width; i++) put(yt + n + i * W, made[i], z.width - n - i * W);
        }
    }
}

inline int threads_for(int64_t elements, int64_t threads) { return elements > LITTLE ? (int)threads : 1; }

inline Sizes sizes_of(const int64_t* s) { return {s[0], s[1], s[2], s[3], s[4], s[5]}; }

}  // namespace

// sizes: batch, tokens, channels, kernel, and the strides of x.
extern "C" void short_conv(const float* x, const float* w, const float* bias, const float* before, float* y, float* after, const int64_t* sizes,
                           int64_t silu, int64_t threads) {
    const int64_t batch = sizes[0], tokens = sizes[1], channels = sizes[2], kernel = sizes[3], blocks = (channels + W - 1) / W;
    const Strides by = {sizes[4], sizes[5]};
    const int many = threads_for(batch * tokens * channels, threads);
#pragma omp parallel for schedule(static) num_threads(many) if (many > 1)
    for (int64_t i = 0; i < batch * blocks; i++) {
        const int64_t row = i / blocks, states = row * channels * kernel;
        conv_of_channels(x + row * by.batch, by, tokens, channels, kernel, i % blocks * W, w, bias, before + states, silu,
                         y + row * tokens * channels, after + states);
    }
}

// sizes: batch, tokens, heads, rows and width of a state, groups of b and c; strides of x, dt, b and c. `each`: a has a number for each of the
// width.
extern "C" void state_space(const float* x, const float* dt, const float* a, const float* b, const float* c, const float* d, const float* before,
                            float* y, float* after, const int64_t* sizes, const int64_t* strides, int64_t each, int64_t logs, int64_t threads) {
    const Sizes z = sizes_of(sizes);
    const Strides* by = reinterpret_cast<const Strides*>(strides);
    const int many = threads_for(z.batch * z.tokens * z.heads * z.rows * z.width, threads);
#pragma omp parallel for schedule(static) num_threads(many) if (many > 1)
    for (int64_t i = 0; i < z.batch * z.heads; i++) {
        const int64_t row = i / z.heads, head = i % z.heads, shared = head / (z.heads / z.groups) * z.width, states = i * z.rows * z.width;
        space_of_head(z, x + row * by[0].batch + head * z.rows, by[0], dt + row * by[1].batch + head, by[1], a + head * (each ? z.width : 1), each,
                      logs, b + row * by[2].batch + shared, by[2], c + row * by[3].batch + shared, by[3], d ? d[head] : 0.0f, before + states,
                      y + (row * z.tokens * z.heads + head) * z.rows, after + states);
    }
}

// sizes: batch, tokens, heads, rows (K) and width (V) of a state, groups of q and k; strides of q, k, v, g and beta.
extern "C" void delta_rule(const float* q, const float* k, const float* v, const float* g, const float* beta, const float* before, float* y,
                           float* after, const int64_t* sizes, const int64_t* strides, int64_t normed, int64_t threads) {
    const Sizes z = sizes_of(sizes);
    const Strides* by = reinterpret_cast<const Strides*>(strides);
    const int many = threads_for(z.batch * z.tokens * z.heads * z.rows * z.width, threads);
#pragma omp parallel for schedule(static) num_threads(many) if (many > 1)
    for (int64_t i = 0; i < z.batch * z.heads; i++) {
        const int64_t row = i / z.heads, head = i % z.heads, shared = head / (z.heads / z.groups) * z.rows, states = i * z.rows * z.width;
        rule_of_head(z, q + row * by[0].batch + shared, by[0], k + row * by[1].batch + shared, by[1], v + row * by[2].batch + head * z.width, by[2],
                     g + row * by[3].batch + head, by[3], beta + row * by[4].batch + head, by[4], normed, before + states,
                     y + (row * z.tokens * z.heads + head) * z.width, after + states);
    }
}
