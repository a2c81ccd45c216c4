// Loss and softmax of a row of logits, by `LANES` lanes: one warp or half a warp. The row's maximum is subtracted
// first, so no exponential overflows.
#pragma once

#include "element.cuh"

struct RowStatistics {
    float max;
    float sum;  // of e^(x - max)
};

template <u32 LANES = WARP>
__device__ __forceinline__ RowStatistics row_statistics(const float* __restrict__ x, u32 classes, u32 lane) {
    float max = minus_infinity();
    for (u64 c = lane; c < classes; c += LANES) max = fmaxf(max, x[c]);
    max = warp_max<LANES>(max);
    float sum = 0.0f;
    for (u64 c = lane; c < classes; c += LANES) sum += expf(x[c] - max);
    return {max, warp_sum<LANES>(sum)};
}

__device__ __forceinline__ float row_loss(const float* __restrict__ x, u32 classes, u32 label, RowStatistics row) {
    // Subtracts two small numbers; ln(sum of e^x) - x[label] would subtract two large numbers that are nearly equal.
    return label < classes ? logf(row.sum) - (x[label] - row.max) : not_a_number();
}

// dlogits = (softmax(x) - onehot(label)) * scale; a label that is not a class gives a row of NaN.
template <u32 LANES = WARP, typename T>
__device__ __forceinline__ void write_gradient(const float* __restrict__ x, T* __restrict__ gradient, u32 classes,
                                               u32 label, float scale, u32 lane, RowStatistics row) {
    for (u64 c = lane; c < classes; c += LANES) {
        const float probability = expf(x[c] - row.max) / row.sum;
        const float slope = (probability - (c == label ? 1.0f : 0.0f)) * scale;
        gradient[c] = Stored<T>::of(label < classes ? slope : not_a_number());
    }
}
