// Softmax cross-entropy.
//
//   softmax_cross_entropy  losses[r] = ln(sum_c e^x[r,c]) - x[r,label]; dlogits = (softmax(x) - onehot(label)) * scale
//   cross_entropy_loss     only the losses, for evaluation
//   mean_loss              out[0] = mean of the losses, by one block; out[cursor[0]] if there is a cursor
//
// One warp processes a row; softmax_cross_entropy uses half a warp for up to 16 classes. The other half would only add
// zeros, so the bits are the same. The row's maximum is subtracted first, so no exponential overflows. A label that is
// not a class gives NaN for the loss and for the row's gradient.
#include "softmax.cuh"

enum : u32 { ROWS_PER_BLOCK = 4, HALF = WARP / 2 };

template <u32 LANES, typename T>
__device__ __forceinline__ void loss_and_gradient(const float* __restrict__ logits, const u32* __restrict__ labels,
                                                  float* __restrict__ losses, T* __restrict__ dlogits, u32 rows,
                                                  u32 classes, u32 dlogits_pitch, float scale) {
    const u64 own = static_cast<u64>(blockIdx.x) * (WARP / LANES * ROWS_PER_BLOCK) + threadIdx.x / LANES;
    // All lanes of a warp take part in its shuffles, so lanes without a row process the last row and write nothing.
    const u64 row = own < rows ? own : rows - 1;
    const u32 lane = threadIdx.x % LANES;
    const float* x = logits + row * classes;
    const u32 label = labels[row];
    const RowStatistics statistics = row_statistics<LANES>(x, classes, lane);
    if (own >= rows) return;
    if (lane == 0) losses[row] = row_loss(x, classes, label, statistics);
    write_gradient<LANES>(x, dlogits + row * dlogits_pitch, classes, label, scale, lane, statistics);
}

#define SOFTMAX_CROSS_ENTROPY(NAME, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(WARP* ROWS_PER_BLOCK)                                               \
        NAME(const float* __restrict__ logits, const u32* __restrict__ labels, float* __restrict__ losses,           \
             T* __restrict__ dlogits, u32 rows, u32 classes, u32 dlogits_pitch, float scale) {                       \
        if (classes <= HALF) {                                                                                       \
            loss_and_gradient<HALF>(logits, labels, losses, dlogits, rows, classes, dlogits_pitch, scale);           \
        } else {                                                                                                     \
            loss_and_gradient<WARP>(logits, labels, losses, dlogits, rows, classes, dlogits_pitch, scale);           \
        }                                                                                                            \
    }

SOFTMAX_CROSS_ENTROPY(softmax_cross_entropy, float)
SOFTMAX_CROSS_ENTROPY(softmax_cross_entropy_bf16, bf16)
SOFTMAX_CROSS_ENTROPY(softmax_cross_entropy_f16, f16)

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

// MEAN_AHEAD: number of losses that a thread loads before it adds the first. There is only one block, and the number of
// loads in flight limits its bandwidth.
enum : u32 { MEAN_THREADS = 256, MEAN_AHEAD = 32 };

extern "C" __global__ void __launch_bounds__(MEAN_THREADS)
    mean_loss(const float* __restrict__ losses, float* __restrict__ out, const u32* __restrict__ cursor, u32 rows) {
    __shared__ float partial[MEAN_THREADS];
    float sum = 0.0f;
    u64 row = threadIdx.x;
    for (; row + (MEAN_AHEAD - 1) * MEAN_THREADS < rows; row += MEAN_AHEAD * MEAN_THREADS) {
        float some[MEAN_AHEAD];
#pragma unroll
        for (u32 i = 0; i < MEAN_AHEAD; ++i) some[i] = losses[row + i * MEAN_THREADS];
#pragma unroll
        for (u32 i = 0; i < MEAN_AHEAD; ++i) sum += some[i];
    }
    for (; row < rows; row += MEAN_THREADS) sum += losses[row];
    partial[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll
    for (u32 half = MEAN_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[cursor == nullptr ? 0 : cursor[0]] = partial[0] / static_cast<float>(rows);
}
