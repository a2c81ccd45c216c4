// A graph that allocates, launched among plain allocations; then the device is reset and used again.
#include "check.cuh"

__global__ void increment(float* values) { values[threadIdx.x] += 1; }

int main() {
    float *values, *inner, result[32];
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    OK(cudaMalloc(&values, sizeof result));
    OK(cudaMemset(values, 0, sizeof result));
    OK(cudaStreamCreate(&stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    increment<<<1, 32, 0, stream>>>(values);
    OK(cudaMallocAsync(&inner, 4096, stream));
    OK(cudaMemsetAsync(inner, 0, sizeof result, stream));
    increment<<<1, 32, 0, stream>>>(inner);
    OK(cudaFreeAsync(inner, stream));
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&executable, graph, 0));
    for (int i = 0; i < 10; i++) {
        void* other;
        OK(cudaMalloc(&other, 1 << 20));
        OK(cudaGraphLaunch(executable, stream));
        OK(cudaFree(other));
    }
    OK(cudaStreamSynchronize(stream));
    OK(cudaMemcpy(result, values, sizeof result, cudaMemcpyDeviceToHost));
    OK(cudaDeviceReset());
    OK(cudaMalloc(&values, sizeof result));
    OK(cudaFree(values));
    printf("graph %g\n", result[5]);
    return result[5] != 10;
}
