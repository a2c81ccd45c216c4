// Softmax cross-entropy.
//
//   softmax_cross_entropy  losses[r] = ln(sum_c e^x[r,c]) - x[r,label]; dlogits = (softmax(x) - onehot(label)) * scale
//   cross_entropy_loss     the losses alone, for evaluation
//   mean_loss              out[0] = mean of the losses, in one block
//
// One warp for each row. The row's maximum is subtracted first, so no exponential overflows. A label that is no class
// gives NaN for the loss and for the row's gradient.
#include "common.cuh"

enum : u32 { ROWS_PER_BLOCK = 4 };

struct RowStatistics {
    float max;
    float sum;  // of e^(x - max)
};

__device__ __forceinline__ RowStatistics row_statistics(const float* __restrict__ x, u32 classes, u32 lane) {
    float max = minus_infinity();
    for (u64 c = lane; c < classes; c += WARP) max = fmaxf(max, x[c]);
    max = warp_max(max);
    float sum = 0.0f;
    for (u64 c = lane; c < classes; c += WARP) sum += expf(x[c] - max);
    return {max, warp_sum(sum)};
}

__device__ __forceinline__ float row_loss(const float* __restrict__ x, u32 classes, u32 label, RowStatistics row) {
    // Two small numbers are subtracted, not two large ones that differ by little.
    return label < classes ? logf(row.sum) - (x[label] - row.max) : not_a_number();
}

extern "C" __global__ void __launch_bounds__(WARP * ROWS_PER_BLOCK)
    softmax_cross_entropy(const float* __restrict__ logits, const u32* __restrict__ labels, float* __restrict__ losses,
                          float* __restrict__ dlogits, u32 rows, u32 classes, float scale) {
    const u64 row = static_cast<u64>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / WARP;
    if (row >= rows) return;
    const u32 lane = threadIdx.x % WARP;
    const float* x = logits + row * classes;
    const u32 label = labels[row];
    const RowStatistics statistics = row_statistics(x, classes, lane);
    if (lane == 0) losses[row] = row_loss(x, classes, label, statistics);
    for (u64 c = lane; c < classes; c += WARP) {
        const float probability = expf(x[c] - statistics.max) / statistics.sum;
        const float gradient = (probability - (c == label ? 1.0f : 0.0f)) * scale;
        dlogits[row * classes + c] = label < classes ? gradient : not_a_number();
    }
}

extern "C" __global__ void __launch_bounds__(WARP * ROWS_PER_BLOCK)
    cross_entropy_loss(const float* __restrict__ logits, const u32* __restrict__ labels, float* __restrict__ losses,
                       u32 rows, u32 classes) {
    const u64 row = static_cast<u64>(blockIdx.x) * ROWS_PER_BLOCK + threadIdx.x / WARP;
    if (row >= rows) return;
    const u32 lane = threadIdx.x % WARP;
    const float* x = logits + row * classes;
    const RowStatistics statistics = row_statistics(x, classes, lane);
    if (lane == 0) losses[row] = row_loss(x, classes, labels[row], statistics);
}

enum : u32 { MEAN_THREADS = 256 };

extern "C" __global__ void __launch_bounds__(MEAN_THREADS)
    mean_loss(const float* __restrict__ losses, float* __restrict__ out, u32 rows) {
    __shared__ float partial[MEAN_THREADS];
    float sum = 0.0f;
    for (u64 row = threadIdx.x; row < rows; row += MEAN_THREADS) sum += losses[row];
    partial[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll
    for (u32 half = MEAN_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = partial[0] / static_cast<float>(rows);
}
