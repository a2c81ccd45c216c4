// Fused loss of a training step, in one launch: mean cross-entropy, gradient of the logits, number of correct
// predictions.
//
//   loss[0]     mean over the rows of ln(sum_c e^x[r,c]) - x[r,label]; loss[cursor[0]] if there is a cursor
//   dlogits     (softmax(x) - onehot(label)) * scale, unless null
//   correct[0]  number of rows whose argmax is the label, unless null
//   cursor[0]   incremented if `advance`
//
// A warp processes one row at a time; a block has 32 warps with up to four rows each. Sums are added in a fixed order:
// over a warp's rows, over a block's warps, and over the blocks, by the block that finishes last. `workspace` holds the
// sums and then the counts of the blocks. The only atomic counts the finished blocks in `tickets`, which is zero before
// and after a launch. With one block, neither is accessed. A label that is not a class gives NaN for the mean and for
// its row's gradient, and counts as wrong.
#include "softmax.cuh"

// Argmax of a row, by one warp: the first class with the largest logit, returned in every lane. NaN is never the
// maximum; a row with only NaN and -infinity gives class 0.
__device__ __forceinline__ u32 first_greatest(const float* __restrict__ x, u32 classes, u32 lane) {
    float best = minus_infinity();
    u32 best_class = 0;
    for (u64 c = lane; c < classes; c += WARP) {
        const float value = x[c];
        if (value > best) {
            best = value;
            best_class = static_cast<u32>(c);
        }
    }
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, best, distance);
        const u32 other_class = __shfl_xor_sync(ALL_LANES, best_class, distance);
        if (other > best || (other == best && other_class < best_class)) {
            best = other;
            best_class = other_class;
        }
    }
    return best_class;
}

enum : u32 { WARPS = 32, BLOCK_ROWS = 128 };

struct RowsOfWarp {
    float sum;  // of the rows' losses
    u32 count;  // of correct predictions, if `counts`
};

// Computes rows `first`, `first + WARPS` and so on below `end`: their losses, and unless `dlogits` is null their
// gradients.
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

__device__ __forceinline__ u32 warp_count(u32 value) {
#pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

template <typename T>
__device__ __forceinline__ void whole_loss(const float* __restrict__ logits, const u32* __restrict__ labels,
                                           T* __restrict__ dlogits, float* __restrict__ loss, u32* __restrict__ correct,
                                           u32* __restrict__ cursor, u32* __restrict__ workspace,
                                           u32* __restrict__ tickets, u32 rows, u32 classes, u32 dlogits_pitch,
                                           u32 advance, float scale) {
    __shared__ float sums[WARPS];
    __shared__ u32 counts[WARPS];
    const u32 lane = threadIdx.x % WARP;
    const u32 warp = threadIdx.x / WARP;
    const u64 first = static_cast<u64>(blockIdx.x) * BLOCK_ROWS;
    const u64 end = first + BLOCK_ROWS < rows ? first + BLOCK_ROWS : rows;
    const RowsOfWarp own = rows_of_warp(logits, labels, dlogits, first + warp, end, classes, dlogits_pitch, scale,
                                        correct != nullptr, lane);
    float sum = own.sum;
    u32 count = own.count;
    if (lane == 0) {
        sums[warp] = sum;
        counts[warp] = count;
    }
    __syncthreads();
    if (warp != 0) return;
    sum = warp_sum(sums[lane]);
    count = warp_count(counts[lane]);
    if (gridDim.x > 1) {
        u32 finished = 0;
        if (lane == 0) {
            workspace[blockIdx.x] = __float_as_uint(sum);
            workspace[gridDim.x + blockIdx.x] = count;
            // Makes the sums visible to other blocks before the ticket.
            __threadfence();
            finished = atomicAdd(tickets, 1);
        }
        if (__shfl_sync(ALL_LANES, finished, 0) != gridDim.x - 1) return;
        __threadfence();
        // `volatile`, because this multiprocessor's L1 cache does not see the writes of other blocks.
        const volatile u32* others = workspace;
        sum = 0.0f;
        count = 0;
        for (u32 block = lane; block < gridDim.x; block += WARP) {
            sum += __uint_as_float(others[block]);
            count += others[gridDim.x + block];
        }
        sum = warp_sum(sum);
        count = warp_count(count);
        if (lane == 0) tickets[0] = 0;
    }
    if (lane == 0) {
        const u32 step = cursor == nullptr ? 0 : cursor[0];
        loss[step] = sum / static_cast<float>(rows);
        if (correct != nullptr) correct[0] = count;
        if (advance != 0) cursor[0] = step + 1;
    }
}

#define SOFTMAX_LOSS(NAME, T)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARP* WARPS, 1)                                                      \
        NAME(const float* __restrict__ logits, const u32* __restrict__ labels, T* __restrict__ dlogits,              \
             float* __restrict__ loss, u32* __restrict__ correct, u32* __restrict__ cursor,                          \
             u32* __restrict__ workspace, u32* __restrict__ tickets, u32 rows, u32 classes, u32 dlogits_pitch,       \
             u32 advance, float scale) {                                                                             \
        whole_loss(logits, labels, dlogits, loss, correct, cursor, workspace, tickets, rows, classes, dlogits_pitch, \
                   advance, scale);                                                                                  \
    }

SOFTMAX_LOSS(softmax_loss, float)
SOFTMAX_LOSS(softmax_loss_bf16, bf16)
SOFTMAX_LOSS(softmax_loss_f16, f16)
