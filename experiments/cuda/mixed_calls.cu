// 16 threads that allocate, use and free in mixed ways, each on a stream of its own: mixed_calls [ROUNDS]
//
// A kernel writes a value into each block and another one checks it before the block is freed. `wrong` counts values that changed.
#include <atomic>
#include <thread>
#include <vector>

#include "check.cuh"

__global__ void write(unsigned* out, unsigned value, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = value;
}

__global__ void compare(const unsigned* in, unsigned value, int count, int* wrong) {
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        if (in[i] != value) atomicAdd(wrong, 1);
}

static std::atomic<long> refused{0}, calls{0};

struct Held {
    unsigned* at = nullptr;
    int count = 0;
    unsigned value = 0;
    bool ordered = false;
};

static void work(int number, int rounds, int* wrong) {
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Held held[16];
    unsigned random = number * 7919 + 1;
    for (int round = 0; round < rounds; round++) {
        random = random * 1664525u + 1013904223u;
        Held& block = held[random >> 28];
        bool plain = random & 64;
        cudaError_t code;
        if (block.at) {
            compare<<<1, 128, 0, stream>>>(block.at, block.value, block.count, wrong);
            // CUDA documents that cudaFree does not wait for memory of cudaMallocAsync.
            if (plain && block.ordered) OK(cudaStreamSynchronize(stream));
            code = plain ? cudaFree(block.at) : cudaFreeAsync(block.at, stream);
            block.at = nullptr;
        } else {
            block.count = 1 + (random >> 8) % (1 << (random % 14));
            block.value = random;
            block.ordered = !plain;
            size_t bytes = block.count * sizeof(unsigned);
            code = plain ? cudaMalloc(&block.at, bytes) : cudaMallocAsync(&block.at, bytes, stream);
            if (code == cudaSuccess)
                write<<<1, 128, 0, stream>>>(block.at, block.value, block.count);
            else
                block.at = nullptr;
        }
        if (code != cudaSuccess) refused++;
        calls += 3;
    }
    OK(cudaStreamSynchronize(stream));
    for (Held& block : held)
        if (block.at) OK(cudaFree(block.at));
    OK(cudaGetLastError());
}

int main(int count, char** words) {
    int rounds = count > 1 ? atoi(words[1]) : 5000, *wrong, values;
    OK(cudaMalloc(&wrong, sizeof *wrong));
    OK(cudaMemset(wrong, 0, sizeof *wrong));
    OK(cudaDeviceSynchronize());
    std::vector<std::thread> threads;
    for (int number = 0; number < 16; number++) threads.emplace_back(work, number, rounds, wrong);
    for (std::thread& thread : threads) thread.join();
    OK(cudaDeviceSynchronize());
    OK(cudaMemcpy(&values, wrong, sizeof values, cudaMemcpyDeviceToHost));
    printf("wrong %d refused %ld calls %ld\n", values, refused.load(), calls.load());
    return values != 0 || refused != 0;
}
