// A step of Adam on states of 8 bits on a CPU: parameter, gradient and codes are read once and written once. Definition: ops/states8.py.
//
// Compiled by machine/native.py. Blocks of 256 elements are apart: each has its scale, and one thread does it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int BLOCK = 256;

inline float widened(float value) { return value; }
inline float widened(uint16_t bits) {  // bfloat16
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

inline void narrowed(float value, float& to) { to = value; }
inline void narrowed(float value, uint16_t& to) {  // to the nearest, ties to even
    uint32_t word;
    std::memcpy(&word, &value, 4);
    to = std::isnan(value) ? 0x7fc0 : uint16_t((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// As torch.lerp: near each end exact there.
inline float between(float a, float b, float weight) { return weight < 0.5f ? a + weight * (b - a) : b - (b - a) * (1 - weight); }

// Codes of a block by the nearest entries of the ascending table; returns its scale. (The search over all elements at a time, in vectors
// that gather, takes 1.7 times as long: AMD EPYC, AVX2.)
inline float encoded(const float* state, uint8_t* codes, const float* table) {
    float most = 0;
    for (int i = 0; i < BLOCK; i++) most = std::max(most, std::fabs(state[i]));
    const float scale = std::max(most, 1e-12f);
    for (int i = 0; i < BLOCK; i++) {
        const float x = state[i] / scale;
        int low = 0;  // of the last entry that is not above x
        for (int step = BLOCK / 2; step > 0; step /= 2) low += x >= table[low + step] ? step : 0;
        const int high = std::min(low + 1, BLOCK - 1);
        codes[i] = uint8_t(x - table[low] >= (table[high] - table[low]) * 0.5f ? high : low);
    }
    return scale;
}

struct Numbers {
    float lr, shrink, decay, weight1, weight2, eps, correction1, correction2;
};

template <typename T>
void block(T* p, const T* gradient, uint8_t* first, float& first_scale, uint8_t* second, float& second_scale, const float* with_sign,
           const float* without_sign, const Numbers& n) {
    float m[BLOCK], v[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        float wide = widened(p[i]), slope = widened(gradient[i]);
        wide -= n.shrink * wide;
        slope += n.decay * wide;
        m[i] = between(with_sign[first[i]] * first_scale, slope, n.weight1);
        v[i] = between(without_sign[second[i]] * second_scale, slope * slope, n.weight2);
        narrowed(wide - n.lr * (m[i] / n.correction1) / (std::sqrt(v[i]) / n.correction2 + n.eps), p[i]);
    }
    first_scale = encoded(m, first, with_sign);
    second_scale = encoded(v, second, without_sign);
}

template <typename T>
void all(T* p, const T* gradient, uint8_t* first, float* first_scale, uint8_t* second, float* second_scale, const float* with_sign,
         const float* without_sign, const Numbers& n, int64_t blocks, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * BLOCK;
        block(p + at, gradient + at, first + at, first_scale[b], second + at, second_scale[b], with_sign, without_sign, n);
    }
}

}  // namespace

// shrink: the share of the parameter that a decoupled decay takes; decay: what of it is added to the gradient. One of both is 0.
// correction1, correction2: what the moments are divided by, of the second one's root.
extern "C" void adam8(int narrow, void* p, const void* gradient, uint8_t* first, float* first_scale, uint8_t* second, float* second_scale,
                      const float* with_sign, const float* without_sign, float lr, float shrink, float decay, float weight1, float weight2,
                      float eps, float correction1, float correction2, int64_t blocks, int threads) {
    const Numbers n{lr, shrink, decay, weight1, weight2, eps, correction1, correction2};
    if (narrow)
        all(static_cast<uint16_t*>(p), static_cast<const uint16_t*>(gradient), first, first_scale, second, second_scale, with_sign,
            without_sign, n, blocks, threads);
    else
        all(static_cast<float*>(p), static_cast<const float*>(gradient), first, first_scale, second, second_scale, with_sign, without_sign,
            n, blocks, threads);
}
