// The operator effcompile::BlockSparseLinear of ONNX Runtime: y (.., N) = x (.., K) W^T + bias with W in blocks, in fp32.
//
// Inputs: x, values (Z, b, b), crow (N/b + 1) int32, col (Z) int32 and optionally bias (N). Attributes: rows = N, cols = K, block = b.
// Tasks run on the session's own threads, its workspace comes from the session's own allocator.
//
// A library for `SessionOptions.register_custom_ops_library`, compiled by native.py with KIND, WIDTH, CACHE_BYTES, STRIPE_BYTES and NARROW
// as in block_sparse_native.py, and for each block side b its register tile ROWS_b, VECS_b.

#include <exception>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
#include "block_sparse_product.h"
#include "onnxruntime_api.h"

namespace {

constexpr const char* NAME = "BlockSparseLinear";
constexpr const char* DOMAIN = "effcompile";
enum Input { X, VALUES, CROW, COL, BIAS };

struct Invalid : std::runtime_error {
    using std::runtime_error::runtime_error;
};

std::string text(int64_t number) { return std::to_string(number); }

struct Failed {  // the runtime's own status, passed on
    OrtStatus* status;
};

void pass(OrtStatus* status) {
    if (status) throw Failed{status};
}

// What `body` throws, as a status: nothing may be thrown into the runtime.
template <class Body>
OrtStatus* guarded(const Api& api, const Body& body) {
    try {
        body();
        return nullptr;
    } catch (const Failed& failed) {
        return failed.status;
    } catch (const Invalid& error) {
        return api.CreateStatus(ORT_INVALID_ARGUMENT, error.what());
    } catch (const std::exception& error) {
        return api.CreateStatus(ORT_FAIL, error.what());
    }
}

// ------------------------------------------------------------------ one call

struct Kernel {
    Api api;
    int64_t rows, cols, block;
    OrtMemoryInfo* memory = nullptr;

    Kernel(const OrtApi* table, const OrtKernelInfo* info) : api(table) {
        pass(api.KernelInfoGetAttribute_int64(info, "rows", &rows));
        pass(api.KernelInfoGetAttribute_int64(info, "cols", &cols));
        pass(api.KernelInfoGetAttribute_int64(info, "block", &block));
        const bool known = block == 1 || block == 4 || block == 8 || block == 16 || block == 32 || block == 64;
        if (!known || rows < 1 || cols < 1 || rows % block || cols % block)
            throw Invalid("a weight (" + text(rows) + ", " + text(cols) + ") has no blocks of " + text(block));
        pass(api.CreateCpuMemoryInfo(ORT_ARENA_ALLOCATOR, ORT_MEM_DEFAULT, &memory));
    }
    ~Kernel() {
        if (memory) api.ReleaseMemoryInfo(memory);
    }
    Kernel(const Kernel&) = delete;
};

struct Tensor {
    void* data = nullptr;
    std::vector<int64_t> shape;

    bool is(std::initializer_list<int64_t> wanted) const { return shape == std::vector<int64_t>(wanted); }
    template <class T>
    T* as() const { return static_cast<T*>(data); }
};

Tensor input(const Api& api, const OrtKernelContext* context, size_t index) {
    Tensor tensor;
    const OrtValue* value = nullptr;
    size_t count = 0;
    pass(api.KernelContext_GetInputCount(context, &count));
    if (index < count) pass(api.KernelContext_GetInput(context, index, &value));
    if (!value) return tensor;
    pass(api.GetTensorMutableData(const_cast<OrtValue*>(value), &tensor.data));
    OrtTensorTypeAndShapeInfo* info = nullptr;
    pass(api.GetTensorTypeAndShape(value, &info));
    std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)> owner(info, api.ReleaseTensorTypeAndShapeInfo);
    pass(api.GetDimensionsCount(info, &count));
    tensor.shape.resize(count);
    pass(api.GetDimensions(info, tensor.shape.data(), count));
    return tensor;
}

// Floats of the session's allocator, for one call.
class Workspace {
   public:
    Workspace(const Kernel& kernel, const OrtKernelContext* context, int64_t floats) : api(kernel.api) {
        pass(api.KernelContext_GetAllocator(context, kernel.memory, &allocator));
        if (OrtStatus* status = api.AllocatorAlloc(allocator, floats * sizeof(float), &data)) {
            api.ReleaseAllocator(allocator);
            throw Failed{status};
        }
    }
    ~Workspace() {
        (void)api.AllocatorFree(allocator, data);  // fails never on what it gave
        api.ReleaseAllocator(allocator);
    }
    Workspace(const Workspace&) = delete;
    float* floats() const { return static_cast<float*>(data); }

   private:
    const Api& api;
    OrtAllocator* allocator = nullptr;
    void* data = nullptr;
};

// The session's threads: each task is taken by the next that is free.
struct Pool {
    const Api& api;
    const OrtKernelContext* context;

    template <class Task>
    void uneven(int64_t tasks, const Task& task) const {
        auto call = [](void* data, size_t i) { (*static_cast<const Task*>(data))((int64_t)i); };
        pass(api.KernelContext_ParallelFor(context, call, tasks, 0, const_cast<Task*>(&task)));
    }
    template <class Task>
    void even(int64_t tasks, const Task& task) const { uneven(tasks, task); }
};

// How x (m, K) is cut: as `Form.panels` of block_sparse_native.py.
Cut cut(int64_t m, int64_t words, int64_t vecs) {
    const int64_t vector = words * W * sizeof(float);
    const int64_t widest = std::min({vecs, std::max<int64_t>(NARROW, CACHE_BYTES / vector), std::max<int64_t>(1, (m + W - 1) / W)});
    const int64_t panels = std::max<int64_t>(1, (m + W * widest - 1) / (W * widest));
    return {widest, std::max<int64_t>(1, std::min<int64_t>(panels, STRIPE_BYTES / (widest * vector))),
            std::max<int64_t>(1, CACHE_BYTES / (widest * vector))};
}

struct Call {
    const Kernel& kernel;
    OrtKernelContext* context;
    Tensor x, values, crow, col, bias;
    int64_t m;
    float* y;
};

template <int BLOCK, int ROWS, int VECS>
void multiply(const Call& call) {
    const Kernel& kernel = call.kernel;
    // how many the session has is not told; more pieces than threads cost nothing
    static const int64_t threads = std::max(1u, std::thread::hardware_concurrency());
    const Cut by = cut(call.m, kernel.cols, VECS);
    const Workspace workspace(kernel, call.context, by.stripe * kernel.cols * by.widest * W);
    const Product<BLOCK, ROWS, VECS> product{call.values.as<float>(), call.crow.as<int32_t>(), call.col.as<int32_t>(), kernel.rows / BLOCK,
                                             kernel.rows, call.bias.as<float>(), call.y, kernel.rows};
    const Pool pool{kernel.api, call.context};
    product.run(call.x.as<float>(), kernel.cols, call.m, kernel.cols / BLOCK, workspace.floats(), by, threads, pool);
}

void compute(const Kernel& kernel, OrtKernelContext* context) {
    const Api& api = kernel.api;
    Call call{kernel, context, input(api, context, X), input(api, context, VALUES), input(api, context, CROW), input(api, context, COL),
              input(api, context, BIAS), 1, nullptr};
    const int64_t b = kernel.block, stored = call.values.shape.empty() ? 0 : call.values.shape[0];
    std::vector<int64_t> shape = call.x.shape;
    if (shape.empty() || shape.back() != kernel.cols) throw Invalid("x does not end in the weight's columns, " + text(kernel.cols));
    if (!call.values.is({stored, b, b}) || !call.col.is({stored}) || !call.crow.is({kernel.rows / b + 1}))
        throw Invalid("values, crow and col do not fit a weight of " + text(kernel.rows) + " rows in blocks of " + text(b));
    if (call.bias.data && !call.bias.is({kernel.rows})) throw Invalid("the bias is not one number for each row of the weight");
    if (check(call.crow.as<int32_t>(), call.col.as<int32_t>(), kernel.rows / b, kernel.cols / b, stored))
        throw Invalid("crow or col is out of range");
    shape.back() = kernel.rows;
    for (size_t i = 0; i + 1 < shape.size(); i++) call.m *= shape[i];
    OrtValue* result = nullptr;
    pass(api.KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &result));
    if (call.m == 0) return;
    pass(api.GetTensorMutableData(result, reinterpret_cast<void**>(&call.y)));
    switch (b) {
        case 1: return multiply<1, ROWS_1, VECS_1>(call);
        case 4: return multiply<4, ROWS_4, VECS_4>(call);
        case 8: return multiply<8, ROWS_8, VECS_8>(call);
        case 16: return multiply<16, ROWS_16, VECS_16>(call);
        case 32: return multiply<32, ROWS_32, VECS_32>(call);
        default: return multiply<64, ROWS_64, VECS_64>(call);
    }
}

// ------------------------------------------------------------------ the operator as the runtime asks about it

OrtCustomOp described() {
    OrtCustomOp op = {};
    op.version = ORT_API_VERSION;
    op.GetName = [](const OrtCustomOp*) { return NAME; };
    op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    op.GetInputType = [](const OrtCustomOp*, size_t index) { return index == CROW || index == COL ? ORT_INT32 : ORT_FLOAT; };
    op.GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return BIAS + 1; };
    op.GetOutputType = [](const OrtCustomOp*, size_t) { return ORT_FLOAT; };
    op.GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return 1; };
    op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
    op.GetInputCharacteristic = [](const OrtCustomOp*, size_t index) { return index == BIAS ? ORT_OPTIONAL : ORT_REQUIRED; };
    op.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return ORT_REQUIRED; };
    op.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return ORT_MEM_DEFAULT; };
    op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
        return guarded(Api(api), [&] { *kernel = new Kernel(api, info); });
    };
    op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
        const Kernel& ours = *static_cast<Kernel*>(kernel);
        return guarded(ours.api, [&] { compute(ours, context); });
    };
    op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
    return op;
}

// Whether this CPU has the instructions that this library was compiled for.
bool runs_here() {
#if defined(__x86_64__) && WIDTH == 16
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma");
#elif defined(__x86_64__) && WIDTH == 8
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

OrtStatus* refuse(const OrtApi* api, const std::string& reason) { return Api(api).CreateStatus(ORT_NOT_IMPLEMENTED, reason.c_str()); }

}  // namespace

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
    const OrtApi* table = base->GetApi(ORT_API_VERSION);
    if (!table) {
        const std::string found = base->GetVersionString();
        return refuse(base->GetApi(1), "effcompile's operators need ONNX Runtime 1.17 or later; this is " + found);
    }
    if (!runs_here()) return refuse(table, "effcompile's operators were compiled for another CPU: compile them again on this machine");
    const Api api(table);
    return guarded(api, [&] {
        static const OrtCustomOp op = described();
        OrtCustomOpDomain* domain = nullptr;  // some hundred bytes of the runtime's, which must outlive the session and so are not released
        pass(api.CreateCustomOpDomain(DOMAIN, &domain));
        pass(api.CustomOpDomain_Add(domain, &op));
        pass(api.AddCustomOpDomain(options, domain));
    });
}
