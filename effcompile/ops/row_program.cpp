// A list of operators between two attentions, run by one call: what a framework does between them costs more than they do for one token.
//
// Each is a function of its own library (`group_linear.cpp`, `int8_linear.cpp`, `rows.cpp`), or adds or multiplies here. Values are dense,
// (batch * rows, width), in slots; the caller fills in those of inputs and outputs.

#include <cstdint>

namespace {

enum Kind { GROUPS, BYTES, NORM, GATE, TURN, ADD, MULTIPLY };

struct Step {
    int64_t kind, a, b, out, more;  // slots; -1 where there is none. more: the residual sum of a norm, sin of a rotation
    int64_t k, n;                   // widths of a linear; columns; half of a head and heads
    int64_t bits, after;
    const void *call, *weight, *scales, *bias;
    double eps;
};

typedef void Groups(const float*, int64_t, int64_t, int64_t, int64_t, const void*, const void*, int64_t, int64_t, float*, int8_t*, float*,
                    int32_t*, int64_t, int64_t);
typedef void Bytes(const float*, int64_t, int64_t, int64_t, const void*, const void*, const void*, int64_t, int64_t, float*, int8_t*, float*,
                   int32_t*, int64_t, int64_t);
typedef void Norm(const float*, const float*, const void*, double, int64_t, int64_t, float*, float*, int64_t);
typedef void Gate(const float*, const float*, int64_t, float*, int64_t);
typedef void Turn(const float*, const float*, const float*, int64_t, int64_t, int64_t, int64_t, const int64_t*, const int64_t*, int64_t,
                  float*, int64_t);

}  // namespace

// `scratch` holds the codes of x of the widest linear, and 8 bytes for each of its groups or rows, at 64 bytes for each 32 columns.
extern "C" void row_program(const Step* steps, int64_t count, float* const* slots, int64_t batch, int64_t rows, int8_t* scratch,
                            int64_t threads, int64_t of_cos) {
    const int64_t m = batch * rows;
    for (const Step* s = steps; s < steps + count; s++) {
        const float *a = slots[s->a], *b = s->b < 0 ? nullptr : slots[s->b];
        float *out = slots[s->out], *more = s->more < 0 ? nullptr : slots[s->more];
        if (s->kind == GROUPS || s->kind == BYTES) {
            const int64_t scales = m * (s->kind == GROUPS ? (s->k + 31) / 32 : 1);
            float* x_scales = reinterpret_cast<float*>(scratch);
            int32_t* offsets = reinterpret_cast<int32_t*>(x_scales + scales);
            int8_t* codes = reinterpret_cast<int8_t*>(offsets + scales);
            if (s->kind == GROUPS)
                reinterpret_cast<Groups*>(s->call)(a, s->k, m, s->k, s->bits, s->weight, s->bias, s->n, s->after, out, codes, x_scales,
                                                   offsets, m, threads);
            else
                reinterpret_cast<Bytes*>(s->call)(a, s->k, m, s->k, s->weight, s->scales, s->bias, s->n, s->after, out, codes, x_scales,
                                                  offsets, m, threads);
        } else if (s->kind == NORM) {
            reinterpret_cast<Norm*>(s->call)(a, b, s->weight, s->eps, m, s->n, out, more, threads);
        } else if (s->kind == GATE) {
            reinterpret_cast<Gate*>(s->call)(a, b, m * s->n, out, threads);
        } else if (s->kind == TURN) {
            const int64_t wide = s->n * 2 * s->k, strides[3] = {rows * wide, 2 * s->k, wide};
            reinterpret_cast<Turn*>(s->call)(a, b, more, batch, s->n, rows, s->k, strides, strides, of_cos, out, threads);
        } else if (s->kind == ADD) {
            for (int64_t i = 0; i < m * s->n; i++) out[i] = a[i] + b[i];
        } else {
            for (int64_t i = 0; i < m * s->n; i++) out[i] = a[i] * b[i];
        }
    }
}
