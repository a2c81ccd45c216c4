// A smoothing loop over managed memory that the host reads: managed [STEPS]
#include "check.cuh"

__global__ void smooth(const float* in, float* out, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    bool inner = i > 0 && i < count - 1;
    out[i] = inner ? (in[i - 1] + in[i] + in[i + 1]) / 3 : in[i];
}

int main(int argc, char** words) {
    int steps = argc > 1 ? atoi(words[1]) : 200, count = 1 << 16;
    size_t bytes = count * sizeof(float);
    float *values, total = 0;
    OK(cudaMallocManaged(&values, bytes));
    for (int i = 0; i < count; i++) values[i] = i % 100;
    Clock clock;
    for (int step = 0; step < steps; step++) {
        float *half, *next;
        OK(cudaMallocManaged(&next, bytes));
        OK(cudaMalloc(&half, bytes));
        smooth<<<(count + 255) / 256, 256>>>(values, half, count);
        smooth<<<(count + 255) / 256, 256>>>(half, next, count);
        OK(cudaDeviceSynchronize());
        total += next[count / 2];
        OK(cudaMemcpy(values, next, bytes, cudaMemcpyDefault));
        OK(cudaFree(half));
        OK(cudaFree(next));
    }
    printf("%.1f us a step, total %.6e\n", clock.seconds() / steps * 1e6, total);
}
