// Number of correct predictions.
//
//   count_correct  out[0] = number of rows whose argmax (the first class with the largest logit) is the label. One
//                  block; thread i processes rows i, i + 1024, ...
//
// NaN is never the maximum. A row with only NaN and -infinity is predicted as class 0. A label that is not a class
// counts as wrong.
#include "common.cuh"

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
