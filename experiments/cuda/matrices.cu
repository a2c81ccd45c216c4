// Two products of matrices a step, with memory that is allocated and freed in the step: matrices STEPS WIDTH STREAMS [check|kept]
//
// STREAMS is 0 for the default stream, else the number of non-blocking streams, or of blocking ones if it is negative. With `check`
// the first matrix has other values in every step and every result enters the total, so that a block that is used too early changes it.
// With `kept` each stream's memory is allocated before the first step, so that a step makes no memory call.
#include <cstring>
#include <vector>

#include "check.cuh"

__global__ void fill(float* out, unsigned seed) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x, value = (at + seed) * 2654435761u;
    value ^= value >> 15;
    value *= 2246822519u;
    value ^= value >> 13;
    out[at] = (float)(value & 0xffff) / 65536.f - 0.5f;
}

__global__ void multiply(const float* left, const float* right, float* out, int width, bool clamp) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < width; k++) sum += left[row * width + k] * right[k * width + column];
    out[row * width + column] = clamp ? fmaxf(sum, 0) : sum;
}

__global__ void add_to(double* total, const float* values, int count) {
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += values[i] * (1 + i % 7);
    atomicAdd(total, sum);
}

int main(int count, char** words) {
    int steps = count > 1 ? atoi(words[1]) : 2000, width = count > 2 ? atoi(words[2]) : 512;
    int wanted = count > 3 ? atoi(words[3]) : 0;
    bool check = count > 4 && !strcmp(words[4], "check"), kept = count > 4 && !strcmp(words[4], "kept");
    int cells = width * width;
    size_t bytes = sizeof(float) * cells;
    std::vector<cudaStream_t> streams(wanted ? abs(wanted) : 1, nullptr);
    if (wanted)
        for (cudaStream_t& stream : streams)
            OK(cudaStreamCreateWithFlags(&stream, wanted < 0 ? cudaStreamDefault : cudaStreamNonBlocking));
    float *weights, *input;
    double *total, result;
    OK(cudaMalloc(&weights, bytes));
    OK(cudaMalloc(&input, bytes));
    OK(cudaMalloc(&total, sizeof *total));
    OK(cudaMemset(total, 0, sizeof *total));
    fill<<<cells / 256, 256>>>(weights, 1);
    fill<<<cells / 256, 256>>>(input, 9);
    std::vector<float*> hiddens(streams.size()), outputs(streams.size());
    for (size_t i = 0; kept && i < streams.size(); i++) {
        OK(cudaMalloc(&hiddens[i], bytes));
        OK(cudaMalloc(&outputs[i], bytes));
    }
    OK(cudaDeviceSynchronize());
    dim3 grid(width / 16, width / 16), block(16, 16);
    Clock clock;
    for (int step = 0; step < steps; step++) {
        size_t at = step % streams.size();
        cudaStream_t stream = streams[at];
        float *hidden = hiddens[at], *output = outputs[at];
        if (!kept) OK(cudaMalloc(&hidden, bytes));
        if (check)
            fill<<<cells / 256, 256, 0, stream>>>(hidden, step);
        else
            multiply<<<grid, block, 0, stream>>>(input, weights, hidden, width, true);
        if (!kept) OK(cudaMalloc(&output, bytes));
        multiply<<<grid, block, 0, stream>>>(hidden, weights, output, width, false);
        if (check) add_to<<<1, 256, 0, stream>>>(total, output, cells);
        if (kept) continue;
        OK(cudaFree(hidden));
        OK(cudaFree(output));
    }
    OK(cudaDeviceSynchronize());
    double us = clock.seconds() / steps * 1e6;
    OK(cudaMemcpy(&result, total, sizeof result, cudaMemcpyDeviceToHost));
    printf("%.1f us a step, total %.6e\n", us, result);
}
