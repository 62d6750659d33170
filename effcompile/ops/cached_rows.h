// Rows of a cache as they are held (cache_rows.py), as fp32, and their coming nearer before they are read.

#pragma once

#include "integers.h"

namespace {

// Of a row: fp32, bf16, s8 and behind them their scale in fp32, or pairs of 4 bits and behind them scales in bf16.
enum Form { WIDE, BF16, CODES, PAIRS };

inline int64_t bytes_of(int64_t form) { return form == WIDE ? 4 : form == BF16 ? 2 : 1; }  // of an element as it is held

// W bytes, or halves, as whole numbers.
#if WIDTH == 16
inline VI words_at(const int8_t* p) { return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const uint8_t* p) { return (VI)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const uint16_t* p) { return (VI)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
#elif WIDTH == 8
inline VI words_at(const uint16_t* p) { return (VI)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const int8_t* p) { return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline VI words_at(const uint8_t* p) { return (VI)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
#else
inline VI words_at(const int8_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
inline VI words_at(const uint8_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
inline VI words_at(const uint16_t* p) { return VI{p[0], p[1], p[2], p[3]}; }
#endif

inline float as_float(uint32_t word) {
    float made;
    std::memcpy(&made, &word, 4);
    return made;
}

inline float bf16_at(const uint8_t* at) {
    uint16_t half;
    std::memcpy(&half, at, 2);
    return as_float((uint32_t)half << 16);
}

inline void widen_bf16(const uint16_t* p, int64_t width, float* to) {
    uint32_t* words = reinterpret_cast<uint32_t*>(to);
    int64_t i = 0;
    for (; W > 4 && i + W <= width; i += W) store(to + i, (V)(words_at(p + i) << 16));
    for (; i < width; i++) words[i] = (uint32_t)p[i] << 16;
}

inline void widen_codes(const int8_t* p, int64_t width, float* to) {
    float scale;
    std::memcpy(&scale, p + width, 4);
    int64_t i = 0;
    for (; W > 4 && i + W <= width; i += W) store(to + i, as_floats(words_at(p + i)) * scale);
    for (; i < width; i++) to[i] = p[i] * scale;
}

#if WIDTH == 16
const V OF_PAIRS = V{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - 8.0f;  // what 4 bits stand for
#endif

// A whole group of 32: a code is looked up among what 16 of them stand for, or raised numbers are lowered.
inline void widen_group(const uint8_t* pairs, float scale, float* to) {
#if WIDTH == 16
    const V table = OF_PAIRS * scale;
#endif
    for (int64_t i = 0; i < 16; i += W) {
        const VI words = words_at(pairs + i);
#if WIDTH == 16  // of an index its lowest four bits are read
        store(to, (V)_mm512_permutexvar_ps((__m512i)words, (__m512)table));
        store(to + 16, (V)_mm512_permutexvar_ps((__m512i)(words >> 4), (__m512)table));
#else
        store(to + i, as_floats((words & 15) - 8) * scale);
        store(to + 16 + i, as_floats((words >> 4) - 8) * scale);
#endif
    }
}

inline void widen_pairs(const uint8_t* p, int64_t width, float* to) {
    const uint8_t* scales = p + width / 2;
    int64_t i = 0;
    for (; i + 32 <= width; i += 32, p += 16, scales += 2) widen_group(p, bf16_at(scales), to + i);
    const int64_t half = (width - i) / 2;
    const float scale = half ? bf16_at(scales) : 0.0f;
    for (int64_t at = 0; at < half; at++) {
        to[i + at] = ((p[at] & 15) - 8) * scale;
        to[i + half + at] = ((p[at] >> 4) - 8) * scale;
    }
}

struct Rows {  // of keys or of values of one head
    const char* at;
    int64_t stride, width, form;  // bytes from row to row; numbers of a row

    const char* row(int64_t i) const { return at + i * stride; }
    Rows from(int64_t i) const { return {row(i), stride, width, form}; }
    int64_t bytes() const { return form == PAIRS ? width / 2 + (width + 31) / 32 * 2 : width * bytes_of(form) + (form == CODES ? 4 : 0); }

    // `count` rows from row `first` as fp32, `apart` floats apart; `room` holds them where they have to be made.
    const float* dense(int64_t first, int64_t count, float* room, int64_t* apart) const {
        *apart = form == WIDE ? stride / 4 : width;
        const char* p = row(first);
        if (form == WIDE) return reinterpret_cast<const float*>(p);
        for (int64_t i = 0; i < count; i++, p += stride) {
            float* to = room + i * width;
            if (form == BF16) widen_bf16(reinterpret_cast<const uint16_t*>(p), width, to);
            else if (form == CODES) widen_codes(reinterpret_cast<const int8_t*>(p), width, to);
            else widen_pairs(reinterpret_cast<const uint8_t*>(p), width, to);
        }
        return room;
    }
};

constexpr int64_t PLACES = 4;

// Rows that are read next come nearer little by little, while others are computed with: memory is then never waited for, nor idle. From four
// places at once, which memory answers faster: 4096 keys of fp32 on a Xeon with AMX, ms on two threads, from one 5.1, two 4.8, four 4.5.
struct Ahead {
    const char* at = nullptr;
    int64_t whole = 0, apart = 0, line = 0, lines = 0;  // cache lines: the next, and all; bytes from place to place

    Ahead() = default;
    Ahead(const Rows& rows, int64_t count) {
        if (!count || rows.stride > 2 * rows.bytes()) return;  // what lies between them is more than they are
        at = rows.at, whole = rows.row(count - 1) + rows.bytes() - at;
        apart = whole / (PLACES * 64) * 64, lines = apart / 64 * PLACES;
    }

    // Cache lines to ask for when a part of all that is computed meanwhile is done. The same number each time: a branch that is foreseen.
    int64_t share(double part) const { return (int64_t)(part * (double)whole / 64) + 1; }
    inline void ask(int64_t count) {
        for (; count > 0 && line < lines; count--, line++) __builtin_prefetch(at + line % PLACES * apart + line / PLACES * 64, 0, 2);
    }
};

}  // namespace
