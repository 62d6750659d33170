// The declarations of ONNX Runtime's C API that a custom operator needs. Its pip package ships no headers.
//
// After microsoft/onnxruntime (MIT licence), include/onnxruntime/core/session/onnxruntime_c_api.h, API version 17 (ONNX Runtime 1.17), run
// with 1.31. OrtApi is a table of pointers that later versions only append to (onnxruntime_c_api.cc asserts the size of each version), so
// the places below hold for 1.17 and all later ones. OrtCustomOp says its version and is read up to there.

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

constexpr uint32_t ORT_API_VERSION = 17;

struct OrtStatus;  // null: success
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtMemoryInfo;
struct OrtAllocator;
struct OrtCustomOp;

enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2, ORT_NOT_IMPLEMENTED = 9 };
enum OrtElementType { ORT_FLOAT = 1, ORT_INT32 = 6 };
enum OrtCharacteristic { ORT_REQUIRED = 0, ORT_OPTIONAL = 1 };
enum OrtAllocatorType { ORT_ARENA_ALLOCATOR = 1 };
enum OrtMemType { ORT_MEM_DEFAULT = 0 };

struct OrtApi {
    void* entries[276];
};

struct OrtApiBase {
    const OrtApi* (*GetApi)(uint32_t version);  // null where the runtime is older than that
    const char* (*GetVersionString)();
};

// The entries that are used, by their places.
struct Api {
    OrtStatus* (*CreateStatus)(OrtErrorCode, const char* message);
    OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
    OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain*, const OrtCustomOp*);
    OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions*, OrtCustomOpDomain*);
    OrtStatus* (*GetTensorMutableData)(OrtValue*, void** out);
    OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t* out);
    OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t* dims, size_t count);
    OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo** out);
    OrtStatus* (*CreateCpuMemoryInfo)(OrtAllocatorType, OrtMemType, OrtMemoryInfo** out);
    OrtStatus* (*AllocatorAlloc)(OrtAllocator*, size_t bytes, void** out);
    OrtStatus* (*AllocatorFree)(OrtAllocator*, void*);
    OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo*, const char* name, int64_t* out);
    OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext*, size_t* out);
    OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext*, size_t index, const OrtValue** out);  // null: an optional one left out
    OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext*, size_t index, const int64_t* dims, size_t count, OrtValue** out);
    void (*ReleaseMemoryInfo)(OrtMemoryInfo*);
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
    void (*ReleaseAllocator)(OrtAllocator*);
    OrtStatus* (*KernelContext_GetAllocator)(const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator** out);
    // task(data, 0) to task(data, total - 1) on the session's own threads, in any order; batches: 0, each for itself
    OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext*, void (*task)(void*, size_t), size_t total, size_t batches, void* data);

    explicit Api(const OrtApi* api) {
        auto bind = [&](auto& entry, int place) {
            entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(api->entries[place]);
        };
        bind(CreateStatus, 0);
        bind(CreateCustomOpDomain, 26);
        bind(CustomOpDomain_Add, 27);
        bind(AddCustomOpDomain, 28);
        bind(GetTensorMutableData, 51);
        bind(GetDimensionsCount, 61);
        bind(GetDimensions, 62);
        bind(GetTensorTypeAndShape, 65);
        bind(CreateCpuMemoryInfo, 69);
        bind(AllocatorAlloc, 75);
        bind(AllocatorFree, 76);
        bind(KernelInfoGetAttribute_int64, 86);
        bind(KernelContext_GetInputCount, 88);
        bind(KernelContext_GetInput, 90);
        bind(KernelContext_GetOutput, 91);
        bind(ReleaseMemoryInfo, 94);
        bind(ReleaseTensorTypeAndShapeInfo, 99);
        bind(ReleaseAllocator, 132);
        bind(KernelContext_GetAllocator, 253);
        bind(KernelContext_ParallelFor, 274);
    }
};

// An operator, as the runtime asks about it. Fields that this version does not read, or that may be null, are void*.
struct OrtCustomOp {
    uint32_t version;
    void* CreateKernel;  // superseded by V2
    const char* (*GetName)(const OrtCustomOp*);
    const char* (*GetExecutionProviderType)(const OrtCustomOp*);  // null: the CPU's
    OrtElementType (*GetInputType)(const OrtCustomOp*, size_t index);
    size_t (*GetInputTypeCount)(const OrtCustomOp*);
    OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t index);
    size_t (*GetOutputTypeCount)(const OrtCustomOp*);
    void* KernelCompute;  // superseded by V2
    void (*KernelDestroy)(void* kernel);
    OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
    OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
    OrtMemType (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
    void* variadic[4];  // arity and homogeneity of variadic inputs and outputs
    OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
    OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
    void* InferOutputShapeFn;  // null: shapes are those that the model says
    int (*GetStartVersion)(const OrtCustomOp*);
    int (*GetEndVersion)(const OrtCustomOp*);
    void* since_18[4];  // operating in place, aliases
};
