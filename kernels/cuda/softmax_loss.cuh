// What one warp does for the loss of a batch; softmax_loss.cu says what is computed, and how blocks share the rows.
#pragma once

#include "argmax.cuh"
#include "softmax.cuh"

enum : u32 { WARPS = 32, BLOCK_ROWS = 128 };

struct RowsOfWarp {
    float sum;  // of the rows' losses
    u32 count;  // of right answers, if they are counted
};

// Rows `first`, `first + WARPS` and so on below `end`: their losses, and unless `dlogits` is null their gradients.
template <typename T>
__device__ __forceinline__ RowsOfWarp rows_of_warp(const float* __restrict__ logits, const u32* __restrict__ labels,
                                                   T* __restrict__ dlogits, u64 first, u64 end, u32 classes,
                                                   u32 dlogits_pitch, float scale, bool counts, u32 lane) {
    RowsOfWarp of = {0.0f, 0};
    for (u64 row = first; row < end; row += WARPS) {
        const float* x = logits + row * classes;
        const u32 label = labels[row];
        const RowStatistics statistics = row_statistics(x, classes, lane);
        of.sum += row_loss(x, classes, label, statistics);
        if (counts) of.count += first_greatest(x, classes, lane) == label ? 1 : 0;
        if (dlogits != nullptr) {
            write_gradient(x, dlogits + row * dlogits_pitch, classes, label, scale, lane, statistics);
        }
    }
    return of;
}
