// llama.cpp behind four functions for ctypes (benchmarks/_decoding_peers.py): what its own interface passes are structs by value.
// BACKENDS: the folder with its libraries, of which ggml takes those that fit the CPU.
#include "ggml-backend.h"
#include "llama.h"
#include <cstdio>
#include <cstring>

namespace {

llama_model* model;
llama_context* context;

void told(ggml_log_level level, const char* text, void*) {
    if (level >= GGML_LOG_LEVEL_ERROR || std::strstr(text, "loaded CPU")) std::fputs(text, stderr);
}

}  // namespace

extern "C" void shim_init() {
    llama_log_set(told, nullptr);
    ggml_backend_load_all_from_path(BACKENDS);
    llama_backend_init();
}

extern "C" unsigned shim_quantize(const char* from, const char* to, int type) {
    llama_model_quantize_params parameters = llama_model_quantize_default_params();
    parameters.ftype = (llama_ftype)type;
    parameters.nthread = 1;
    return llama_model_quantize(from, to, &parameters);
}

extern "C" int shim_load(const char* path, int tokens, int threads) {
    llama_model_params of_model = llama_model_default_params();
    of_model.n_gpu_layers = 0;
    model = llama_model_load_from_file(path, of_model);
    if (!model) return 1;
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = tokens;
    parameters.n_batch = 2048;
    parameters.n_threads = parameters.n_threads_batch = threads;
    parameters.no_perf = true;
    context = llama_init_from_model(model, parameters);
    return context ? 0 : 2;
}

extern "C" const float* shim_evaluate(int* tokens, int count, int afresh) {
    if (afresh) llama_memory_clear(llama_get_memory(context), true);
    return llama_decode(context, llama_batch_get_one(tokens, count)) ? nullptr : llama_get_logits_ith(context, -1);
}
