// What a classifier says, and how often it is right.
//
//   argmax         predictions[r] = first class with the greatest logit; one warp for each row
//   count_correct  out[0] = number of rows whose argmax is the label; one block, one thread for each row
//
// NaN is never the greatest. A row of nothing but NaN and -infinity is class 0. A label that is no class is never right.
#include "argmax.cuh"

enum : u32 { ROWS_PER_BLOCK = 4 };

extern "C" __global__ void __launch_bounds__(WARP * ROWS_PER_BLOCK)
    argmax(const float* __restrict__ logits, u32* __restrict__ predictions, u32 rows, u32 classes) {
    const u64 row = static_cast<u64>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / WARP;
    if (row >= rows) return;
    const u32 lane = threadIdx.x % WARP;
    const u32 best_class = first_greatest(logits + row * classes, classes, lane);
    if (lane == 0) predictions[row] = best_class;
}

enum : u32 { COUNT_THREADS = 1024 };

extern "C" __global__ void __launch_bounds__(COUNT_THREADS)
    count_correct(const float* __restrict__ logits, const u32* __restrict__ labels, u32* __restrict__ out, u32 rows,
                  u32 classes) {
    __shared__ u32 partial[COUNT_THREADS];
    u32 correct = 0;
    for (u64 row = threadIdx.x; row < rows; row += COUNT_THREADS) {
        float best = minus_infinity();
        u32 best_class = 0;
        for (u32 c = 0; c < classes; ++c) {
            const float value = logits[row * classes + c];
            if (value > best) {
                best = value;
                best_class = c;
            }
        }
        correct += best_class == labels[row] ? 1 : 0;
    }
    partial[threadIdx.x] = correct;
    __syncthreads();
#pragma unroll
    for (u32 half = COUNT_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = partial[0];
}
