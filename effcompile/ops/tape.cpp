// Calls of compiled kernels, one after the other: what a framework does between them takes longer behind a product, which leaves none of
// its code in the caches.
//
// A call's arguments stand as its function takes them, but for addresses in memory that is there at run time alone: those are told as a
// memory and an offset in it.

#include <algorithm>
#include <cstdint>

namespace {

enum Kind { LINEAR, MLP, ATTENTION, LAYER_NORM, RMS_NORM, GATE, TURN, ADD };

struct Call {
    const void* function;
    int64_t kind, patches;
    int64_t at[8], memory[8], offset[8];  // which arguments are addresses, in which memory
    int64_t arguments[24];
    double number;  // the one that is none of the integers
};

typedef const float* In;

template <class F> F* as(const Call& call) { return reinterpret_cast<F*>(const_cast<void*>(call.function)); }
template <class T> T* to(int64_t address) { return reinterpret_cast<T*>(address); }

typedef void Linear(In, int64_t, int64_t, int64_t, const void*, In, In, int64_t, int64_t, void*, int8_t*, float*, int32_t*, int64_t, int64_t);
typedef void Mlp(In, int64_t, int64_t, int64_t, const void*, In, In, int64_t, int64_t, const void*, In, In, int64_t, In, int64_t, In, In,
                 double, float*, uint8_t*, int64_t, int64_t);
typedef void Attention(In, In, In, const void*, float*, const int64_t*, const int64_t*, int64_t, int64_t, float, float*, int64_t);
typedef void LayerNorm(In, In, In, In, double, int64_t, int64_t, float*, int64_t);
typedef void RmsNorm(In, In, In, double, int64_t, int64_t, float*, float*, int64_t);
typedef void Gate(In, int64_t, In, int64_t, int64_t, int64_t, float*, int64_t);
typedef void Turn(In, In, In, int64_t, int64_t, int64_t, int64_t, const int64_t*, const int64_t*, int64_t, float*, int64_t);
typedef void Add(In, In, int64_t, float*, int64_t);

void run(const Call& call, const int64_t* a) {
    typedef float F;
    const double x = call.number;
    switch (call.kind) {
        case LINEAR:
            return as<Linear>(call)(to<F>(a[0]), a[1], a[2], a[3], to<void>(a[4]), to<F>(a[5]), to<F>(a[6]), a[7], a[8], to<void>(a[9]),
                                    to<int8_t>(a[10]), to<F>(a[11]), to<int32_t>(a[12]), a[13], a[14]);
        case MLP:
            return as<Mlp>(call)(to<F>(a[0]), a[1], a[2], a[3], to<void>(a[4]), to<F>(a[5]), to<F>(a[6]), a[7], a[8], to<void>(a[9]),
                                 to<F>(a[10]), to<F>(a[11]), a[12], to<F>(a[13]), a[14], to<F>(a[15]), to<F>(a[16]), x, to<F>(a[17]),
                                 to<uint8_t>(a[18]), a[19], a[20]);
        case ATTENTION:
            return as<Attention>(call)(to<F>(a[0]), to<F>(a[1]), to<F>(a[2]), to<void>(a[3]), to<F>(a[4]), to<int64_t>(a[5]), to<int64_t>(a[6]),
                                       a[7], a[8], (float)x, to<F>(a[9]), a[10]);
        case LAYER_NORM:
            return as<LayerNorm>(call)(to<F>(a[0]), to<F>(a[1]), to<F>(a[2]), to<F>(a[3]), x, a[4], a[5], to<F>(a[6]), a[7]);
        case RMS_NORM:
            return as<RmsNorm>(call)(to<F>(a[0]), to<F>(a[1]), to<F>(a[2]), x, a[3], a[4], to<F>(a[5]), to<F>(a[6]), a[7]);
        case GATE:
            return as<Gate>(call)(to<F>(a[0]), a[1], to<F>(a[2]), a[3], a[4], a[5], to<F>(a[6]), a[7]);
        case TURN:
            return as<Turn>(call)(to<F>(a[0]), to<F>(a[1]), to<F>(a[2]), a[3], a[4], a[5], a[6], to<int64_t>(a[7]), to<int64_t>(a[8]), a[9],
                                  to<F>(a[10]), a[11]);
        case ADD:
            return as<Add>(call)(to<F>(a[0]), to<F>(a[1]), a[2], to<F>(a[3]), a[4]);
    }
}

}  // namespace

// `memories`: where each begins.
extern "C" void tape(const Call* calls, int64_t count, char* const* memories) {
    for (const Call* call = calls; call < calls + count; call++) {
        int64_t arguments[24];
        std::copy(call->arguments, call->arguments + 24, arguments);
        for (int64_t i = 0; i < call->patches; i++)
            arguments[call->at[i]] = reinterpret_cast<int64_t>(memories[call->memory[i]] + call->offset[i]);
        run(*call, arguments);
    }
}
