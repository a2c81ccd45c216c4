// A CUDA runtime and driver without a GPU: two devices whose memory is never read, streams that are numbers, and no kernels.
//
// Preloaded before PyTorch (LD_PRELOAD), it lets PyTorch's Python code run over the shim and the library's simulated devices:
// tensors that are never filled, streams, captures, pools. Kernel launches do nothing.

#include <cuda_runtime_api.h>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#define CUDA extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t MEMORY = 150109880320;

thread_local int current = 0;
thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
std::mutex lock;
std::set<cudaStream_t> captured;
// Whether events that are recorded stay open, and those that do.
bool holds = false;
std::set<cudaEvent_t> held;

cudaError_t record(cudaEvent_t event) {
    std::lock_guard<std::mutex> guard(lock);
    if (holds) {
        held.insert(event);
    } else {
        held.erase(event);
    }
    return cudaSuccess;
}

// Distinct handles without content.
template <typename Handle>
cudaError_t make(Handle* to) {
    static std::atomic<uintptr_t> next{0x10000};
    *to = reinterpret_cast<Handle>(next += 0x100);
    return cudaSuccess;
}

cudaStreamCaptureStatus status_of(cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(lock);
    return captured.count(stream) > 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

}  // namespace

CUDA cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }
CUDA cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
CUDA cudaError_t cudaSetDevice(int device) { return current = device, cudaSuccess; }
CUDA cudaError_t cudaGetLastError() { return cudaSuccess; }
CUDA cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
CUDA cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
CUDA cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
CUDA cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
CUDA cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 1, cudaSuccess; }
CUDA cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
CUDA cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
CUDA cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}
CUDA cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    return *total = MEMORY, *free = MEMORY - (512 << 20), cudaSuccess;
}
CUDA cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int) {
    std::memset(to, 0, sizeof(*to));
    std::strcpy(to->name, "no GPU");
    to->major = 9;
    to->totalGlobalMem = MEMORY;
    to->multiProcessorCount = 132;
    to->warpSize = 32;
    to->maxThreadsPerMultiProcessor = 2048;
    to->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}

CUDA cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned, int) { return make(to); }
CUDA cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned) { return make(to); }
CUDA cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
CUDA cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
CUDA cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
CUDA cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) { return make(to); }
CUDA cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) { return record(event); }
CUDA cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) { return record(event); }
CUDA cudaError_t cudaEventQuery(cudaEvent_t event) {
    std::lock_guard<std::mutex> guard(lock);
    return held.count(event) > 0 ? cudaErrorNotReady : cudaSuccess;
}
// Tests: events that are recorded from now on complete only when this is called with 0.
CUDA void fake_hold_events(int hold) {
    std::lock_guard<std::mutex> guard(lock);
    holds = hold != 0;
    if (!holds) held.clear();
}
CUDA cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
CUDA cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

CUDA cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* with) {
    return std::swap(mode, *with), cudaSuccess;
}
CUDA cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* to) {
    return *to = status_of(stream), cudaSuccess;
}
CUDA cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* to, unsigned long long* id,
                                          cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
    *to = status_of(stream);
    if (id != nullptr) *id = reinterpret_cast<uintptr_t>(stream);
    return cudaSuccess;
}
CUDA cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    std::lock_guard<std::mutex> guard(lock);
    return captured.insert(stream), cudaSuccess;
}
CUDA cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* to) {
    std::lock_guard<std::mutex> guard(lock);
    return captured.erase(stream), make(to);
}
CUDA cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) { return *count = 1, cudaSuccess; }
CUDA cudaError_t cudaGraphInstantiate(cudaGraphExec_t* to, cudaGraph_t, unsigned long long) { return make(to); }
CUDA cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* to, cudaGraph_t, unsigned long long) {
    return make(to);
}
CUDA cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
CUDA cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
CUDA cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

CUDA cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { return cudaSuccess; }
CUDA cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
CUDA cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void*) {
    std::memset(to, 0, sizeof(*to));
    to->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
CUDA cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* to, const void*, int, size_t, unsigned) {
    return *to = 8, cudaSuccess;
}

CUDA cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
CUDA cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
CUDA cudaError_t cudaMalloc(void** to, size_t bytes) {
    return *to = std::aligned_alloc(512, (bytes + 511) / 512 * 512), cudaSuccess;
}
CUDA cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) { return cudaMalloc(to, bytes); }
CUDA cudaError_t cudaFreeHost(void* block) { return std::free(block), cudaSuccess; }
// No memory is known, so that PyTorch pins whatever it is to pin. During a capture, in which it copies from pinned memory only,
// all of the host's is.
CUDA cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void*) {
    std::lock_guard<std::mutex> guard(lock);
    std::memset(to, 0, sizeof(*to));
    return to->type = captured.empty() ? cudaMemoryTypeUnregistered : cudaMemoryTypeHost, cudaSuccess;
}
CUDA cudaError_t cudaFree(void* block) { return std::free(block), cudaSuccess; }
CUDA cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
CUDA cudaError_t cudaMemcpyPeerAsync(void*, int, const void*, int, size_t, cudaStream_t) { return cudaSuccess; }
CUDA cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
CUDA cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* to, void* block) {
    std::memset(to, 0, sizeof(*to));
    return std::memcpy(to, &block, sizeof(block)), cudaSuccess;
}
CUDA cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* to, cudaEvent_t) {
    return std::memset(to, 0, sizeof(*to)), cudaSuccess;
}
CUDA cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* to, cudaIpcEventHandle_t) { return make(to); }

// The driver functions that PyTorch resolves when CUDA starts. `DRIVER_FUNCTIONS` lists those of the installed version.
#define DRIVER(name) \
    CUDA int name() { return 0; }
DRIVER_FUNCTIONS(DRIVER)
CUDA int cuDeviceGet(int* to, int ordinal) { return *to = ordinal, 0; }
CUDA int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
