// The softmax of a loss head's logits, row by row, where they lie: its denominator, and the gradient of the cross entropy. Definition:
// ops/loss_rows.py. A row is read three times at the most, and from the cache but for the first.

#define KIND 0
#include "integers.h"

#include <cmath>

namespace {

constexpr float LOG2_E = 1.4426950408889634f, SMALLEST = -126.0f;
constexpr int SUMS = 4;  // that are added to in turn: one would wait for itself

inline V widened(VH halves) { return (V)(__builtin_convertvector(halves, VU) << 16); }
inline V whole(const float* p) { return load(p); }
inline V whole(const uint16_t* p) { return widened(*reinterpret_cast<const VHLoose*>(p)); }

// The first `count` numbers, and minus infinity behind them.
template <typename T>
inline V some(const T* p, int64_t count) {
    if (count >= W) return whole(p);
    T numbers[W];
    std::fill(numbers, numbers + W, sizeof(T) == 2 ? (T)0xff80 : (T)-INFINITY);
    std::memcpy(numbers, p, count * sizeof(T));
    return whole(numbers);
}
inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) {
    const uint32_t word = uint32_t(*p) << 16;
    float number;
    std::memcpy(&number, &word, 4);
    return number;
}

// e^(z - from), 0 where that is less than any normal number, NaN of one.
inline V exponential(V z, float from) {
    const V t = (z - from) * LOG2_E;
    return where(t < SMALLEST, V{}, power_of_two(t));
}

// log sum exp(scale * z).
template <typename T>
float denominator(const T* z, int64_t count, float scale) {
    V most[SUMS], sums[SUMS] = {};
    for (V& m : most) m = V{} - INFINITY;
    for (int64_t i = 0; i < count; i += SUMS * W)
        for (int s = 0; s < SUMS && i + s * W < count; s++) {
            const V v = some(z + i + s * W, count - i - s * W) * scale;
            most[s] = where(v > most[s], v, most[s]);
        }
    float largest = -INFINITY;
    for (const V& m : most)
        for (int lane = 0; lane < W; lane++) largest = std::max(largest, m[lane]);
    if (!std::isfinite(largest)) return largest > 0 ? NAN : largest;
    for (int64_t i = 0; i < count; i += SUMS * W)
        for (int s = 0; s < SUMS && i + s * W < count; s++)
            sums[s] = sums[s] + exponential(some(z + i + s * W, count - i - s * W) * scale, largest);
    return largest + std::log(sum_of_lanes(sums[0] + sums[1] + sums[2] + sums[3]));
}

// z becomes (softmax(scale * z) - [label]) * factor.
template <typename T>
void gradient(T* z, int64_t count, float scale, float lse, int64_t label, float factor) {
    const float own = (std::exp(one(z + label) * scale - lse) - 1.0f) * factor;
    for (int64_t i = 0; i < count; i += W) put(z + i, exponential(some(z + i, count - i) * scale, lse) * factor, count - i);
    put(z + label, V{} + own, 1);
}

template <typename T>
int64_t all_rows(T* z, int64_t rows, int64_t count, int64_t stride, float scale, const int64_t* labels, const float* factors, float* picked, float* lse, bool given,
                 int64_t threads) {
    for (int64_t r = 0; r < rows; r++)
        if (labels[r] < 0 || labels[r] >= count) return 0;
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        T* row = z + r * stride;
        const float sum = given ? lse[r] : denominator(row, count, scale);
        if (lse && !given) lse[r] = sum;
        if (picked) picked[r] = one(row + labels[r]) * scale - sum;
        if (factors) gradient(row, count, scale, sum, labels[r], factors[r]);
    }
    return 1;
}

}  // namespace

// z (rows, count) in fp32 or, `narrow`, bf16, `stride` numbers from row to row; labels, factors, picked and lse (rows). Writes log sum exp to `lse`, or reads it there if it is
// `given`; the label's log probability to `picked`; the gradient over z, where there are `factors`. Any of the three may be null. Returns 0,
// and does nothing, where a label is none of the columns.
extern "C" int64_t loss_rows(void* z, int64_t narrow, int64_t rows, int64_t count, int64_t stride, float scale, const int64_t* labels, const float* factors,
                             float* picked, float* lse, int64_t given, int64_t threads) {
    if (narrow) return all_rows((uint16_t*)z, rows, count, stride, scale, labels, factors, picked, lse, given, threads);
    return all_rows((float*)z, rows, count, stride, scale, labels, factors, picked, lse, given, threads);
}
