// Linears in fp32 of weights that stay: y = f(x W^T + bias), W packed once, x packed in each call.
//
// Compiled as int8_linear.cpp is, with PANEL, outputs that are interleaved, and DEPTH, of a part of K. W is held as [N / PANEL][K][PANEL], x in
// blocks of ROWS rows, [K][rows of the block], so that a tile reads both one after the other (Goto and van de Geijn, "Anatomy of
// high-performance matrix multiplication", ACM TOMS 34, 2008). What a core waits for is the next part of W: each tile has its share of that
// fetched into the L2 cache, which a hardware prefetcher does only when it is read.

#define KIND 0
#include "integers.h"

namespace {

constexpr int TILE = VECS * W;    // outputs of a register tile
constexpr int64_t CHAIN = 384;    // steps that are summed one after the other: longer sums are less exact
constexpr int UNROLLED = 8;       // steps of K between two fetches
constexpr int64_t LINE = 64;      // bytes of a line of a cache
constexpr int LINES = (TILE * 4 + LINE - 1) / LINE;
constexpr int AHEAD = 8 * PANEL;  // numbers of W that are fetched before they are multiplied

static_assert(ROWS <= W, "a block of rows is transposed at once");
static_assert(PANEL % TILE == 0, "a panel is whole tiles");

// Rows of x (rows, k), ldx apart, as [k][rows].
void packed(const float* x, int64_t ldx, int64_t rows, int64_t k, float* to) {
    const float* const end = to + rows * k;
    V part[W];
    for (int64_t i = 0; i < k; i += W) {
        for (int64_t r = 0; r < W; r++) part[r] = some_of(x + std::min(r, rows - 1) * ldx + i, k - i);
        transpose_stages<1>(part);
        // what a vector has beyond the rows is written over by the next, but for the last ones
        for (int64_t j = 0; j < std::min<int64_t>(W, k - i); j++, to += rows) put(to, part[j], end - to < W ? rows : W);
    }
}

// Bytes [from, from + lines * LINE) that are fetched in each turn of so many steps.
struct Fetched {
    const char* from;
    int64_t lines;
};

// Steps [begin, end) of K of the rows [top, bottom), in blocks of as many as can be.
struct Part {
    int64_t begin, end, top, bottom, blocks;
    const float* x;  // their numbers, packed

    int64_t row_of(int64_t block) const { return top + (bottom - top) * block / blocks; }
};

struct Linear {
    int64_t k, n;
    const float *weight, *bias;  // the bias may be null
    int after;
    float* y;  // (M, N)

    // R rows from `row` on times the outputs [from, from + TILE), added to what y has but for the first part.
    template <int R>
    void tile(const Part& part, int64_t row, int64_t from, Fetched next) const {
        float* to = y + row * n + from;
        const float* a = part.x + (row - part.top) * (part.end - part.begin);
        const float* b = weight + from / PANEL * PANEL * k + part.begin * PANEL + from % PANEL;
        int asked = 0;  // lines of y that are fetched: all at once would keep those of W waiting
        for (int64_t begin = part.begin; begin < part.end; begin += CHAIN) {
            V sums[R][VECS] = {};
            const auto step = [&]() __attribute__((always_inline)) {
                V w[VECS];
#pragma GCC unroll 8
                for (int v = 0; v < VECS; v++) w[v] = load(b + v * W);
                for (int64_t c = 0; c < TILE; c += LINE / 4) __builtin_prefetch(b + AHEAD + c);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < VECS; v++) sums[r][v] = multiply_add(sums[r][v], a + r, w[v]);
                a += R, b += PANEL;
            };
            const int64_t end = std::min(part.end, begin + CHAIN);
            int64_t at = begin;
            for (; at + UNROLLED <= end; at += UNROLLED) {
                if (asked < R * LINES) __builtin_prefetch(to + asked / LINES * n + asked % LINES * (LINE / 4), 1), asked++;
                for (int64_t line = 0; line < next.lines; line++, next.from += LINE) __builtin_prefetch(next.from, 0, 2);
#pragma GCC unroll 4
                for (int i = 0; i < UNROLLED; i++) step();
            }
            for (; at < end; at++) step();
            write(&sums[0][0], R, row, from, begin);
        }
    }

    // A tile's sums over steps of K from `begin` on.
    __attribute__((noinline)) void write(const V* sums, int rows, int64_t row, int64_t from, int64_t begin) const {
        for (int r = 0; r < rows; r++)
            for (int64_t o = from; o < from + TILE; o += W, sums++) {
                float* to = y + (row + r) * n + o;
                const int64_t some = std::max<int64_t>(n - o, 0);
                if (begin) put(to, *sums + some_of(to, some), some);
                else put(to, bias ? *sums + some_of(bias + o, some) : *sums, some);
            }
    }

    template <int R>
    void rows(int64_t count, const Part& part, int64_t row, int64_t from, Fetched next) const {
        if constexpr (R > 1)
            if (count < R) return rows<R - 1>(count, part, row, from, next);
        tile<R>(part, row, from, next);
    }

    // The outputs of panel p; `following`: the panel that comes next.
    void panel(const Part& part, int64_t p, int64_t following) const {
        const int64_t depth = part.end - part.begin, last = std::min(n, (p + 1) * PANEL);
        const int64_t fetches = part.blocks * (PANEL / TILE) * (depth / UNROLLED);
        const char *from = reinterpret_cast<const char*>(weight + (following * k + part.begin) * PANEL), *stop = from + depth * PANEL * 4;
        const int64_t each = fetches ? ((stop - from) / LINE + fetches - 1) / fetches : 0;
        for (int64_t block = 0; block < part.blocks; block++) {
            const int64_t row = part.row_of(block), count = part.row_of(block + 1) - row;
            for (int64_t o = p * PANEL; o < last; o += TILE) {
                rows<ROWS>(count, part, row, o, {from, from < stop ? each : 0});
                from += each * (depth / UNROLLED) * LINE;
            }
        }
        if (after && part.end == k) follow(part.top, part.bottom, p * PANEL, last);
    }

    __attribute__((noinline)) void follow(int64_t top, int64_t bottom, int64_t from, int64_t last) const {
        for (int64_t row = top; row < bottom; row++)
            for (int64_t o = from; o < last; o += W) {
                float* at = y + row * n + o;
                put(at, followed(some_of(at, last - o), after), last - o);
            }
    }
};

}  // namespace

// x (M, K), rows ldx apart → y (M, N). `room` is workspace: rows of x, at most `chunk` of them, and parts of them, DEPTH numbers each.
// Called as int8_linear is.
extern "C" void fp32_linear(const float* x, int64_t ldx, int64_t m, int64_t k, const float* weight, const float*, const float* bias, int64_t n,
                            int64_t after, float* y, float* room, float*, int32_t*, int64_t chunk, int64_t threads) {
    const Linear linear{k, n, weight, bias, (int)after, y};
    const int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    for (int64_t top = 0; top < m; top += chunk)
        for (int64_t begin = 0; begin < k; begin += DEPTH) {
            const int64_t bottom = std::min(m, top + chunk), blocks = (bottom - top + ROWS - 1) / ROWS;
            const Part part{begin, std::min(k, begin + DEPTH), top, bottom, blocks, room};
            const int64_t depth = part.end - begin;
#pragma omp for schedule(static)
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t row = part.row_of(block);
                packed(x + row * ldx + begin, ldx, part.row_of(block + 1) - row, depth, room + (row - top) * depth);
            }
#pragma omp for schedule(dynamic)
            for (int64_t p = 0; p < panels; p++) linear.panel(part, p, (p + threads) % panels);
        }
}
